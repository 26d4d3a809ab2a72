"""The promise, on a real swarm: the same config gives the same losses on one node and on three, scaled, and with ranks killed.

Every run is the quickstart made small; what is compared is what it wrote: metrics.jsonl, a line a step, on the shared disk.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import audit
import curves
import pytest
from scene import SIGNAL

from swarmtrain import wire
from swarmtrain.lab import Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.wire import Event

ROOT = Path(__file__).parents[2]
# Long enough for a node to be added while the run goes on, on a fast machine too: half a minute.
STEPS = 400
# Enough for all others.
FEW = 160
SMALL = [
    f"trainer.train_iterations={FEW}",
    f"learning_rate_scheduler.learning_rate_decay_iters={STEPS}",
    "trainer.save_interval=20",
    "trainer.eval_interval=null",
    "trainer.eval_iterations=2",
    "logger.log_interval=50",
    "transformer_architecture.hidden_size=64",
    "transformer_architecture.num_layers=2",
    "transformer_architecture.sequence_length=128",
    "transformer_architecture.precision=float32",
]
# Fewer than this many steps are done when something is killed, and more are to come.
MIDDLE = 20


@pytest.fixture
def launcher(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwarmLauncher]:
    """The launcher on the lab; runs that a test left are taken down, so that it can be used by the next."""
    monkeypatch.setenv("DOCKER_HOST", lab.docker_host("node0"))
    launcher = SwarmLauncher()
    yield launcher
    for run in launcher.runs():
        launcher.down(run, lambda line: None)


def options(image: str, run: str, *more: str) -> list[str]:
    places = f"trainer.save_dir=runs/{run}", f"logger.audit_dir=runs/{run}/audit"
    values = [*SMALL, f"runner.docker_config.docker_container={image}", *places, *more]
    return [word for value in values for word in ("-o", value)]


def swarmtrain(*argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT)


def losses(lab: Lab, run: str) -> dict[int, float]:
    """Return step → loss as the run wrote them down; a step that stands twice is an error."""
    lines = [json.loads(line) for line in (lab.shared / run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "learning_rate" in line]
    assert steps == sorted(set(steps)), "steps are missing order, or stand twice"
    return {line["step"]: line["loss"] for line in lines if "learning_rate" in line}


def nothing_made_again(lab: Lab, run: str) -> None:
    """A world broke, and the next one made no step that had been made before."""
    story = audit.read(lab.shared / run / "audit")
    assert len(story.worlds) >= 2
    assert story.lost == 0


def same(ours: dict[int, float], reference: dict[int, float], steps: int = FEW) -> None:
    """Every one of the first `steps` is there, with the same loss within 1e-5."""
    assert sorted(ours) == list(range(1, steps + 1))
    worst = max(abs(ours[step] / reference[step] - 1) for step in ours)
    print(f"largest relative difference of a loss over {steps} steps: {worst:.1e}")
    assert worst < 1e-5


def wait_for(launcher: SwarmLauncher, run: str, found: Callable[[list[Event]], bool], seconds: float = 240) -> list[Event]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        events = launcher.events(run)
        if found(events):
            return events
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds} s; the board says: {[event.to_line() for event in launcher.events(run)]}")


def past_the_middle(events: list[Event]) -> bool:
    return any(event.kind == wire.CHECKPOINT and event.data["step"] >= MIDDLE for event in events)


def done(events: list[Event]) -> bool:
    return any(event.kind == wire.VERDICT and event.data["status"] == "done" for event in events)


def container(lab: Lab, node: str) -> tuple[str, list[str]]:
    """Return the id of the training container on `node`, and the docker command that speaks to its engine."""
    docker = ["docker", "-H", lab.docker_host(node)]
    ids = subprocess.run([*docker, "ps", "-q", "--filter", f"name=_{node}."], capture_output=True, text=True, check=True).stdout.split()
    assert len(ids) == 1
    return ids[0], docker


@pytest.fixture(scope="module")
def reference(lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The first losses of a run on three nodes that nothing disturbs."""
    return train_undisturbed(lab, image, FEW, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def whole_reference(lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """All losses of that run."""
    return train_undisturbed(lab, image, STEPS, tmp_path_factory.mktemp("reference"))


def train_undisturbed(lab: Lab, image: str, steps: int, state: Path) -> dict[int, float]:
    """Train on three nodes for so many steps, and return the losses."""
    environment = {**os.environ, "DOCKER_HOST": lab.docker_host("node0"), "XDG_STATE_HOME": str(state)}
    run = f"reference-{steps}"
    settings = options(image, run, "runner.min_nodes=3", "runner.max_nodes=3", f"trainer.train_iterations={steps}")
    for words in (["deploy", "examples/quickstart.yml", "--name", run, *settings], ["down", run]):
        subprocess.run([sys.executable, "-m", "swarmtrain", *words], cwd=ROOT, check=True, env=environment, timeout=300)
    return losses(lab, run)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_one_node_gives_the_same_losses_as_three(lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float]) -> None:
    deploy = swarmtrain("deploy", "examples/quickstart.yml", "--name", "one", *options(image, "one", "runner.nodes=1"))
    assert deploy.wait(300) == 0
    same(losses(lab, "one"), reference)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_killed_rank_changes_nothing(lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float], tmp_path: Path) -> None:
    """Deployed by plain `docker stack deploy`, the oldest there is, from the file that `generate` wrote."""
    output = tmp_path / "generated.yml"
    generate = swarmtrain(
        "generate", "examples/quickstart.yml", "--output", str(output), *options(image, "rank", "runner.min_nodes=3", "runner.max_nodes=3")
    )
    assert generate.wait(60) == 0
    oldest = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else shutil.which("docker") or "docker"
    subprocess.run([oldest, "stack", "deploy", "-c", str(output), "rank"], check=True)
    wait_for(launcher, "rank", past_the_middle)
    found, docker = container(lab, "node1")
    subprocess.run([*docker, "exec", found, "python3", "-c", SIGNAL, "rank", str(int(signal.SIGKILL))], check=True)
    events = wait_for(launcher, "rank", done)
    assert "SIGKILL" in [event.data.get("signal") for event in events if event.kind == wire.FAILURE]
    assert any(event.kind == wire.RESUMED and event.data["step"] >= MIDDLE for event in events)
    nothing_made_again(lab, "rank")
    same(losses(lab, "rank"), reference)


def everything_told(lab: Lab, launcher: SwarmLauncher, run: str) -> bytes:
    """Return all that Docker tells of a run and its containers, what it logged, and what it wrote to the shared disk."""
    told = []
    for node in ("node0", "node1", "node2"):
        docker = ["docker", "-H", lab.docker_host(node)]
        kinds = [("container", "ps -aq")]
        kinds += [(kind, f"{kind} ls -q") for kind in ("service", "config", "secret", "network")] if node == "node0" else []
        for kind, listing in kinds:
            ids = subprocess.run([*docker, *listing.split()], capture_output=True, check=True, text=True).stdout.split()
            assert ids
            told.append(subprocess.run([*docker, kind, "inspect", *ids], capture_output=True, check=True).stdout)
    told += [path.read_bytes() for path in sorted((lab.shared / run).rglob("*")) if path.is_file()]
    told += [line.text.encode() for line in launcher.logs(run, follow=False)]
    return b"\n".join(told)


def test_a_killed_container_changes_nothing(
    lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float], tmp_path: Path
) -> None:
    """And a secret that its ranks could read all the time stands nowhere afterwards."""
    (tmp_path / "key").write_text("planted-0123456789")
    planted = f"runner.secrets={{WANDB_API_KEY: {tmp_path / 'key'}}}"
    argv = [
        "deploy",
        "examples/quickstart.yml",
        "--name",
        "container",
        *options(image, "container", "runner.min_nodes=3", "runner.max_nodes=3", planted),
    ]
    deploy = swarmtrain(*argv)
    wait_for_run(launcher, "container")
    wait_for(launcher, "container", past_the_middle)
    found, docker = container(lab, "node2")
    secret = ["exec", found, "sh", "-c", "cat $WANDB_API_KEY_FILE"]
    assert subprocess.run([*docker, *secret], capture_output=True, check=True).stdout == b"planted-0123456789"
    subprocess.run([*docker, "kill", "--signal", "KILL", found], check=True)
    assert deploy.wait(300) == 0
    nothing_made_again(lab, "container")
    same(losses(lab, "container"), reference)
    told = everything_told(lab, launcher, "container")
    assert b"WANDB_API_KEY" in told
    assert b"planted-0123456789" not in told
    assert base64.b64encode(b"planted-0123456789")[:20] not in told


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_death_and_a_scale_change_nothing_and_every_curve_is_unbroken(
    lab: Lab, launcher: SwarmLauncher, image: str, whole_reference: dict[int, float], tmp_path: Path
) -> None:
    engine = Engine(lab.docker_host("node0"))
    sinks = ("logger.use_csv=true", "logger.use_tensorboard=true", "logger.use_wandb=true", "logger.wandb_offline=true")
    more = options(image, "scale", "runner.nodes=2", f"trainer.train_iterations={STEPS}", *sinks)
    deploy = swarmtrain("deploy", "examples/quickstart.yml", "--name", "scale", *more)
    wait_for_run(launcher, "scale")
    wait_for(launcher, "scale", past_the_middle)
    found, docker = container(lab, "node0")
    subprocess.run([*docker, "kill", "--signal", "KILL", found], check=True)
    wait_for(launcher, "scale", lambda events: trains_in_world(events, 2) and times_joined(events, "node0") == 2)
    before = {task["ID"] for task in engine.listing("/tasks", label="com.docker.stack.namespace=scale")}
    assert swarmtrain("scale", "scale", "--nodes", "3").wait(200) == 0
    assert deploy.wait(300) == 0
    after = {task["ID"] for task in engine.listing("/tasks", label="com.docker.stack.namespace=scale")}
    assert before < after
    assert len(after - before) == 1, "scaling restarted a node that was there"
    assert [event.data["nodes"] for event in launcher.events("scale") if event.kind == wire.WORLD][-1] == 3
    ours = losses(lab, "scale")
    same(ours, whole_reference, STEPS)
    folder = lab.shared / "scale"
    for read in (curves.table, curves.tensorboard, curves.wandb):
        assert read(folder) == pytest.approx(ours, rel=1e-6), read.__name__
    page = tmp_path / "page.html"
    assert swarmtrain("report", "scale", "--output", str(page)).wait(60) == 0
    shown, marked = curves.page(page)
    assert {step: ours[step] for step in shown} == pytest.approx(shown, rel=1e-5)
    assert [*shown][-1] == STEPS
    assert max(later - earlier for earlier, later in pairwise(shown)) < STEPS / 4, "twice a second is told of a step"
    assert marked[0] in ("restart", "2 → 1 nodes")
    assert marked[-1] in ("2 → 3 nodes", "1 → 3 nodes")  # the lost one is back in a world before the new ones are, or with them


def times_joined(events: list[Event], node: str) -> int:
    return sum(event.kind == wire.JOINED and event.data["node"] == node for event in events)


def trains_in_world(events: list[Event], number: int) -> bool:
    """Whether the world of this number, counted from 1, has made a step."""
    worlds = [event.time for event in events if event.kind == wire.WORLD]
    return len(worlds) >= number and any(event.kind == wire.PROGRESS and event.time > worlds[number - 1] for event in events)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_stop_in_the_middle_changes_nothing(lab: Lab, launcher: SwarmLauncher, image: str, reference: dict[int, float]) -> None:
    """The notice board stays; what it knew is known still when the run goes on."""
    argv = ["deploy", "examples/quickstart.yml", "--name", "stop", *options(image, "stop", "runner.min_nodes=3", "runner.max_nodes=3")]
    deploy = swarmtrain(*argv)
    wait_for_run(launcher, "stop")
    wait_for(launcher, "stop", past_the_middle)
    assert swarmtrain("stop", "stop").wait(120) == 0
    assert deploy.wait(60) == 3
    before = launcher.events("stop")
    assert past_the_middle(before)
    assert not done(before)
    assert swarmtrain(*argv).wait(300) == 0
    after = launcher.events("stop")
    assert after[: len(before)] == before
    assert [event.kind for event in after].count(wire.BOARD_UP) == 1
    assert not any(event.kind == wire.FAILURE for event in after)
    same(losses(lab, "stop"), reference)


def wait_for_run(launcher: SwarmLauncher, run: str) -> None:
    end = time.monotonic() + 60
    while run not in launcher.runs():
        assert time.monotonic() < end, f"{run} did not come up"
        time.sleep(0.3)


@pytest.mark.test_all_only("one more training run on three nodes; the gate keeps the killed container")
def test_a_folder_that_somebody_made_as_himself_can_be_written(lab: Lab, launcher: SwarmLauncher, image: str) -> None:
    """Nothing is said about the user: the ranks are the folder's owner, as the machine that deploys sees it."""
    theirs = lab.shared / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 1234, 1234)
    mounts = "runner.docker_config.docker_mounts=[[/mnt/shared/theirs, /workspace/runs]]"
    run = ["examples/quickstart.yml", "--name", "theirs", *options(image, "first", mounts, "runner.nodes=1", "trainer.train_iterations=2")]
    deploy = [*lab.enter("node0", folder=ROOT), sys.executable, "-m", "swarmtrain", "deploy", *run]
    done = subprocess.run(deploy, env=lab.environment_on("node0", os.environ), timeout=200, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "user: 1234:1234, the owner of /mnt/shared/theirs here" in done.stderr
    checkpoint = (theirs / "first" / "step-00000002").stat()
    assert (checkpoint.st_uid, checkpoint.st_gid) == (1234, 1234)
    # From another machine, which has no such folder, there is nothing to change.
    again = subprocess.run([sys.executable, "-m", "swarmtrain", "plan", *run, "--json"], cwd=ROOT, check=True, capture_output=True)
    plan = json.loads(again.stdout)
    assert plan["differences"] == plan["changes"] == []
    assert plan["notes"] == ["user: 1234:1234, as the run that is up has it"]
