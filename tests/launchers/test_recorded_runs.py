"""Runs that were started by the previous version of swarmtrain are listed, shown, stopped and removed.

Each file in `recorded_runs` has the files of a real run of that version, by path in the state directory. Paths of the machine are replaced
by @STATE@, @PROJECT@ and @PYTHON@.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import find_run_pids

from swarmtrain.errors import StackError
from swarmtrain.launchers.base import Launcher, LogLine, TaskState
from swarmtrain.launchers.common.history_store import find_recorded_run
from swarmtrain.launchers.registry import create_launcher
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.operations import runs
from swarmtrain.protocol import RENDEZVOUS_SERVICE, Event
from swarmtrain.remote.process_spec import ProcessState

_SPEC_FOLDERS = {"local": "swarmtrain/demo", "ssh": "swarmtrain/.hosts/localhost/demo"}
_PROGRAM = ["sh", "-c", "trap 'exit 75' TERM; while :; do sleep 0.1; done"]
_SLURM_COMMANDS = {
    "squeue": "#!/bin/sh\n[ -e {folder}/cancelled ] || echo 'RUNNING|None'\n",
    "scancel": "#!/bin/sh\ntouch {folder}/cancelled\n",
}


@pytest.fixture
def stop_all(isolated_state: Path) -> Iterator[None]:
    yield
    for pid in find_run_pids(isolated_state):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def restore_run(kind: str, state: Path, project: Path) -> Launcher:
    """Write the recorded files of a run below `state`, and return its launcher."""
    files = json.loads((Path(__file__).with_name("recorded_runs") / f"{kind}.json").read_text())
    for name, text in files.items():
        path = state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("@STATE@", str(state)).replace("@PROJECT@", str(project)).replace("@PYTHON@", sys.executable))
    return create_launcher(kind)


def start_keepers(folder: Path) -> None:
    """Start a process keeper for each recorded process in a run folder, with a program that only waits for SIGTERM."""
    for spec_path in folder.glob("*.spec"):
        spec_path.write_text(json.dumps(json.loads(spec_path.read_text()) | {"argv": _PROGRAM}))
        argv = [sys.executable, "-m", "swarmtrain.remote.process_keeper", str(spec_path)]
        keeper = subprocess.Popen(argv, start_new_session=True)
        end = time.monotonic() + 60
        while ProcessState(**json.loads(spec_path.with_suffix(".state").read_text())).keeper_pid != keeper.pid:
            assert time.monotonic() < end
            time.sleep(0.05)


def list_states(launcher: Launcher) -> dict[str, str]:
    return {task.node: task.state for task in launcher.list_tasks("demo")}


def check_records(launcher: Launcher, nodes: int, identity: str, steps: list[int]) -> None:
    """Assert what the commands that show a run read: its name, identity, events and output."""
    assert launcher.list_runs() == ["demo"]
    assert launcher.read_identity("demo").id == identity
    assert launcher.read_identity("demo").owner == "alice"
    events = launcher.read_events("demo")
    assert [event.kind for event in events if event.kind in ("coordinator", "joined", "world")] == [
        "coordinator",
        *["joined"] * nodes,
        "world",
    ]
    lines = list(launcher.stream_logs("demo", follow=False))
    assert sorted((line.rank, line.text) for line in lines) == [(rank, f"rank {rank} of {nodes}") for rank in range(nodes)]
    assert [event.data["step"] for event in events if event.kind == "progress"] == steps
    (overview,) = launcher.read_overviews()
    assert (overview.run, overview.error, len(overview.tasks)) == ("demo", "", nodes + 1)


def check_nothing_left(launcher: Launcher, state: Path, nodes: int) -> None:
    assert launcher.list_runs() == []
    assert find_run_pids(state) == []
    assert [path for path in state.rglob("*") if path.name in ("TOKEN", "run-key") or path.suffix in (".spec", ".state")] == []
    recorded_run = find_recorded_run("demo")
    assert recorded_run
    assert sorted(line.text for line in recorded_run.load_log_lines()) == [f"rank {rank} of {nodes}" for rank in range(nodes)]
    assert [event for event in recorded_run.load_events() if event.kind == "world"]


@pytest.mark.usefixtures("stop_all")
@pytest.mark.parametrize(("kind", "nodes", "identity", "steps"), [("local", 2, "b1f62a546ad2", [5, 10]), ("ssh", 1, "79d498338c23", [])])
def test_a_run_of_processes_of_the_previous_version_is_operated(
    kind: str, nodes: int, identity: str, steps: list[int], isolated_state: Path
) -> None:
    launcher = restore_run(kind, isolated_state, isolated_state.parent)
    check_records(launcher, nodes, identity, steps)
    names = [f"node{index}" for index in range(nodes)]
    assert list_states(launcher) == dict.fromkeys([*names, RENDEZVOUS_SERVICE], "failed")  # the recorded keepers do not exist here
    start_keepers(isolated_state / _SPEC_FOLDERS[kind])
    assert list_states(launcher) == dict.fromkeys([*names, RENDEZVOUS_SERVICE], "running")
    update_types = read_update_types(launcher, lambda seen: {Event, TaskState} <= seen)
    assert LogLine not in update_types  # output from before is not new
    with pytest.raises(StackError) as refused:
        runs.scale_run(launcher, plan_scaled_run(launcher, "demo", ScaleRequest(node_count=3)), assume_yes=True)
    assert refused.value.message in (
        "its nodes have another version of swarmtrain than this machine, so further nodes could not join them",
        "its record was written by another version of swarmtrain",
    )
    assert "swarmtrain d" in (refused.value.hint or "")
    assert list_states(launcher) == dict.fromkeys([*names, RENDEZVOUS_SERVICE], "running")
    launcher.stop_run("demo", print)
    assert list_states(launcher) == {**dict.fromkeys(names, "shutdown"), RENDEZVOUS_SERVICE: "running"}
    launcher.tear_down_run("demo", print)
    check_nothing_left(launcher, isolated_state, nodes)


def read_update_types(launcher: Launcher, is_complete: Callable[[set[type]], bool]) -> set[type]:
    seen: set[type] = set()
    for update in launcher.watch_run("demo"):
        seen.add(type(update))
        if is_complete(seen):
            break
    return seen


def test_a_slurm_run_of_the_previous_version_is_operated(isolated_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in _SLURM_COMMANDS.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = restore_run("slurm", isolated_state, tmp_path)
    check_records(launcher, 2, "447c80a3b7e2", [5, 10])
    tasks = {task.node: (task.host, task.state) for task in launcher.list_tasks("demo")}
    assert tasks == {"node0": ("n01", "running"), "node1": ("n02", "running"), RENDEZVOUS_SERVICE: ("n01", "running")}
    assert read_update_types(launcher, lambda seen: {Event, TaskState} <= seen) == {Event, TaskState}
    launcher.stop_run("demo", print)
    assert (tmp_path / "cancelled").exists()
    assert list_states(launcher) == dict.fromkeys(["node0", "node1", RENDEZVOUS_SERVICE], "shutdown")
    launcher.tear_down_run("demo", print)
    check_nothing_left(launcher, isolated_state, 2)
