"""The local launcher, with real processes: up, watch, scale, stop, resume, down, and what it survives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import below

from swarmtrain.config import Config
from swarmtrain.errors import RunNotFound
from swarmtrain.host.spec import Spec
from swarmtrain.launchers import kept, local, scaled_plan
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.local import LocalLauncher
from swarmtrain.launchers.local.folder import Facts, RunFolder
from swarmtrain.plan import Cargo, CodeFile, Plan, make_plan
from swarmtrain.view.status import status
from swarmtrain.wire import RENDEZVOUS, VERDICT, Event

pytestmark = pytest.mark.test_all_only("one life of a local run is in the contract")

TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.board import Board
from swarmtrain.wire import Event
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
            Board(os.environ["SWARMTRAIN_BOARD"]).post(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    made = LocalLauncher()
    yield made
    for run in made.runs():
        for pid in ours(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        made.down(run, print)


def plan_of(launcher: LocalLauncher, steps: int, *, script: str = TRAIN, nodes: int = 2, most: int = 2, stop_grace: float = 10.0) -> Plan:
    runner = {
        "runner_type": "local",
        "nodes": nodes,
        "min_nodes": 1 if most > 2 else nodes,
        "max_nodes": most,
        "script": "training_code.py",
        "script_args": [str(steps)],
        "max_restarts": 1,
        "stop_grace": stop_grace,
    }
    config = Config.from_json(json.dumps({"runner": runner, "topology": {"global_batch_size": 12, "micro_batch_size": 1}}))
    code = (CodeFile.of("training_code.py", script.encode()), CodeFile.of("beside.py", b""))
    return make_plan(config, launcher.inventory(), Cargo(code, (CodeFile.of("TOKEN", b"hush"),)), run="demo")


def ours(folder: Path) -> list[int]:
    """Return all living processes of the runs of a test whose folder is `folder`."""
    return below(folder / "home")


def until(launcher: LocalLauncher, kind: str, where: Callable[[Event], bool] = lambda _: True, timeout: float = 120.0) -> Event:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if found := [event for event in launcher.events("demo") if event.kind == kind and where(event)]:
            return found[-1]
        time.sleep(0.05)
    pytest.fail(f"no {kind}\n" + "\n".join(f"{line.node} {line.text}" for line in launcher.logs("demo", follow=False)))


def verdict_of(launcher: LocalLauncher) -> tuple[str, list[LogLine], list[TaskState]]:
    updates = list(launcher.watch("demo"))
    last = [update for update in updates if isinstance(update, Event) and update.kind == VERDICT][-1]
    lines = [update for update in updates if isinstance(update, LogLine)]
    return f"{last.data['status']}: {last.data['why']}", lines, [update for update in updates if isinstance(update, TaskState)]


def test_a_run_is_brought_up_watched_to_its_end_and_removed(launcher: LocalLauncher, tmp_path: Path) -> None:
    begun = time.time()
    plan = plan_of(launcher, 10)
    assert not [finding for finding in launcher.check(plan) if finding.fatal]
    assert [str(change).partition(":")[0] for change in launcher.changes(plan)] == ["start rendezvous", "start node0", "start node1"]
    launcher.up(plan, print)
    assert launcher.changes(plan) == []
    assert "start node1: has changed, or has ended" in map(str, launcher.changes(plan_of(launcher, 11)))
    assert "end node1: is not in the plan" in map(str, launcher.changes(plan_of(launcher, 10, nodes=1, most=2)))
    outcome, lines, states = verdict_of(LocalLauncher())
    assert outcome == "done: all 2 nodes have finished"
    starts = [(line.rank, line.node) for line in lines if line.text == "start at 0 of world 2, hush"]
    assert sorted(rank for rank, _ in starts if rank is not None) == [0, 1]
    assert {node for _, node in starts} == {"node0", "node1"}
    assert {state.node for state in states if state.state == "complete"} >= {"node0", "node1"}
    assert launcher.deployed("demo") == (plan.config, plan.cargo)
    assert launcher.runs() == ["demo"]
    assert list(launcher.logs("demo", follow=False, since=time.time())) == []
    launcher.down("demo", print)
    assert launcher.runs() == []
    printed = [line for line in kept.lines("demo") if line.time > begun]
    assert sorted(line.rank for line in printed if line.text == "start at 0 of world 2, hush" and line.rank is not None) == [0, 1]
    assert ours(tmp_path) == []
    assert not list((tmp_path / "home").rglob("TOKEN"))
    with pytest.raises(RunNotFound):
        launcher.tasks("demo")


def test_what_another_command_starts_meanwhile_would_not_be_restarted(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(launcher, 10_000)
    look = local._compare

    def meanwhile(folder: RunFolder, plan: Plan) -> tuple[Facts, dict[str, Spec], set[str]]:
        seen = look(folder, plan)
        with monkeypatch.context() as before:
            before.setattr(local, "_compare", look)
            LocalLauncher().up(plan, print)
        return seen

    with monkeypatch.context() as patched:
        patched.setattr(local, "_compare", meanwhile)
        changes = launcher.changes(plan)
    assert [str(change) for change in changes if change.interrupts] == []


def test_stop_saves_and_up_goes_on_where_it_was(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.up(plan_of(launcher, 10_000), print)
    until(launcher, "progress")
    launcher.stop("demo", print)
    assert {task.node: task.state for task in launcher.tasks("demo")} == {"node0": "shutdown", "node1": "shutdown", RENDEZVOUS: "running"}
    assert status("demo", launcher.events("demo"), launcher.tasks("demo"), time.time()).state == "stopped"
    saved = (tmp_path / "state").read_text()
    assert 0 < int(saved) < 10_000
    (tmp_path / "enough").touch()
    launcher.up(plan_of(launcher, 10_000), print)
    outcome, lines, _ = verdict_of(launcher)
    assert outcome.startswith("done")
    assert [line.text for line in lines if line.text.startswith("start at")] == [f"start at {saved} of world 2, hush"] * 2


def test_a_killed_supervisor_is_started_again_and_a_killed_board_too(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.up(plan_of(launcher, 10_000), print)
    until(launcher, "progress")
    before = {name: supervisor(tmp_path, name) for name in ("node", "rendezvous")}
    os.kill(before["node"], signal.SIGKILL)
    until(launcher, "joined", lambda event: len([1 for each in launcher.events("demo") if each.kind == "joined"]) == 3)
    until(launcher, "progress", lambda event: len([1 for each in launcher.events("demo") if each.kind == "world"]) == 2)
    os.kill(before["rendezvous"], signal.SIGKILL)
    until(launcher, "world", lambda event: len([1 for each in launcher.events("demo") if each.kind == "world"]) == 3)
    (tmp_path / "enough").touch()
    outcome, _, _ = verdict_of(launcher)
    assert outcome.startswith("done")
    assert len([event for event in launcher.events("demo") if event.kind == "board"]) == 2


def test_scaling_up_leaves_the_others_alone_and_down_again(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.up(plan_of(launcher, 10_000, nodes=1, most=3), print)
    until(launcher, "progress")
    board, first = supervisor(tmp_path, "rendezvous"), supervisor(tmp_path, "node")
    launcher.up(scaled_plan(launcher, "demo", 2), print)
    until(launcher, "world", lambda event: event.data["nodes"] == 2)
    assert [task.node for task in launcher.tasks("demo")] == ["node0", "node1", RENDEZVOUS]
    assert (board, first) == (supervisor(tmp_path, "rendezvous"), supervisor(tmp_path, "node"))
    launcher.up(scaled_plan(launcher, "demo", 1), print)
    until(launcher, "world", lambda event: len([1 for each in launcher.events("demo") if each.kind == "world"]) == 3)
    assert [task.node for task in launcher.tasks("demo")] == ["node0", RENDEZVOUS]
    assert not [event for event in launcher.events("demo") if event.kind == "failure"]
    launcher.down("demo", print)
    assert ours(tmp_path) == []


def test_down_ends_ranks_that_ignore_sigterm(launcher: LocalLauncher, tmp_path: Path) -> None:
    script = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(300)\n"
    launcher.up(plan_of(launcher, 1, script=script, nodes=1, most=1, stop_grace=5.0), print)
    until(launcher, "world")
    launcher.down("demo", print)
    assert ours(tmp_path) == []


def test_a_new_script_restarts_the_nodes_and_a_failure_is_the_verdict(launcher: LocalLauncher) -> None:
    launcher.up(plan_of(launcher, 10_000, nodes=1, most=1), print)
    until(launcher, "progress")
    launcher.up(plan_of(launcher, 10_000, script="raise ValueError('no such thing')\n", nodes=1, most=1), print)
    outcome, _, _ = verdict_of(launcher)
    assert outcome.startswith("failed: node0 rank 0: ValueError: no such thing, in training_code.py line 1; failed 2 times in a row")


def supervisor(folder: Path, role: str) -> int:
    """Return the pid of the oldest process that plays `role` (node, rendezvous) of a run below `folder`; pids start again at 1."""
    wanted = f"-m\0swarmtrain.entrypoint\0{role}\0".encode()
    return min((pid for pid in ours(folder) if wanted in Path(f"/proc/{pid}/cmdline").read_bytes()), key=start_ticks)


def start_ticks(pid: int) -> int:
    """Return when a process was started, in clock ticks since the machine booted: field 22 of proc_pid_stat(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
