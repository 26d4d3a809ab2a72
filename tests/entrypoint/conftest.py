"""A run on this machine with real supervisors and a real coordinator, started by hand like a launcher does."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from swarmtrain.process import start_process
from swarmtrain.protocol import CoordinatorEnv, Event, NodeEnv, ProbeEnv
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol.distributed_env import reserve_port

ROOT = Path(__file__).parents[2]

# A minimal trainer: the ranks agree on SIGTERM at each step boundary, save, exit with 75, and resume at the saved step.
# It trains until the file `enough` exists, so that no test races against its end.
TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol import Event

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
            CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"]).post_event(Event("progress", {"step": step, "pid": os.getpid()}))
dist.barrier()
dist.destroy_process_group()
"""


class SmallRun:
    """A few nodes and their coordinator. `nodes` maps a node's name to its supervisor process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._port = reserve_port()
        self.coordinator_port: int = self._port.getsockname()[1]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.state = folder / "state"
        (folder / "config.json").write_text("{}")

    def start_coordinator(self, *, max_restarts: int = 3, min_nodes: int = 2, environment: Mapping[str, str] | None = None) -> None:
        env = CoordinatorEnv("small", self.coordinator_port, "127.0.0.1", max_restarts, max_restarts_per_hour=20, min_nodes=min_nodes)
        self.coordinator = self._start_process("rendezvous", {**env.to_env(), **(environment or {})}, self.folder / "events.jsonl")

    def post_event(self, event: Event) -> None:
        """Post an event to the coordinator, as a rank does."""
        client = CoordinatorClient(f"127.0.0.1:{self.coordinator_port}")
        client.wait_until_reachable(30.0)
        client.post_event(event)

    def start_node(
        self,
        number: int,
        script: str,
        *args: str,
        slots: int = 2,
        node_range: tuple[int, int] = (2, 2),
        stop_grace: float = 20.0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        (self.folder / "script.py").write_text(script)
        env = self._build_node_env(number, script_args=args, slots=slots, node_range=node_range, stop_grace=stop_grace)
        self.nodes[env.node] = self._start_process(
            "node", {**env.to_env(), "OMP_NUM_THREADS": "1", **(environment or {})}, self.get_log_path(number)
        )
        return self.nodes[env.node]

    def start_probe(self, *peers: str, mounts: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start the probe of node0, with these peers."""
        (self.folder / "script.py").write_text("")
        env = {
            **self._build_node_env(0, slots=1, node_range=(1, 1), mounts=mounts).to_env(),
            **ProbeEnv(("node0", *peers), {}, reserve_port().getsockname()[1], 0.0).to_env(),
        }
        self.nodes["node0"] = self._start_process("probe", env, self.get_log_path(0))
        return self.nodes["node0"]

    def start_training_node(
        self,
        number: int,
        *,
        slots: int = 2,
        node_range: tuple[int, int] = (2, 2),
        fault: str = "pass",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a node that runs TRAIN. All nodes share its state, as on a shared disk. `fault` is a statement that runs in each step."""
        self.start_node(
            number,
            TRAIN.replace("step += 1", f"step += 1; {fault}"),
            str(self.state),
            str(self.folder / "enough"),
            slots=slots,
            node_range=node_range,
            environment=environment,
        )

    def finish_training(self, worlds: int) -> dict[str, int]:
        """Let TRAIN end after this many worlds have formed and the last one has made steps; return the exit codes."""
        formed = self.wait_for_event("world", count=worlds)
        self.wait_for_event("progress", condition=lambda event: event.time > formed.time)
        (self.folder / "enough").touch()
        return self.wait_for_exit()

    def get_log_path(self, number: int) -> Path:
        return self.folder / f"node{number}.log"

    def read_output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("node*.log")))

    def read_events(self, kind: str | None = None) -> list[Event]:
        path = self.folder / "events.jsonl"
        parsed = [Event.from_line(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [event for event in parsed if event and kind in (None, event.kind)]

    def wait_for_event(
        self, kind: str, *, count: int = 1, timeout: float = 120.0, condition: Callable[[Event], bool] = lambda _: True
    ) -> Event:
        """Wait for the `count`-th event of `kind` that meets `condition`. On timeout, fail with everything printed so far."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = [event for event in self.read_events(kind) if condition(event)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.05)
        pytest.fail(f"no {kind} within {timeout:g} s\n{self.format_transcript()}")

    def wait_for_exit(self, *, timeout: float = 120.0) -> dict[str, int]:
        """Wait for all processes to end by themselves, and return their exit codes."""
        assert self.coordinator
        processes = {**self.nodes, "coordinator": self.coordinator}
        end = time.monotonic() + timeout
        try:
            return {name: process.wait(max(0.1, end - time.monotonic())) for name, process in processes.items()}
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished within {timeout:g} s\n{self.format_transcript()}")

    def format_transcript(self) -> str:
        return "\n".join(event.to_line() for event in self.read_events()) + "\n" + self.read_output()

    def find_descendants(self, number: int) -> dict[int, str]:
        """Return the living descendants of a node's supervisor: pid → process name."""
        parents, found = _list_processes(), {self.nodes[f"node{number}"].pid: ""}
        for _ in range(5):
            found.update({pid: name for pid, (parent, name) in parents.items() if parent in found})
        return {pid: name for pid, name in found.items() if name}

    def find_agent(self, number: int) -> int:
        return next(pid for pid, name in self.find_descendants(number).items() if name == "agent")

    def find_ranks(self, number: int) -> list[int]:
        named = {int(name.split()[1]): pid for pid, name in self.find_descendants(number).items() if name.startswith("rank ")}
        return [pid for _, pid in sorted(named.items())]

    def find_fork_server(self, number: int) -> int:
        """Return the pid of the fork server, which has imported torch and forks the agents."""
        return next(pid for pid, name in self.find_descendants(number).items() if name == "torch-preloaded")

    def close(self) -> None:
        for process in [*self.nodes.values(), *([self.coordinator] if self.coordinator else [])]:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()

    def _build_node_env(
        self,
        number: int,
        *,
        slots: int,
        node_range: tuple[int, int],
        script_args: tuple[str, ...] = (),
        stop_grace: float = 20.0,
        mounts: tuple[str, ...] = (),
    ) -> NodeEnv:
        return NodeEnv(
            run="small",
            node=f"node{number}",
            slots=slots,
            min_nodes=node_range[0],
            max_nodes=node_range[1],
            coordinator=f"127.0.0.1:{self.coordinator_port}",
            config=str(self.folder / "config.json"),
            code_folder=str(self.folder),
            script=str(self.folder / "script.py"),
            script_args=script_args,
            secrets={},
            stop_grace=stop_grace,
            log_dir=str(self.folder / f"log{number}"),
            mounts=mounts,
            interface="",
            numa="",
        )

    def _start_process(self, role: str, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            errors = out if role != "rendezvous" else subprocess.DEVNULL
            command = [sys.executable, "-m", "swarmtrain.entrypoint", role]
            return start_process(command, env=env, cwd=ROOT, stdout=out, stderr=errors, new_session=True, die_with_parent=True)


def _list_processes() -> dict[int, tuple[int, str]]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found[int(entry.name)] = (parent, (entry / "comm").read_text().strip())
    return found


def is_process_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def small_run(tmp_path: Path) -> Iterator[SmallRun]:
    run = SmallRun(tmp_path)
    yield run
    run.close()


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallRun]:
    """A run that the tests of a module share."""
    run = SmallRun(tmp_path_factory.mktemp("shared"))
    yield run
    run.close()


@pytest.fixture
def wait_until_dead() -> Callable[[list[int]], None]:
    """Return a function that waits until processes are dead, and fails if one is still alive."""

    def wait(pids: list[int], timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while time.monotonic() < end and any(is_process_alive(pid) for pid in pids):
            time.sleep(0.05)
        left = [pid for pid in pids if is_process_alive(pid)]
        assert not left, f"still alive: {left}"

    return wait
