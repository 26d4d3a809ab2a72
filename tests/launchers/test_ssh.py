"""The launcher over SSH, with real sshds on three hosts: its whole life, hosts that die, failures, interruptions, two runs at once."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from docker_stand_in import SLOW
from hosts import NAMES, Hosts, hosts_up
from processes import below

from swarmtrain.config import Config
from swarmtrain.config.hosts import settled
from swarmtrain.errors import HostError, RunNotFound, StackError
from swarmtrain.launchers import kept, scaled_plan, ssh
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.ssh import SshDockerLauncher, SshLauncher
from swarmtrain.plan import Cargo, CodeFile, Plan, make_plan
from swarmtrain.wire import RENDEZVOUS, VERDICT, Event

pytestmark = pytest.mark.test_all_only("one life of a run over SSH is in the contract")

ROOT = Path(__file__).parents[2]
HUSH = "hush-7f1c"
# Trains until the file `enough` is there, with a state that all hosts share; a step takes a forty-eighth of a second at least.
TRAIN = """
import datetime, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.board import Board
from swarmtrain.wire import Event
import beside
shared = pathlib.Path(sys.argv[1])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))  # a peer behind a cut link does not even hang up
state, enough = shared / "state", shared / "enough"
step = int(state.read_text()) if state.exists() else 0
secret = pathlib.Path(os.environ["TOKEN_FILE"])
seen = f"{len(secret.read_text())} of {oct(secret.stat().st_mode)}, {os.environ['NCCL_FROM']}"
print(f"start at {step} of world {dist.get_world_size()}, {seen}")
while True:
    flag = torch.tensor([len(asked), dist.get_rank() == 0 and enough.exists()])
    dist.all_reduce(flag)
    if flag[1]:
        break
    if flag[0]:
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if dist.get_rank() == 0:
        (shared / "new").write_text(str(step))
        os.replace(shared / "new", state)
        if step % 5 == 0:
            Board(os.environ["SWARMTRAIN_BOARD"]).post(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up() as made:
        yield made


@pytest.fixture
def launcher(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshLauncher]:
    monkeypatch.setenv("PATH", f"{hosts.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NCCL_FROM", "the shell")
    monkeypatch.chdir(tmp_path)
    made = SshLauncher()
    yield made
    (tmp_path / "enough").touch()
    hosts.mend()
    for run in (*made.runs(), *made.leaving()):
        made.down(run, print)
    assert {name: hosts.programs(name) for name in NAMES} == {name: [] for name in NAMES}


def config_of(folder: Path, *, nodes: int, least: int | None = None, script: str = TRAIN, **more: object) -> Config:
    (folder / "training_code.py").write_text(script)
    (folder / "beside.py").write_text("")
    (folder / "token").write_text(HUSH)
    runner = {
        "runner_type": "pdsh",
        "hosts": ["gpu-[0-2] slots=1"],
        "nodes": nodes,
        "min_nodes": least or nodes,
        "max_nodes": 3,
        "script": "training_code.py",
        "script_args": [str(folder)],
        "max_restarts": 1,
        "stop_grace": 10,
        "env": {"OMP_NUM_THREADS": "1"},
        **more,
    }
    config = Config.from_json(json.dumps({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    return settled(config, folder, os.environ)


def plan_of(config: Config, run: str = "demo") -> Plan:
    code = tuple(CodeFile.of(name, Path(name).read_bytes()) for name in ("training_code.py", "beside.py"))
    return make_plan(config, ssh.inventory(config.runner), Cargo(code, (CodeFile.of("TOKEN", HUSH.encode()),)), run=run)


def until(launcher: SshLauncher, kind: str, where: Callable[[Event], bool] = lambda _: True, timeout: float = 120.0) -> Event:
    end = time.monotonic() + timeout
    events: list[Event] = []
    while time.monotonic() < end and not any(event.kind == VERDICT for event in events):
        events = launcher.events("demo")
        if found := [event for event in events if event.kind == kind and where(event)]:
            return found[-1]
        time.sleep(0.1)
    seen = [event.to_line() for event in launcher.events("demo") if event.kind != "usage"]
    pytest.fail(
        "\n".join([f"no {kind}", *seen, ""]) + "\n".join(f"{line.node} {line.text}" for line in launcher.logs("demo", follow=False))
    )


def verdict_of(launcher: SshLauncher, run: str = "demo") -> tuple[str, list[LogLine], list[TaskState]]:
    updates = list(launcher.watch(run))
    last = [update for update in updates if isinstance(update, Event) and update.kind == VERDICT][-1]
    lines = [update for update in updates if isinstance(update, LogLine)]
    return f"{last.data['status']}: {last.data['why']}", lines, [update for update in updates if isinstance(update, TaskState)]


def test_a_run_is_brought_up_scaled_stopped_resumed_followed_to_its_end_and_removed(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path
) -> None:
    plan = plan_of(config_of(tmp_path, nodes=2))
    assert [finding for finding in launcher.check(plan) if finding.fatal] == []
    assert [str(change) for change in launcher.changes(plan)] == [
        "start rendezvous on gpu-0: is not there",
        "start node0 on gpu-0: is not there",
        "start node1 on gpu-1: is not there",
    ]
    launcher.up(plan, print)
    assert launcher.changes(plan) == []
    until(launcher, "progress")
    shown = [Path(f"/proc/{pid}/{what}").read_bytes() for name in NAMES for pid in hosts.pids(name) for what in ("cmdline", "environ")]
    assert shown
    assert not [each for each in shown if HUSH.encode() in each]
    assert launcher.deployed("demo") == (plan.config, plan.cargo)
    before = [host for host in ("gpu-0", "gpu-1") for _ in hosts.programs(host)]
    again = SshLauncher()
    again.up(scaled_plan(again, "demo", 3), print)
    formed = until(launcher, "world", lambda event: event.data["nodes"] == 3)
    until(launcher, "progress", lambda event: event.time > formed.time)
    assert len(before) <= len([host for host in ("gpu-0", "gpu-1") for _ in hosts.programs(host)])
    assert {task.node: (task.host, task.state) for task in launcher.tasks("demo")} == {
        "node0": ("gpu-0", "running"),
        "node1": ("gpu-1", "running"),
        "node2": ("gpu-2", "running"),
        RENDEZVOUS: ("gpu-0", "running"),
    }
    launcher.up(scaled_plan(launcher, "demo", 2), print)
    assert hosts.programs("gpu-2") == []
    assert not (hosts.state("gpu-2") / "swarmtrain/.hosts/gpu-2").exists()
    launcher.stop("demo", print)
    saved = (tmp_path / "state").read_text()
    launcher.up(scaled_plan(launcher, "demo", 2), print)
    (tmp_path / "enough").touch()
    outcome, _, states = verdict_of(launcher)
    assert outcome == "done: all 2 nodes have finished"
    assert {state.node for state in states if state.state == "complete"} >= {"node0", "node1"}
    lines = [line for line in launcher.logs("demo", follow=True) if f"start at {saved} of world 2" in line.text]
    assert {(line.rank, line.node) for line in lines if line.rank is not None} == {(0, "node0"), (1, "node1")}
    assert lines[0].text.endswith(f"{len(HUSH)} of 0o100600, the shell")
    launcher.down("demo", print)
    assert (launcher.runs(), launcher.leaving()) == ([], [])
    said = [(line.node, line.text) for line in kept.lines("demo")]
    for node, text in (("node0", "start at 0 of world 2"), ("node1", "start at 0 of world 2"), ("node2", " of world 3")):
        assert [line for by, line in said if by == node and text in line], (node, text)
    assert [line for _, line in said if f"start at {saved} of world 2" in line]
    assert kept.events("demo")
    assert not [path for name in NAMES for path in hosts.state(name).rglob("*") if path.name in ("TOKEN", "node0.spec", "local.json")]
    with pytest.raises(RunNotFound):
        launcher.tasks("demo")


def test_the_others_go_on_without_hosts_that_die_or_are_cut_off(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    launcher.up(plan_of(config_of(tmp_path, nodes=3, least=1)), print)
    until(launcher, "world", lambda event: event.data["nodes"] == 3)
    hosts.kill("gpu-2")
    hosts.cut("gpu-1")
    until(launcher, "world", lambda event: event.data["nodes"] == 1)
    assert [task.node for task in launcher.tasks("demo") if task.state == "unreachable"] == ["node1", "node2"]
    told: list[str] = []
    launcher.up(scaled_plan(launcher, "demo", 1), told.append)
    assert sorted(line.partition(";")[0] for line in told) == ["gpu-1 cannot be reached", "gpu-2 cannot be reached"]
    assert [task.node for task in launcher.tasks("demo")] == ["node0", RENDEZVOUS]
    (tmp_path / "enough").touch()
    assert verdict_of(launcher)[0].startswith("done")
    with pytest.raises(StackError, match="gpu-1"):
        launcher.down("demo", print)
    assert (launcher.runs(), launcher.leaving()) == ([], ["demo"])
    hosts.mend()
    launcher.down("demo", print)
    assert launcher.leaving() == []


def swarmtrain(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "swarmtrain", *argv],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


def test_a_failure_is_the_exit_code_and_stops_the_others_and_runs_do_not_meet(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    launcher.up(plan_of(config_of(tmp_path, nodes=1)), print)
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "training_code.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no such thing')\ntime.sleep(600)\n"
    )
    (folder / "hosts").write_text("# two of them\ngpu-0 slots=1\ngpu-1 slots=1  # the other\n")
    (folder / "config.yml").write_text("runner: {runner_type: pdsh, hostsfile: hosts, max_restarts: 0, stop_grace: 5}\n")
    deployed = swarmtrain("deploy", "config.yml", "--name", "bad", cwd=folder)
    out, errors = deployed.communicate(timeout=120)
    assert deployed.returncode == 3, out + errors
    assert "ValueError: no such thing" in errors
    until(launcher, "progress")  # of the one beside it
    left = [line for name in NAMES for line in hosts.programs(name) if "/bad/" in line and RENDEZVOUS not in line]
    assert left == []
    assert swarmtrain("down", "bad", cwd=folder).wait(60) == 0
    assert launcher.runs() == ["demo"]
    (tmp_path / "enough").touch()
    assert verdict_of(launcher)[0].startswith("done")


def test_who_lets_go_of_a_launcher_hangs_up_whatever_is_under_way(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    def connections() -> set[int]:
        return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE and child.name() == "ssh"}

    plan = plan_of(config_of(tmp_path, nodes=1))
    before = connections()
    launchers = [SshLauncher()]
    launchers[0].changes(plan)
    opened = connections() - before
    assert opened

    def in_the_middle_of_starting_threads() -> None:
        with concurrent.futures.thread._global_shutdown_lock:
            launchers.clear()
            gc.collect()

    letting_go = threading.Thread(target=in_the_middle_of_starting_threads, daemon=True)
    letting_go.start()
    letting_go.join(30)
    assert not letting_go.is_alive()
    end = time.monotonic() + 30
    while opened & connections():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("when", ["bringing", "rendezvous started", "node1 started"])
def test_an_interrupted_deploy_leaves_nothing(when: str, launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "training_code.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "config.yml").write_text("runner: {runner_type: pdsh, hosts: ['gpu-[0-1] slots=1'], stop_grace: 5}\n")
    deploy = swarmtrain("deploy", "config.yml", cwd=tmp_path)
    assert deploy.stderr
    seen = []
    for line in deploy.stderr:
        seen.append(line)
        if when in line:
            deploy.send_signal(signal.SIGINT)
            break
    _, errors = deploy.communicate(timeout=60)
    assert deploy.returncode == 130, "".join(seen) + errors
    if launcher.runs():  # it was up already
        assert "detached" in errors or "swarmtrain down config removes it" in errors
        launcher.down("config", print)
    else:
        assert "nothing of it is left" in errors
    assert {name: hosts.programs(name) for name in NAMES} == {name: [] for name in NAMES}


def test_containers_have_names_of_their_run_and_none_is_left(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for docker: tests/launchers/docker_stand_in.py."""
    docker = {"docker_container": "registry.lab/train:1", "docker_mounts": [[str(tmp_path), str(tmp_path)]]}
    config = config_of(tmp_path, nodes=2, runner_type="pdsh_docker", docker_config=docker, python=sys.executable)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.lab": {"auth": "our-login"}, "other": {"auth": "other-login"}}}))
    containers = SshDockerLauncher()
    plan = plan_of(config)
    assert [finding for finding in containers.check(plan) if finding.fatal] == []
    containers.up(plan, print)
    until(containers, "progress")
    asked = (hosts.state("gpu-1") / "containers/asked").read_text()
    assert "pull --quiet registry.lab/train:1" in asked
    assert HUSH not in asked
    assert "our-login" not in asked
    assert not list(hosts.state("gpu-1").rglob("docker/config.json"))
    assert (containers.runs(), launcher.runs()) == (["demo"], [])
    first = int((hosts.state("gpu-1") / "containers/demo-node1").read_text())
    client = next(pid for pid in hosts.pids("gpu-1") if b"start\0--attach\0demo-node1" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(client, signal.SIGKILL)  # its container lives on, and must make room for the next
    until(containers, "world", lambda event: len([1 for each in containers.events("demo") if each.kind == "world"]) == 2)
    assert int((hosts.state("gpu-1") / "containers/demo-node1").read_text()) != first
    containers.stop("demo", print)
    left = {event.data["node"]: event.data["exit_code"] for event in containers.events("demo") if event.kind == "left"}
    assert left == {"node0": 75, "node1": 75}, "they have saved"
    containers.down("demo", print)
    assert not [path for name in ("gpu-0", "gpu-1") for path in (hosts.state(name) / "containers").glob("demo-*")]


def test_containers_that_cannot_start_are_an_error_and_nothing_is_left(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.lab": {"auth": "our-login"}}}))
    docker = {"docker_container": "registry.lab/broken"}
    plan = plan_of(config_of(tmp_path, nodes=2, runner_type="pdsh_docker", docker_config=docker, python=sys.executable))
    containers = SshDockerLauncher()
    with pytest.raises(StackError) as error:
        containers.up(plan, print)
    assert str(error.value) == "rendezvous on gpu-0: Error response from daemon: operation not permitted"
    assert (containers.runs(), {name: hosts.programs(name) for name in NAMES}) == ([], {name: [] for name in NAMES})


def test_a_container_that_is_being_made_when_a_deploy_is_interrupted_is_not_left(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.lab": {"auth": "our-login"}}}))
    runner = "{runner_type: pdsh_docker, hosts: ['gpu-[0-1] slots=1'], docker_config: {docker_container: registry.lab/train:1}}"
    (tmp_path / "config.yml").write_text(f"runner: {runner}\n")
    (tmp_path / "training_code.py").write_text("")
    engine = hosts.state("gpu-1") / "containers"
    engine.mkdir(parents=True, exist_ok=True)
    (engine / "asked").unlink(missing_ok=True)
    (engine / "slow").touch()
    try:
        deploy = swarmtrain("deploy", "config.yml", "--name", "demo", cwd=tmp_path)
        end = time.monotonic() + 60
        while not (engine / "asked").exists() or "create" not in (engine / "asked").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        deploy.send_signal(signal.SIGINT)
        _, errors = deploy.communicate(timeout=60)
        assert (deploy.returncode, "nothing of it is left" in errors) == (130, True), errors
        assert not list(engine.glob("demo-*"))
        time.sleep(SLOW + 0.5)
        assert not list(engine.glob("demo-*"))
    finally:
        (engine / "slow").unlink()


def test_what_hosts_lack_is_found_and_without_hosts_it_is_this_machine(launcher: SshLauncher, tmp_path: Path) -> None:
    plan = plan_of(
        config_of(tmp_path, nodes=3, hosts=["gpu-0 slots=1", "stranger slots=1", "nowhere slots=1"], python="/nonexistent/python")
    )
    found = {finding.place: f"{finding.message}; {finding.hint}" for finding in launcher.check(plan)}
    assert found.keys() == {"host gpu-0", "host stranger", "host nowhere"}
    assert "runner.python" in found["host gpu-0"]
    assert "Permission denied" in found["host stranger"]
    assert "ssh-copy-id stranger" in found["host stranger"]
    assert "Could not resolve hostname nowhere" in found["host nowhere"]
    with pytest.raises(HostError):
        launcher.up(plan, print)
    assert launcher.runs() == []
    here = settled(Config.from_json('{"runner": {"runner_type": "pdsh", "script": "training_code.py"}}'), tmp_path, os.environ)
    Path("training_code.py").write_text("import os\nprint('alone', os.environ['WORLD_SIZE'])\n")
    plan = plan_of(here)
    assert [finding for finding in launcher.check(plan) if finding.fatal] == []
    launcher.up(plan, print)
    outcome, _, _ = verdict_of(launcher)
    assert outcome.startswith("done")
    assert [line.rank for line in launcher.logs("demo", follow=False, node="node0") if line.text == "alone 1"] == [0]
    launcher.down("demo", print)
    assert below(tmp_path / "home") == []
