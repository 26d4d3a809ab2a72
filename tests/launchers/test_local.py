"""The local launcher with real processes: deploy, watch, scale, stop, resume, down, and the failures that it survives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import find_run_pids, read_command_line

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import RunNotFound, StackError
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.common.history_store import RecordedRun, resolve_run_folder
from swarmtrain.launchers.local import LocalLauncher
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.protocol import EVENT_OUTCOME, PROTOCOL_VERSION, RENDEZVOUS_SERVICE, Event
from swarmtrain.remote.remote_agent import RemoteAgent
from swarmtrain.view.status import build_status

pytestmark = pytest.mark.test_all_only("one life of a local run is in the contract")

TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol import Event
import beside
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo")
state = pathlib.Path("state")
step = int(state.read_text()) if state.exists() else 0
print(f"start at {step} of world {dist.get_world_size()}, {pathlib.Path(os.environ['TOKEN_FILE']).read_text()}")
while step < int(sys.argv[1]):
    flag = torch.tensor([len(asked), pathlib.Path("enough").exists()])
    dist.all_reduce(flag)
    if flag[1]:
        break
    if flag[0]:
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if dist.get_rank() == 0:
        pathlib.Path("new").write_text(str(step))
        os.replace("new", state)
        if step % 5 == 0:
            CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"]).post_event(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    launcher = LocalLauncher()
    yield launcher
    for run in launcher.list_runs():
        for pid in list_run_pids(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.tear_down_run(run, print)


def plan_run(
    launcher: LocalLauncher, steps: int, *, script: str = TRAIN, nodes: int = 2, max_nodes: int = 2, stop_grace: float = 10.0
) -> Plan:
    runner = {
        "runner_type": "local",
        "nodes": nodes,
        "min_nodes": 1 if max_nodes > 2 else nodes,
        "max_nodes": max_nodes,
        "script": "training_code.py",
        "script_args": [str(steps)],
        "max_restarts": 1,
        "stop_grace": stop_grace,
    }
    config = Config.from_json(json.dumps({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    code = (RunFile.from_content("training_code.py", script.encode()), RunFile.from_content("beside.py", b""))
    return build_plan(config, launcher.read_inventory(config.runner), Cargo(code, (RunFile.from_content("TOKEN", b"hush"),)), run="demo")


def list_run_pids(folder: Path) -> list[int]:
    """Return the pids of all living processes of the runs of a test with the folder `folder`."""
    return find_run_pids(folder / "home")


def wait_for_event(
    launcher: LocalLauncher, kind: str, condition: Callable[[Event], bool] = lambda _: True, timeout: float = 120.0
) -> Event:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := [event for event in launcher.read_events("demo") if event.kind == kind and condition(event)]:
            return found[-1]
        time.sleep(0.05)
    pytest.fail(f"no {kind}\n" + "\n".join(f"{line.node} {line.text}" for line in launcher.stream_logs("demo", follow=False)))


def follow_to_outcome(launcher: LocalLauncher) -> tuple[str, list[LogLine], list[TaskState]]:
    updates = list(launcher.watch_run("demo"))
    outcome = [update for update in updates if isinstance(update, Event) and update.kind == EVENT_OUTCOME][-1]
    lines = [update for update in updates if isinstance(update, LogLine)]
    return f"{outcome.data['status']}: {outcome.data['reason']}", lines, [update for update in updates if isinstance(update, TaskState)]


def test_a_run_is_brought_up_watched_to_its_end_and_removed(launcher: LocalLauncher, tmp_path: Path) -> None:
    begun = time.time()
    plan = plan_run(launcher, 10)
    assert not [finding for finding in launcher.check_plan(plan) if finding.fatal]
    assert [str(change).partition(":")[0] for change in launcher.plan_changes(plan)] == ["start rendezvous", "start node0", "start node1"]
    launcher.deploy_run(plan, print)
    assert launcher.plan_changes(plan) == []
    assert "start node1: has changed, or has exited" in map(str, launcher.plan_changes(plan_run(launcher, 11)))
    assert "end node1: is not in the plan" in map(str, launcher.plan_changes(plan_run(launcher, 10, nodes=1, max_nodes=2)))
    outcome, lines, states = follow_to_outcome(LocalLauncher())
    assert outcome == "done: all 2 nodes have finished"
    starts = [(line.rank, line.node) for line in lines if line.text == "start at 0 of world 2, hush"]
    assert sorted(rank for rank, _ in starts if rank is not None) == [0, 1]
    assert {node for _, node in starts} == {"node0", "node1"}
    assert {state.node for state in states if state.state == "complete"} >= {"node0", "node1"}
    assert launcher.load_deployment("demo") == (plan.config, plan.cargo)
    assert launcher.list_runs() == ["demo"]
    assert list(launcher.stream_logs("demo", follow=False, since=time.time())) == []
    recorded_run = RecordedRun("demo", launcher.read_identity("demo"))
    launcher.tear_down_run("demo", print)
    assert launcher.list_runs() == []
    printed = [line for line in recorded_run.load_log_lines() if line.time > begun]
    assert sorted(line.rank for line in printed if line.text == "start at 0 of world 2, hush" and line.rank is not None) == [0, 1]
    assert list_run_pids(tmp_path) == []
    assert not list((tmp_path / "home").rglob("TOKEN"))
    with pytest.raises(RunNotFound):
        launcher.list_tasks("demo")


def test_what_another_command_starts_meanwhile_would_not_be_restarted(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_run(launcher, 10_000)
    inspect_run = RemoteAgent.inspect_run

    def inspect_before_another_deploy(agent: RemoteAgent, run: str) -> dict[str, Any]:
        inspection = inspect_run(agent, run)
        with monkeypatch.context() as unpatched:
            unpatched.setattr(RemoteAgent, "inspect_run", inspect_run)
            LocalLauncher().deploy_run(plan, print)
        return inspection

    with monkeypatch.context() as patched:
        patched.setattr(RemoteAgent, "inspect_run", inspect_before_another_deploy)
        changes = launcher.plan_changes(plan)
    assert [str(change) for change in changes if change.interrupts_run] == []


def test_a_run_of_another_version_is_listed_stopped_and_removed_but_not_changed(launcher: LocalLauncher, tmp_path: Path) -> None:
    plan = plan_run(launcher, 10_000)
    launcher.deploy_run(plan, print)
    path = resolve_run_folder("demo") / "local.json"
    record = path.read_text()
    pids = list_run_pids(tmp_path)
    path.write_text(record.replace('"coordinator_port"', '"board_port"').replace(f'"protocol": {PROTOCOL_VERSION}', '"protocol": 1'))
    with pytest.raises(StackError, match="its record was written by another version of swarmtrain"):
        launcher.deploy_run(plan, print)
    assert set(pids) <= set(list_run_pids(tmp_path))
    assert {task.state for task in launcher.list_tasks("demo")} == {"running"}
    launcher.stop_run("demo", print)
    launcher.tear_down_run("demo", print)
    assert list_run_pids(tmp_path) == []


def test_stop_saves_and_up_resumes_where_it_was(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(launcher, 10_000), print)
    wait_for_event(launcher, "progress")
    launcher.stop_run("demo", print)
    assert {task.node: task.state for task in launcher.list_tasks("demo")} == {
        "node0": "shutdown",
        "node1": "shutdown",
        RENDEZVOUS_SERVICE: "running",
    }
    assert build_status("demo", launcher.read_events("demo"), launcher.list_tasks("demo"), time.time()).state == "stopped"
    saved = (tmp_path / "state").read_text()
    assert 0 < int(saved) < 10_000
    (tmp_path / "enough").touch()
    launcher.deploy_run(plan_run(launcher, 10_000), print)
    outcome, lines, _ = follow_to_outcome(launcher)
    assert outcome.startswith("done")
    assert [line.text for line in lines if line.text.startswith("start at")] == [f"start at {saved} of world 2, hush"] * 2


def test_a_killed_supervisor_is_restarted_and_a_killed_coordinator_too(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(launcher, 10_000), print)
    wait_for_event(launcher, "progress")
    before = {name: find_supervisor(tmp_path, name) for name in ("node", "rendezvous")}
    os.kill(before["node"], signal.SIGKILL)
    wait_for_event(launcher, "joined", lambda event: len([1 for each in launcher.read_events("demo") if each.kind == "joined"]) == 3)
    wait_for_event(launcher, "progress", lambda event: len([1 for each in launcher.read_events("demo") if each.kind == "world"]) == 2)
    os.kill(before["rendezvous"], signal.SIGKILL)
    wait_for_event(launcher, "world", lambda event: len([1 for each in launcher.read_events("demo") if each.kind == "world"]) == 3)
    (tmp_path / "enough").touch()
    outcome, _, _ = follow_to_outcome(launcher)
    assert outcome.startswith("done")
    assert len([event for event in launcher.read_events("demo") if event.kind == "coordinator"]) == 2


def test_scaling_up_leaves_the_others_alone_and_down_again(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.deploy_run(plan_run(launcher, 10_000, nodes=1, max_nodes=3), print)
    wait_for_event(launcher, "progress")
    board, first = find_supervisor(tmp_path, "rendezvous"), find_supervisor(tmp_path, "node")
    launcher.deploy_run(plan_scaled_run(launcher, "demo", ScaleRequest(2)), print)
    wait_for_event(launcher, "world", lambda event: event.data["nodes"] == 2)
    assert [task.node for task in launcher.list_tasks("demo")] == ["node0", "node1", RENDEZVOUS_SERVICE]
    assert (board, first) == (find_supervisor(tmp_path, "rendezvous"), find_supervisor(tmp_path, "node"))
    launcher.deploy_run(plan_scaled_run(launcher, "demo", ScaleRequest(1)), print)
    wait_for_event(launcher, "world", lambda event: len([1 for each in launcher.read_events("demo") if each.kind == "world"]) == 3)
    assert [task.node for task in launcher.list_tasks("demo")] == ["node0", RENDEZVOUS_SERVICE]
    assert not [event for event in launcher.read_events("demo") if event.kind == "failure"]
    launcher.tear_down_run("demo", print)
    assert list_run_pids(tmp_path) == []


def test_down_ends_ranks_that_ignore_sigterm(launcher: LocalLauncher, tmp_path: Path) -> None:
    script = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(300)\n"
    launcher.deploy_run(plan_run(launcher, 1, script=script, nodes=1, max_nodes=1, stop_grace=5.0), print)
    wait_for_event(launcher, "world")
    launcher.tear_down_run("demo", print)
    assert list_run_pids(tmp_path) == []


def test_a_new_script_restarts_the_nodes_and_a_failure_is_the_outcome(launcher: LocalLauncher) -> None:
    launcher.deploy_run(plan_run(launcher, 10_000, nodes=1, max_nodes=1), print)
    wait_for_event(launcher, "progress")
    launcher.deploy_run(plan_run(launcher, 10_000, script="raise ValueError('no such thing')\n", nodes=1, max_nodes=1), print)
    outcome, _, _ = follow_to_outcome(launcher)
    assert outcome.startswith("failed: node0 rank 0: ValueError: no such thing, in training_code.py line 1; failed 2 times in a row")


def find_supervisor(folder: Path, role: str) -> int:
    """Return the pid of the oldest process with `role` (node, rendezvous) of a run below `folder`, by start time: pids wrap around."""
    arguments = ["-u", "-m", "swarmtrain.entrypoint", role]
    return min((pid for pid in list_run_pids(folder) if read_command_line(pid)[1:5] == arguments), key=read_start_ticks)


def read_start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since the machine booted: field 22 of proc_pid_stat(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
