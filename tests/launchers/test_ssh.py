"""The launcher over SSH, with real sshds on three hosts: a run's whole life, hosts that die, failures, interruptions, two runs at once."""

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
from intruder import STORE_ANSWER, assert_run_is_undisturbed, attack_from, greet_stores, list_listeners
from processes import find_run_pids
from ssh_hosts import HOST_NAMES, Hosts, start_hosts
from stub_docker import SLOW_SECONDS

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.external_inputs import resolve_external_inputs
from swarmtrain.errors import ImageError, PlanError, RunNotFound, StackError
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.common.history_store import find_recorded_run
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.ssh import SshDockerLauncher, SshLauncher
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.protocol import EVENT_OUTCOME, RENDEZVOUS_SERVICE, RUN_KEY_NAME, Event

pytestmark = pytest.mark.test_all_only("one life of a run over SSH is in the contract")

ROOT = Path(__file__).parents[2]
SECRET = "hush-7f1c"  # noqa: S105
# Trains until the file `enough` exists, with state that all hosts share. A step takes at least 20 ms.
TRAIN = """
import datetime, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol import Event
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
            CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"]).post_event(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts() as hosts:
        yield hosts


@pytest.fixture
def launcher(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshLauncher]:
    monkeypatch.setenv("PATH", f"{hosts.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NCCL_FROM", "the shell")
    monkeypatch.chdir(tmp_path)
    launcher = SshLauncher()
    yield launcher
    (tmp_path / "enough").touch()
    hosts.restore_hosts()
    for run in (*launcher.list_runs(), *launcher.list_terminating_runs()):
        launcher.tear_down_run(run, print)
    assert {name: hosts.list_programs(name) for name in HOST_NAMES} == {name: [] for name in HOST_NAMES}


def build_config(folder: Path, *, nodes: int, min_nodes: int | None = None, script: str = TRAIN, **options: object) -> Config:
    (folder / "training_code.py").write_text(script)
    (folder / "beside.py").write_text("")
    (folder / "token").write_text(SECRET)
    runner = {
        "runner_type": "ssh",
        "hosts": ["gpu-[0-2] slots=1"],
        "nodes": nodes,
        "min_nodes": min_nodes or nodes,
        "max_nodes": 3,
        "script": "training_code.py",
        "script_args": [str(folder)],
        "max_restarts": 1,
        "stop_grace": 10,
        "env": {"OMP_NUM_THREADS": "1"},
        **options,
    }
    config = Config.from_json(json.dumps({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    return resolve_external_inputs(config, folder, os.environ)


def plan_run(config: Config, run: str = "demo") -> Plan:
    code = tuple(RunFile.from_content(name, Path(name).read_bytes()) for name in ("training_code.py", "beside.py"))
    return build_plan(
        config, SshLauncher().read_inventory(config.runner), Cargo(code, (RunFile.from_content("TOKEN", SECRET.encode()),)), run=run
    )


def wait_for_event(launcher: SshLauncher, kind: str, condition: Callable[[Event], bool] = lambda _: True, timeout: float = 120.0) -> Event:
    end = time.monotonic() + timeout
    events: list[Event] = []
    while time.monotonic() < end and not any(event.kind == EVENT_OUTCOME for event in events):
        events = launcher.read_events("demo")
        if found := [event for event in events if event.kind == kind and condition(event)]:
            return found[-1]
        time.sleep(0.1)
    lines = [event.to_line() for event in launcher.read_events("demo") if event.kind != "usage"]
    pytest.fail(
        "\n".join([f"no {kind}", *lines, ""]) + "\n".join(f"{line.node} {line.text}" for line in launcher.stream_logs("demo", follow=False))
    )


def follow_to_outcome(launcher: SshLauncher, run: str = "demo") -> tuple[str, list[LogLine], list[TaskState]]:
    updates = list(launcher.watch_run(run))
    outcome = [update for update in updates if isinstance(update, Event) and update.kind == EVENT_OUTCOME][-1]
    lines = [update for update in updates if isinstance(update, LogLine)]
    return f"{outcome.data['status']}: {outcome.data['reason']}", lines, [update for update in updates if isinstance(update, TaskState)]


def test_a_run_is_brought_up_scaled_stopped_resumed_followed_to_its_end_and_removed(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path
) -> None:
    plan = plan_run(build_config(tmp_path, nodes=2))
    assert [finding for finding in launcher.check_plan(plan) if finding.fatal] == []
    assert [str(change) for change in launcher.plan_changes(plan)] == [
        "start rendezvous on gpu-0: is new",
        "start node0 on gpu-0: is new",
        "start node1 on gpu-1: is new",
    ]
    launcher.deploy_run(plan, print)
    assert launcher.plan_changes(plan) == []
    wait_for_event(launcher, "progress")
    shown = [
        Path(f"/proc/{pid}/{what}").read_bytes() for name in HOST_NAMES for pid in hosts.list_pids(name) for what in ("cmdline", "environ")
    ]
    assert shown
    assert not [each for each in shown if SECRET.encode() in each]
    assert launcher.load_deployment("demo") == (plan.config, plan.cargo)
    before = [host for host in ("gpu-0", "gpu-1") for _ in hosts.list_programs(host)]
    again = SshLauncher()
    again.deploy_run(plan_scaled_run(again, "demo", ScaleRequest(3)), print)
    formed = wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 3)
    wait_for_event(launcher, "progress", lambda event: event.time > formed.time)
    assert len(before) <= len([host for host in ("gpu-0", "gpu-1") for _ in hosts.list_programs(host)])
    assert {task.node: (task.host, task.state) for task in launcher.list_tasks("demo")} == {
        "node0": ("gpu-0", "running"),
        "node1": ("gpu-1", "running"),
        "node2": ("gpu-2", "running"),
        RENDEZVOUS_SERVICE: ("gpu-0", "running"),
    }
    launcher.deploy_run(plan_scaled_run(launcher, "demo", ScaleRequest(2)), print)
    assert hosts.list_programs("gpu-2") == []
    assert not (hosts.get_state_dir("gpu-2") / "swarmtrain/.hosts/gpu-2").exists()
    moved = launcher.plan_changes(plan_scaled_run(launcher, "demo", ScaleRequest(replaced_hosts=("gpu-1",))))
    assert [str(change) for change in moved] == ["end node1 on gpu-1: is not in the plan", "start node1 on gpu-2: is new"]
    launcher.stop_run("demo", print)
    saved = (tmp_path / "state").read_text()
    launcher.deploy_run(plan_scaled_run(launcher, "demo", ScaleRequest(2)), print)
    (tmp_path / "enough").touch()
    outcome, _, states = follow_to_outcome(launcher)
    assert outcome == "done: all 2 nodes have finished"
    assert {state.node for state in states if state.state == "complete"} >= {"node0", "node1"}
    lines = [line for line in launcher.stream_logs("demo", follow=True) if f"start at {saved} of world 2" in line.text]
    assert {(line.rank, line.node) for line in lines if line.rank is not None} == {(0, "node0"), (1, "node1")}
    assert lines[0].text.endswith(f"{len(SECRET)} of 0o100600, the shell")
    launcher.tear_down_run("demo", print)
    assert (launcher.list_runs(), launcher.list_terminating_runs()) == ([], [])
    recorded_run = find_recorded_run("demo")
    assert recorded_run
    said = [(line.node, line.text) for line in recorded_run.load_log_lines()]
    for node, text in (("node0", "start at 0 of world 2"), ("node1", "start at 0 of world 2"), ("node2", " of world 3")):
        assert [line for by, line in said if by == node and text in line], (node, text)
    assert [line for _, line in said if f"start at {saved} of world 2" in line]
    assert recorded_run.load_events()
    assert not [
        path for name in HOST_NAMES for path in hosts.get_state_dir(name).rglob("*") if path.name in ("TOKEN", "node0.spec", "local.json")
    ]
    with pytest.raises(RunNotFound):
        launcher.list_tasks("demo")


def test_the_others_continue_without_hosts_that_die_or_are_partitioned(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(build_config(tmp_path, nodes=3, min_nodes=1)), print)
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 3)
    hosts.power_off_host("gpu-2")
    hosts.partition_host("gpu-1")
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 1)
    assert [task.node for task in launcher.list_tasks("demo") if task.state == "unreachable"] == ["node1", "node2"]
    messages: list[str] = []
    launcher.deploy_run(plan_scaled_run(launcher, "demo", ScaleRequest(1)), messages.append)
    assert sorted(line.partition(";")[0] for line in messages) == ["gpu-1 is unreachable", "gpu-2 is unreachable"]
    assert [task.node for task in launcher.list_tasks("demo")] == ["node0", RENDEZVOUS_SERVICE]
    (tmp_path / "enough").touch()
    assert follow_to_outcome(launcher)[0].startswith("done")
    with pytest.raises(StackError, match="gpu-1"):
        launcher.tear_down_run("demo", print)
    assert (launcher.list_runs(), launcher.list_terminating_runs()) == ([], ["demo"])
    hosts.restore_hosts()
    launcher.tear_down_run("demo", print)
    assert launcher.list_terminating_runs() == []


def start_swarmtrain(*argv: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "swarmtrain", *argv],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


def test_an_intruder_cannot_end_a_run_or_run_code_on_its_hosts(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(build_config(tmp_path, nodes=2)), print)
    [key_file] = hosts.get_state_dir("gpu-0").rglob(RUN_KEY_NAME)
    assert key_file.stat().st_mode & 0o777 == 0o600
    record = launcher._index.read_record("demo")
    coordinator = f"{record.address}:{record.coordinator_port}"
    with attack_from(hosts.lab, "gpu-2", key_file.read_bytes(), coordinator, seconds=20):
        wait_for_event(launcher, "progress")
    # The ranks' store answers on no port that other machines reach, and on loopback only to the user of the run.
    own, intruder = (hosts.lab.build_enter_command(name) for name in ("gpu-0", "gpu-2"))
    listeners = list_listeners(own)
    reachable = [(record.address, port) for host, port in listeners if not host.startswith("127.")]
    local = [(host, port) for host, port in listeners if host.startswith("127.")]
    assert len(reachable) > 2
    assert STORE_ANSWER not in greet_stores(reachable, user=0, enter=intruder)
    answers = [greet_stores(local, user=user, enter=own).count(STORE_ANSWER) for user in (0, 65534)]
    assert answers == [1, 0]
    step = launcher.read_events("demo")[-1].data.get("step", 0)
    wait_for_event(launcher, "progress", lambda event: event.data["step"] > step + 100)
    assert_run_is_undisturbed(launcher.read_events("demo"))
    logs = [path.read_text() for path in hosts.get_state_dir("gpu-0").rglob("rendezvous.*") if path.is_file()]
    assert logs
    assert not any("Traceback" in text for text in logs)
    # The coordinator listens only on the address that the nodes use.
    connect = f"import socket; socket.create_connection(('127.0.0.1', {record.coordinator_port}), 5)"
    argv = [*hosts.lab.build_enter_command("gpu-0"), sys.executable, "-c", connect]
    assert "ConnectionRefusedError" in subprocess.run(argv, capture_output=True, text=True, check=False).stderr
    key = key_file.read_bytes()
    launcher.deploy_run(plan_scaled_run(launcher, "demo", ScaleRequest(3)), print)
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 3)
    assert {path.read_bytes() for name in HOST_NAMES for path in hosts.get_state_dir(name).rglob(RUN_KEY_NAME)} == {key}


def test_a_failure_is_the_exit_code_and_stops_the_others_and_runs_do_not_meet(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(build_config(tmp_path, nodes=1)), print)
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "training_code.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    raise ValueError('no such thing')\ntime.sleep(600)\n"
    )
    (folder / "hosts").write_text("# two of them\ngpu-0 slots=1\ngpu-1 slots=1  # the other\n")
    (folder / "config.yml").write_text("runner: {runner_type: ssh, hostsfile: hosts, max_restarts: 0, stop_grace: 5}\n")
    deployed = start_swarmtrain("deploy", "config.yml", "--name", "bad", cwd=folder)
    out, errors = deployed.communicate(timeout=120)
    assert deployed.returncode == 3, out + errors
    assert "ValueError: no such thing" in errors
    wait_for_event(launcher, "progress")  # of the other run
    left = [line for name in HOST_NAMES for line in hosts.list_programs(name) if "/bad/" in line and RENDEZVOUS_SERVICE not in line]
    assert left == []
    assert start_swarmtrain("down", "bad", cwd=folder).wait(60) == 0
    assert launcher.list_runs() == ["demo"]
    (tmp_path / "enough").touch()
    assert follow_to_outcome(launcher)[0].startswith("done")


def test_releasing_a_launcher_closes_its_connections_whatever_is_under_way(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    def connections() -> set[int]:
        return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE and child.name() == "ssh"}

    plan = plan_run(build_config(tmp_path, nodes=1))
    before = connections()
    launchers = [SshLauncher()]
    launchers[0].plan_changes(plan)
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


@pytest.mark.parametrize("interrupt_at", ["deploying", "rendezvous started", "node1 started"])
def test_an_interrupted_deploy_leaves_nothing(interrupt_at: str, launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "training_code.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "config.yml").write_text("runner: {runner_type: ssh, hosts: ['gpu-[0-1] slots=1'], stop_grace: 5}\n")
    deploy = start_swarmtrain("deploy", "config.yml", cwd=tmp_path)
    assert deploy.stderr
    seen = []
    for line in deploy.stderr:
        seen.append(line)
        if interrupt_at in line:
            deploy.send_signal(signal.SIGINT)
            break
    _, errors = deploy.communicate(timeout=60)
    assert deploy.returncode == 130, "".join(seen) + errors
    if launcher.list_runs():  # it was already up
        assert "detached" in errors or "swarmtrain down config removes it" in errors
        launcher.tear_down_run("config", print)
    else:
        assert "no part of the run remains" in errors
    deadline = time.monotonic() + 5
    while any(hosts.list_programs(name) for name in HOST_NAMES) and time.monotonic() < deadline:
        time.sleep(0.1)  # a process keeper that was starting exits when it finds that its run is gone
    assert {name: hosts.list_programs(name) for name in HOST_NAMES} == {name: [] for name in HOST_NAMES}


def test_containers_have_names_of_their_run_and_all_are_removed(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub of docker: tests/launchers/stub_docker.py."""
    docker = {"docker_container": "registry.lab/train:1", "docker_mounts": [[str(tmp_path), str(tmp_path)]]}
    config = build_config(tmp_path, nodes=2, runner_type="ssh_docker", docker_config=docker, python=sys.executable)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.lab": {"auth": "our-login"}, "other": {"auth": "other-login"}}}))
    containers = SshDockerLauncher()
    plan = plan_run(config)
    assert [finding for finding in containers.check_plan(plan) if finding.fatal] == []
    containers.deploy_run(plan, print)
    wait_for_event(containers, "progress")
    asked = (hosts.get_state_dir("gpu-1") / "containers/commands.log").read_text()
    assert "pull --quiet registry.lab/train:1" in asked
    assert SECRET not in asked
    assert "our-login" not in asked
    assert not list(hosts.get_state_dir("gpu-1").rglob("docker/config.json"))
    assert (containers.list_runs(), launcher.list_runs()) == (["demo"], [])
    first = int((hosts.get_state_dir("gpu-1") / "containers/demo-node1").read_text())
    client = next(pid for pid in hosts.list_pids("gpu-1") if b"start\0--attach\0demo-node1" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(client, signal.SIGKILL)  # its container keeps running, and must be removed before the next starts
    wait_for_event(containers, "world", lambda event: len([1 for each in containers.read_events("demo") if each.kind == "world"]) == 2)
    assert int((hosts.get_state_dir("gpu-1") / "containers/demo-node1").read_text()) != first
    containers.stop_run("demo", print)
    left = {event.data["node"]: event.data["exit_code"] for event in containers.read_events("demo") if event.kind == "left"}
    assert left == {"node0": 75, "node1": 75}, "they have saved"
    containers.tear_down_run("demo", print)
    assert not [path for name in ("gpu-0", "gpu-1") for path in (hosts.get_state_dir(name) / "containers").glob("demo-*")]


def test_containers_that_cannot_start_are_an_error_and_nothing_is_left(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.lab": {"auth": "our-login"}}}))
    docker = {"docker_container": "registry.lab/broken"}
    plan = plan_run(build_config(tmp_path, nodes=2, runner_type="ssh_docker", docker_config=docker, python=sys.executable))
    containers = SshDockerLauncher()
    with pytest.raises(StackError) as error:
        containers.deploy_run(plan, print)
    assert str(error.value) == "rendezvous on gpu-0: Error response from daemon: operation not permitted"
    assert (containers.list_runs(), {name: hosts.list_programs(name) for name in HOST_NAMES}) == ([], {name: [] for name in HOST_NAMES})


def test_a_container_that_is_being_made_when_a_deploy_is_interrupted_is_not_left(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.lab": {"auth": "our-login"}}}))
    runner = "{runner_type: ssh_docker, hosts: ['gpu-[0-1] slots=1'], docker_config: {docker_container: registry.lab/train:1}}"
    (tmp_path / "config.yml").write_text(f"runner: {runner}\n")
    (tmp_path / "training_code.py").write_text("")
    engine = hosts.get_state_dir("gpu-1") / "containers"
    engine.mkdir(parents=True, exist_ok=True)
    (engine / "commands.log").unlink(missing_ok=True)
    (engine / "slow").touch()
    try:
        deploy = start_swarmtrain("deploy", "config.yml", "--name", "demo", cwd=tmp_path)
        end = time.monotonic() + 60
        while not (engine / "commands.log").exists() or "create" not in (engine / "commands.log").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        deploy.send_signal(signal.SIGINT)
        _, errors = deploy.communicate(timeout=60)
        assert (deploy.returncode, "no part of the run remains" in errors) == (130, True), errors
        assert not list(engine.glob("demo-*"))
        time.sleep(SLOW_SECONDS + 0.5)
        assert not list(engine.glob("demo-*"))
    finally:
        (engine / "slow").unlink()


def plan_again(config: Config, launcher: SshLauncher) -> Plan:
    """Return the plan of the existing run with `config`."""
    plan = plan_run(config)
    return build_plan(config, launcher.read_inventory(config.runner), plan.cargo, run="demo", placement=launcher.read_placement("demo"))


def test_a_deploy_proceeds_without_a_host_that_is_off_and_the_next_adds_it(launcher: SshLauncher, hosts: Hosts, tmp_path: Path) -> None:
    config = build_config(tmp_path, nodes=3, min_nodes=2)
    hosts.power_off_host("gpu-1")
    plan = plan_run(config)
    assert {node.name: node.host for node in plan.nodes} == {"node0": "gpu-0", "node1": "gpu-2"}
    assert "without gpu-1, which is not usable over SSH (" in str(plan)
    launcher.deploy_run(plan, print)
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 2)
    hosts.restore_hosts()
    plan = plan_again(config, launcher)
    assert {node.name: node.host for node in plan.nodes} == {"node0": "gpu-0", "node1": "gpu-2", "node2": "gpu-1"}
    assert [action.interrupts_run for action in launcher.plan_changes(plan)] == [False]
    launcher.deploy_run(plan, print)
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 3)
    # A host that dies later remains a host of the run: deploying again changes nothing.
    hosts.power_off_host("gpu-2")
    plan = plan_again(config, launcher)
    assert [(node.name, node.host) for node in plan.missing_nodes] == [("node1", "gpu-2")]
    assert launcher.plan_changes(plan) == []
    launcher.deploy_run(plan, print)
    assert {task.node: task.state for task in launcher.list_tasks("demo")} == {
        "node0": "running",
        "node2": "running",
        "node1": "unreachable",
        RENDEZVOUS_SERVICE: "running",
    }
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 2)
    hosts.restore_hosts()
    launcher.deploy_run(plan_again(config, launcher), print)
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 3)


def test_a_host_that_lacks_the_image_does_not_undo_a_deploy(
    launcher: SshLauncher, hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub of docker, whose pulls fail on hosts with a file `empty`."""
    docker = {"docker_container": "registry.lab/train:1", "docker_mounts": [[str(tmp_path), str(tmp_path)]]}
    options = {"runner_type": "ssh_docker", "docker_config": docker, "python": sys.executable}
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.lab": {"auth": "our-login"}}}))
    containers = SshDockerLauncher()
    marker = hosts.get_state_dir("gpu-1") / "containers" / "empty"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    try:
        with pytest.raises(ImageError, match="host gpu-1: no such manifest"):
            containers.deploy_run(plan_run(build_config(tmp_path, nodes=2, **options)), print)
        assert containers.list_runs() == []
        messages: list[str] = []
        containers.deploy_run(plan_run(build_config(tmp_path, nodes=2, min_nodes=1, **options)), messages.append)
        assert [message for message in messages if message.startswith("host gpu-1: no such manifest; the run starts without this host")]
        wait_for_event(containers, "world", lambda event: event.data["nodes"] == 1)
    finally:
        marker.unlink()
    containers.tear_down_run("demo", print)


def test_what_hosts_lack_is_found_and_without_hosts_it_is_this_machine(launcher: SshLauncher, tmp_path: Path) -> None:
    config = build_config(tmp_path, nodes=3, hosts=["gpu-0 slots=1", "stranger slots=1", "nowhere slots=1"], python="/nonexistent/python")
    with pytest.raises(PlanError) as raised:
        plan_run(config)
    _, *causes = raised.value.messages_with_hints
    found = {message.split(": ")[1]: f"{message}; {hint}" for message, hint in causes}
    assert found.keys() == {"gpu-0", "stranger", "nowhere"}
    assert "runner.python" in found["gpu-0"]
    assert "Permission denied" in found["stranger"]
    assert "ssh-copy-id stranger" in found["stranger"]
    assert "Could not resolve hostname nowhere" in found["nowhere"]
    assert launcher.list_runs() == []
    here = resolve_external_inputs(
        Config.from_json('{"runner": {"runner_type": "ssh", "script": "training_code.py"}}'), tmp_path, os.environ
    )
    Path("training_code.py").write_text("import os\nprint('alone', os.environ['WORLD_SIZE'])\n")
    plan = plan_run(here)
    assert [finding for finding in launcher.check_plan(plan) if finding.fatal] == []
    launcher.deploy_run(plan, print)
    outcome, _, _ = follow_to_outcome(launcher)
    assert outcome.startswith("done")
    assert [line.rank for line in launcher.stream_logs("demo", follow=False, node="node0") if line.text == "alone 1"] == [0]
    launcher.tear_down_run("demo", print)
    assert find_run_pids(tmp_path / "home") == []
