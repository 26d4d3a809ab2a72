"""The central guarantee, on a real swarm: the same config gives the same losses on one node and on three, when scaled, and after kills.

Every run is a small quickstart. What is compared is what it wrote: metrics.jsonl, a line per step, on the shared disk.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import loss_curves
import pytest
from chaos_run import SIGNAL_SCRIPT
from fault_suspects import SUSPECTS, find_suspect
from training_helpers import (
    FEW_STEPS,
    MIDDLE_STEP,
    ROOT,
    STEPS,
    assert_nothing_recomputed,
    assert_same_losses,
    build_options,
    is_done,
    is_past_the_middle,
    read_losses,
    start_swarmtrain,
    wait_for_events,
)

from swarmtrain import protocol
from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.protocol import Event
from swarmtrain.queueing import queue_service
from swarmtrain.view.run_state import diagnose_live_run


@pytest.fixture
def launcher(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwarmLauncher]:
    """The launcher on the lab. Runs that a test leaves up are taken down, so that the next test has a clean lab."""
    monkeypatch.setenv("DOCKER_HOST", lab.get_docker_host("node0"))
    launcher = SwarmLauncher()
    yield launcher
    for run in launcher.list_runs():
        launcher.tear_down_run(run, lambda line: None)


def find_container(lab: Lab, node: str) -> tuple[str, list[str]]:
    """Return the id of the training container on `node`, and the docker command for its engine."""
    docker = ["docker", "-H", lab.get_docker_host(node)]
    ids = subprocess.run([*docker, "ps", "-q", "--filter", f"name=_{node}."], capture_output=True, text=True, check=True).stdout.split()
    assert len(ids) == 1
    return ids[0], docker


@pytest.fixture(scope="module")
def reference(lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the first FEW_STEPS steps of an undisturbed run on three nodes."""
    return train_undisturbed(lab, image, FEW_STEPS, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def full_reference(lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of all STEPS steps of an undisturbed run on three nodes."""
    return train_undisturbed(lab, image, STEPS, tmp_path_factory.mktemp("reference"))


def train_undisturbed(lab: Lab, image: str, steps: int, state: Path) -> dict[int, float]:
    """Train on three nodes for this many steps, and return the losses."""
    environment = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0"), "XDG_STATE_HOME": str(state)}
    run = f"reference-{steps}"
    settings = build_options(image, run, "runner.min_nodes=3", "runner.max_nodes=3", f"trainer.train_iterations={steps}")
    for words in (["deploy", "examples/quickstart.yml", "--name", run, *settings], ["down", run]):
        subprocess.run([sys.executable, "-m", "swarmtrain", *words], cwd=ROOT, check=True, env=environment, timeout=300)
    return read_losses(lab, run)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_one_node_gives_the_same_losses_as_three(lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float]) -> None:
    deploy = start_swarmtrain("deploy", "examples/quickstart.yml", "--name", "one", *build_options(image, "one", "runner.nodes=1"))
    assert deploy.wait(300) == 0
    assert_same_losses(read_losses(lab, "one"), reference)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_killed_rank_changes_nothing(lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float], tmp_path: Path) -> None:
    """Deployed by plain `docker stack deploy`, with the oldest docker client, from the file that `generate` wrote."""
    output = tmp_path / "generated.yml"
    generate = start_swarmtrain(
        "generate",
        "examples/quickstart.yml",
        "--output",
        str(output),
        *build_options(image, "rank", "runner.min_nodes=3", "runner.max_nodes=3"),
    )
    assert generate.wait(60) == 0
    oldest = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else shutil.which("docker") or "docker"
    subprocess.run([oldest, "stack", "deploy", "-c", str(output), "rank"], check=True)
    wait_for_events(launcher, "rank", is_past_the_middle)
    found, docker = find_container(lab, "node1")
    subprocess.run([*docker, "exec", found, "python3", "-c", SIGNAL_SCRIPT, "rank", str(int(signal.SIGKILL))], check=True)
    events = wait_for_events(launcher, "rank", is_done)
    assert "SIGKILL" in [event.data.get("signal") for event in events if event.kind == protocol.EVENT_FAILURE]
    assert any(event.kind == protocol.EVENT_RESUMED and event.data["step"] >= MIDDLE_STEP for event in events)
    diagnosis = str(diagnose_live_run(launcher, "rank"))
    assert re.fullmatch(SUSPECTS["a rank is killed"], find_suspect(diagnosis)), diagnosis
    assert_nothing_recomputed(lab, "rank")
    assert_same_losses(read_losses(lab, "rank"), reference)


def collect_all_output(lab: Lab, launcher: SwarmLauncher, run: str) -> bytes:
    """Return everything that Docker knows about a run and its containers, its logs, and what it wrote to the shared disk."""
    outputs = []
    for node in ("node0", "node1", "node2"):
        docker = ["docker", "-H", lab.get_docker_host(node)]
        kinds = [("container", "ps -aq")]
        kinds += [(kind, f"{kind} ls -q") for kind in ("service", "config", "secret", "network")] if node == "node0" else []
        for kind, listing in kinds:
            ids = subprocess.run([*docker, *listing.split()], capture_output=True, check=True, text=True).stdout.split()
            assert ids
            outputs.append(subprocess.run([*docker, kind, "inspect", *ids], capture_output=True, check=True).stdout)
    outputs += [path.read_bytes() for path in sorted((lab.shared_disk / run).rglob("*")) if path.is_file()]
    outputs += [line.text.encode() for line in launcher.stream_logs(run, follow=False)]
    return b"\n".join(outputs)


def test_a_killed_container_changes_nothing(
    lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float], tmp_path: Path
) -> None:
    """Also, a secret that its ranks could read all the time appears nowhere afterwards."""
    (tmp_path / "key").write_text("planted-0123456789")
    planted = f"runner.secrets={{WANDB_API_KEY: {tmp_path / 'key'}}}"
    argv = [
        "deploy",
        "examples/quickstart.yml",
        "--name",
        "container",
        *build_options(image, "container", "runner.min_nodes=3", "runner.max_nodes=3", planted),
    ]
    deploy = start_swarmtrain(*argv)
    wait_for_run(launcher, "container")
    wait_for_events(launcher, "container", is_past_the_middle)
    found, docker = find_container(lab, "node2")
    secret = ["exec", found, "sh", "-c", "cat $WANDB_API_KEY_FILE"]
    assert subprocess.run([*docker, *secret], capture_output=True, check=True).stdout == b"planted-0123456789"
    subprocess.run([*docker, "kill", "--signal", "KILL", found], check=True)
    assert deploy.wait(300) == 0
    diagnosis = str(diagnose_live_run(launcher, "container"))
    assert find_suspect(diagnosis) == "node2", diagnosis
    assert "exit code 137, which is SIGKILL" in diagnosis
    assert_nothing_recomputed(lab, "container")
    assert_same_losses(read_losses(lab, "container"), reference)
    output = collect_all_output(lab, launcher, "container")
    assert b"WANDB_API_KEY" in output
    assert b"planted-0123456789" not in output
    assert base64.b64encode(b"planted-0123456789")[:20] not in output


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_death_and_a_scale_change_nothing_and_every_curve_is_continuous(
    lab: Lab, launcher: SwarmLauncher, image: str, full_reference: dict[int, float], tmp_path: Path
) -> None:
    engine = DockerEngine(lab.get_docker_host("node0"))
    sinks = ("logger.use_csv=true", "logger.use_tensorboard=true")
    more = build_options(image, "scale", "runner.nodes=2", f"trainer.train_iterations={STEPS}", *sinks)
    deploy = start_swarmtrain("deploy", "examples/quickstart.yml", "--name", "scale", *more)
    wait_for_run(launcher, "scale")
    wait_for_events(launcher, "scale", is_past_the_middle)
    found, docker = find_container(lab, "node0")
    subprocess.run([*docker, "kill", "--signal", "KILL", found], check=True)
    wait_for_events(launcher, "scale", lambda events: has_trained_in_world(events, 2) and count_joins(events, "node0") == 2)
    before = {task["ID"] for task in engine.list_objects("/tasks", label="com.docker.stack.namespace=scale")}
    assert start_swarmtrain("scale", "scale", "--nodes", "3").wait(200) == 0
    assert deploy.wait(300) == 0
    after = {task["ID"] for task in engine.list_objects("/tasks", label="com.docker.stack.namespace=scale")}
    assert before < after
    assert len(after - before) == 1, "scaling restarted a node that was there"
    assert [event.data["nodes"] for event in launcher.read_events("scale") if event.kind == protocol.EVENT_WORLD_FORMED][-1] == 3
    ours = read_losses(lab, "scale")
    assert_same_losses(ours, full_reference, STEPS)
    folder = lab.shared_disk / "scale"
    for read in (loss_curves.read_csv, loss_curves.read_tensorboard):
        assert read(folder) == pytest.approx(ours, rel=1e-6), read.__name__
    page = tmp_path / "page.html"
    assert start_swarmtrain("report", "scale", "--output", str(page)).wait(60) == 0
    shown, marked = loss_curves.read_page(page)
    assert {step: ours[step] for step in shown} == pytest.approx(shown, rel=1e-5)
    assert [*shown][-1] == STEPS
    assert max(later - earlier for earlier, later in pairwise(shown)) < STEPS / 4, "progress is shown about twice a second"
    assert {"restart", "2 → 1 nodes"} & set(marked), marked
    assert marked[-1] in ("2 → 3 nodes", "1 → 3 nodes")  # the killed node rejoins in a world before the new node's, or in the same one


def count_joins(events: list[Event], node: str) -> int:
    return sum(event.kind == protocol.EVENT_NODE_JOINED and event.data["node"] == node for event in events)


def has_trained_in_world(events: list[Event], number: int) -> bool:
    """Return whether the world with this number, counted from 1, has made a step."""
    worlds = [event.time for event in events if event.kind == protocol.EVENT_WORLD_FORMED]
    return len(worlds) >= number and any(event.kind == protocol.EVENT_PROGRESS and event.time > worlds[number - 1] for event in events)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_stop_in_the_middle_changes_nothing(lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float]) -> None:
    """The coordinator stays up, and keeps its state until the run resumes."""
    argv = [
        "deploy",
        "examples/quickstart.yml",
        "--name",
        "stop",
        *build_options(image, "stop", "runner.min_nodes=3", "runner.max_nodes=3"),
    ]
    deploy = start_swarmtrain(*argv)
    wait_for_run(launcher, "stop")
    wait_for_events(launcher, "stop", is_past_the_middle)
    assert start_swarmtrain("stop", "stop").wait(120) == 0
    assert deploy.wait(60) == 3
    before = launcher.read_events("stop")
    assert is_past_the_middle(before)
    assert not is_done(before)
    assert start_swarmtrain(*argv).wait(300) == 0
    after = launcher.read_events("stop")
    assert after[: len(before)] == before
    assert [event.kind for event in after].count(protocol.EVENT_COORDINATOR_STARTED) == 1
    assert not any(event.kind == protocol.EVENT_FAILURE for event in after)
    assert_same_losses(read_losses(lab, "stop"), reference)


@pytest.fixture
def scheduler(lab: Lab, image: str) -> Iterator[None]:
    """A scheduler, so that runs are queued."""
    engine = DockerEngine(lab.get_docker_host("node0"))
    queue_service.start_scheduler(engine, image, print)
    yield
    queue_service.remove_scheduler(engine, print)


@pytest.mark.usefixtures("scheduler")
@pytest.mark.test_all_only("two training runs that take turns; what the scheduler does is in tests/lab/test_queue.py")
@pytest.mark.parametrize("min_nodes", [3, 1])
def test_a_preempted_run_changes_nothing(
    lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float], min_nodes: int
) -> None:
    """The victim saves and stops, or shrinks, for a run of a higher priority, and continues by itself: no step is lost.

    With the same number of nodes all the time, its losses are those of an undisturbed run to the bit.
    """
    run, urgent = f"victim-{min_nodes}", f"urgent-{min_nodes}"
    sizes = f"runner.min_nodes={min_nodes}", "runner.nodes=3", "runner.max_nodes=3"
    argv = ["deploy", "examples/quickstart.yml", "--detach", "--name"]
    assert start_swarmtrain(*argv, run, *build_options(image, run, *sizes)).wait(60) == 0
    wait_for_events(launcher, run, is_past_the_middle)
    submitted_at = time.monotonic()
    more = build_options(image, urgent, "runner.nodes=2", "runner.priority=high", "trainer.train_iterations=40")
    assert start_swarmtrain(*argv, urgent, *more).wait(60) == 0
    wait_for_events(launcher, urgent, lambda events: any(event.kind == protocol.EVENT_PROGRESS for event in events))
    print(f"first step of the urgent run {time.monotonic() - submitted_at:.1f} s after its submission")
    wait_for_events(launcher, urgent, is_done)
    events = wait_for_events(launcher, run, is_done)
    failures = [event.data for event in events if event.kind == protocol.EVENT_FAILURE]
    print(f"failures: {failures}")
    # When nodes leave a running world, ranks of the others may lose their connection to them.
    assert all(min_nodes < 3 and protocol.is_collateral_failure(failure) for failure in failures)
    losses = read_losses(lab, run)
    assert_nothing_recomputed(lab, run)
    assert_same_losses(losses, reference)
    if min_nodes == 3:
        assert losses == reference


def wait_for_run(launcher: SwarmLauncher, run: str) -> None:
    end = time.monotonic() + 60
    while run not in launcher.list_runs():
        assert time.monotonic() < end, f"{run} did not come up"
        time.sleep(0.3)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_folder_that_somebody_made_as_himself_can_be_written(lab: Lab, launcher: SwarmLauncher, image: str) -> None:
    """Without a configured user, the ranks run as the folder's owner, as seen on the machine that deploys."""
    theirs = lab.shared_disk / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 1234, 1234)
    mounts = "runner.docker_config.docker_mounts=[[/mnt/shared/theirs, /workspace/runs]]"
    run = [
        "examples/quickstart.yml",
        "--name",
        "theirs",
        *build_options(image, "first", mounts, "runner.nodes=1", "trainer.train_iterations=2"),
    ]
    deploy = [*lab.build_enter_command("node0", start_folder=ROOT), sys.executable, "-m", "swarmtrain", "deploy", *run]
    done = subprocess.run(
        deploy, env=lab.build_node_environment("node0", os.environ), timeout=200, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "user: 1234:1234, the owner of /mnt/shared/theirs on this machine" in done.stderr
    checkpoint = (theirs / "first" / "step-00000002").stat()
    assert (checkpoint.st_uid, checkpoint.st_gid) == (1234, 1234)
    # Seen from another machine, which has no such folder, there is nothing to change.
    again = subprocess.run([sys.executable, "-m", "swarmtrain", "plan", *run, "--json"], cwd=ROOT, check=True, capture_output=True)
    plan = json.loads(again.stdout)
    assert plan["differences"] == plan["changes"] == []
    assert "user: 1234:1234, as in the run that is already deployed" in plan["notes"]
