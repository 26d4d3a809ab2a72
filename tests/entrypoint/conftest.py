"""A run on this machine, of real supervisors and a real board, started by hand as a launcher would."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from swarmtrain.process import start
from swarmtrain.wire import BoardEnv, Event, NodeEnv, ProbeEnv

ROOT = Path(__file__).parents[2]

# A trainer in miniature: agrees on SIGTERM at each step boundary, saves, leaves with 75, goes on where it was.
# It trains until the file `enough` is there, so that no test races against its end.
TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.board import Board
from swarmtrain.wire import Event

state, enough = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
aside = state.with_suffix(".new")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo")
rank = dist.get_rank()
step = int(state.read_text()) if state.exists() else 0
print(f"start at {step} of world {dist.get_world_size()}", flush=True)
dist.barrier()
while True:
    flag = torch.tensor([len(asked), rank == 0 and enough.exists()])
    dist.all_reduce(flag)
    if flag[1]:
        break
    if flag[0]:
        print(f"saved {step}", flush=True)
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if rank == 0:
        aside.write_text(str(step))
        aside.replace(state)
        if step % 5 == 0:
            Board(os.environ["SWARMTRAIN_BOARD"]).post(Event("progress", {"step": step, "pid": os.getpid()}))
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SmallRun:
    """Up to a few nodes and their board. `nodes` maps a node's name to its supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.board_port, self.store_port = free_port(), free_port()
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.board: subprocess.Popen[bytes] | None = None
        self.state = folder / "state"
        (folder / "config.json").write_text("{}")

    def start_board(self, *, max_restarts: int = 3, min_nodes: int = 2) -> None:
        env = BoardEnv("small", self.board_port, self.store_port, "127.0.0.1", max_restarts, max_restarts_per_hour=20, min_nodes=min_nodes)
        self.board = self._start("rendezvous", env.to_env(), self.folder / "events.jsonl")

    def start_node(
        self,
        number: int,
        script: str,
        *args: str,
        slots: int = 2,
        nodes: tuple[int, int] = (2, 2),
        stop_grace: float = 20.0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        (self.folder / "script.py").write_text(script)
        env = self._node_env(number, script_args=args, slots=slots, nodes=nodes, stop_grace=stop_grace)
        self.nodes[env.node] = self._start("node", {**env.to_env(), "OMP_NUM_THREADS": "1", **(environment or {})}, self.log(number))
        return self.nodes[env.node]

    def start_probe(self, *peers: str, mounts: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start the probe of node0, which has these peers."""
        (self.folder / "script.py").write_text("")
        env = {**self._node_env(0, slots=1, nodes=(1, 1), mounts=mounts).to_env(), **ProbeEnv(("node0", *peers), {}, free_port()).to_env()}
        self.nodes["node0"] = self._start("probe", env, self.log(0))
        return self.nodes["node0"]

    def train(
        self,
        number: int,
        *,
        slots: int = 2,
        nodes: tuple[int, int] = (2, 2),
        fault: str = "pass",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a node that runs TRAIN, whose state is shared by all nodes as on a common disk. `fault`: a statement for each step."""
        self.start_node(
            number,
            TRAIN.replace("step += 1", f"step += 1; {fault}"),
            str(self.state),
            str(self.folder / "enough"),
            slots=slots,
            nodes=nodes,
            environment=environment,
        )

    def finish_training(self, worlds: int) -> dict[str, int]:
        """Let TRAIN end once that many worlds have formed and the last one has made steps; return the exit codes."""
        formed = self.until("world", count=worlds)
        self.until("progress", where=lambda event: event.time > formed.time)
        (self.folder / "enough").touch()
        return self.finish()

    def log(self, number: int) -> Path:
        return self.folder / f"node{number}.log"

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("node*.log")))

    def events(self, kind: str | None = None) -> list[Event]:
        path = self.folder / "events.jsonl"
        parsed = [Event.from_line(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in parsed if event and kind in (None, event.kind)]

    def until(self, kind: str, *, count: int = 1, timeout: float = 120.0, where: Callable[[Event], bool] = lambda _: True) -> Event:
        """Wait for the `count`-th event of `kind`; fail with everything printed so far if it does not come."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = [event for event in self.events(kind) if where(event)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.05)
        pytest.fail(f"no {kind} within {timeout:g} s\n{self.transcript()}")

    def finish(self, *, timeout: float = 120.0) -> dict[str, int]:
        """Wait for all processes to end by themselves, and return their exit codes."""
        assert self.board
        everybody = {**self.nodes, "board": self.board}
        end = time.monotonic() + timeout
        try:
            return {name: process.wait(max(0.1, end - time.monotonic())) for name, process in everybody.items()}
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished within {timeout:g} s\n{self.transcript()}")

    def transcript(self) -> str:
        return "\n".join(event.to_line() for event in self.events()) + "\n" + self.output()

    def descendants(self, number: int) -> dict[int, str]:
        """Return the living processes under a node's supervisor, by pid, with their names."""
        parents, found = _processes(), {self.nodes[f"node{number}"].pid: ""}
        for _ in range(5):
            found.update({pid: name for pid, (parent, name) in parents.items() if parent in found})
        return {pid: name for pid, name in found.items() if name}

    def agent(self, number: int) -> int:
        return next(pid for pid, name in self.descendants(number).items() if name == "agent")

    def ranks(self, number: int) -> list[int]:
        named = {int(name.split()[1]): pid for pid, name in self.descendants(number).items() if name.startswith("rank ")}
        return [pid for _, pid in sorted(named.items())]

    def server(self, number: int) -> int:
        """Return what has imported torch, and forks the agents."""
        return next(pid for pid, name in self.descendants(number).items() if name == "torch is here")

    def close(self) -> None:
        for process in [*self.nodes.values(), *([self.board] if self.board else [])]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()

    def _node_env(
        self,
        number: int,
        *,
        slots: int,
        nodes: tuple[int, int],
        script_args: tuple[str, ...] = (),
        stop_grace: float = 20.0,
        mounts: tuple[str, ...] = (),
    ) -> NodeEnv:
        return NodeEnv(
            run="small",
            node=f"node{number}",
            slots=slots,
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            board=f"127.0.0.1:{self.board_port}",
            store=f"127.0.0.1:{self.store_port}",
            config=str(self.folder / "config.json"),
            script=str(self.folder / "script.py"),
            script_args=script_args,
            secrets={},
            stop_grace=stop_grace,
            log_dir=str(self.folder / f"log{number}"),
            mounts=mounts,
            interface="",
            numa="",
        )

    def _start(self, role: str, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            errors = out if role != "rendezvous" else subprocess.DEVNULL
            command = [sys.executable, "-m", "swarmtrain.entrypoint", role]
            return start(command, env=env, cwd=ROOT, stdout=out, stderr=errors, new_session=True, die_with_parent=True)


def _processes() -> dict[int, tuple[int, str]]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(entry.name)] = (parent, (entry / "comm").read_text().strip())
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def small_run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path)
    yield run
    run.close()


@pytest.fixture
def gone() -> Callable[[list[int]], None]:
    """Wait for processes to be dead; fail if one lives on."""

    def wait(pids: list[int], timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end and any(alive(pid) for pid in pids):
            time.sleep(0.05)
        left = [pid for pid in pids if alive(pid)]
        assert not left, f"still alive: {left}"

    return wait
