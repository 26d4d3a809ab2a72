"""One node of a Slurm job: keeps its supervisor going and, on the first node, the notice board.

`python -m swarmtrain.launchers.slurm.node FOLDER`, a task of srun. What the sbatch script could not know, this finds in Slurm's
variables. Asked to leave, by SIGURG from us or SIGTERM from Slurm, it asks the supervisor; the board ends after the nodes.
A SIGTERM on the first node leaves a mark, by which the script knows a preemption.
The exit code says to the script what to do: EXIT_PLANNED there is more to train, else the run is over, and on the first node
the code is that of its verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from swarmtrain.errors import ProcessError
from swarmtrain.host.log import written_down
from swarmtrain.host.spec import replace
from swarmtrain.launchers.kept import EVENTS
from swarmtrain.launchers.slurm.first import queue_again_without
from swarmtrain.launchers.slurm.folder import Attempt, NodeState, adopt, node_state, verdict_in
from swarmtrain.process import run, start
from swarmtrain.render.command import MODULE
from swarmtrain.render.slurm import TERMINATED
from swarmtrain.wire import EXIT_PLANNED, RENDEZVOUS, ROLE_NODE, ROLE_RENDEZVOUS
from swarmtrain.world import hosts, slurm_port

_DELAY = 1.0
_ASK = 5.0
# Slurm's SIGTERM reaches every process of a job at once, and the board is needed until the ranks have saved.
_DEAF = ["sh", "-c", 'trap "" TERM; exec "$0" "$@"']


def main(folder: Path) -> int:
    """Keep this node until the run is over, or it is told to leave; return the exit code."""
    environ = os.environ
    attempt = Attempt(environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], int(environ.get("SLURM_RESTART_COUNT", 0)))
    names = list(hosts(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]))
    index = int(environ["SLURM_NODEID"])
    port = int(environ.get("SWARMTRAIN_MASTER_PORT") or slurm_port(environ))
    first = address(names[0])
    environ |= {
        "SWARMTRAIN_NODE": f"node{index}",
        "SWARMTRAIN_STORE": f"{first}:{port}",
        "SWARMTRAIN_BOARD": f"{first}:{port + 1}",
        "SWARMTRAIN_STORE_PORT": str(port),
        "SWARMTRAIN_BOARD_PORT": str(port + 1),
    }
    host = environ.get("SLURMD_NODENAME", socket.gethostname())
    node = Kept(folder, f"node{index}", ROLE_NODE, host, attempt)
    board = Kept(folder, RENDEZVOUS, ROLE_RENDEZVOUS, host, attempt) if index == 0 else None

    def told(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and board is not None:
            (folder / TERMINATED).touch()
        node.stop()

    for number in (signal.SIGURG, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    if board is not None:
        adopt(folder, environ["SWARMTRAIN_FILES"], attempt.job)
        board.start()
    node.start()
    if board is None:
        over = threading.Event()
        args = (names[0], (first, port + 1), attempt.job, over)
        threading.Thread(target=queue_again_without, args=args, daemon=True).start()
        node.wait()
        over.set()
        return EXIT_PLANNED if node.code else 0
    node.wait()
    if node.code:
        _await_others(folder, len(names), attempt)
        board.stop()
    board.wait()
    return EXIT_PLANNED if node.code else verdict_in(folder / EVENTS, default=0)


def address(name: str) -> str:
    """Return by what the first node is found: its name, but where that leads nowhere, or to loopback, what Slurm knows of it."""
    own = _resolved(name)
    if own and not own.startswith("127."):
        return name
    with contextlib.suppress(ProcessError):
        match = re.search(r"\bNodeAddr=(\S+)", run(["scontrol", "show", "node", "--oneliner", name], timeout=_ASK))
        if match and _resolved(match[1]):
            return match[1]
    return name


def _resolved(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _await_others(folder: Path, nodes: int, attempt: Attempt) -> None:
    """Ranks that save on their way out still talk to the board."""
    end = time.monotonic() + float(os.environ["SWARMTRAIN_STOP_GRACE"])
    while time.monotonic() < end and any(_at_work(folder, f"node{index}", attempt) for index in range(nodes)):
        time.sleep(0.1)


def _at_work(folder: Path, name: str, attempt: Attempt) -> bool:
    state = node_state(folder, name)
    return state is not None and state.attempt == attempt and state.state in ("running", "failed")


class Kept:
    """A process that is started again when it fails, as Swarm's `restart_policy: on-failure` does: 0 is final."""

    def __init__(self, folder: Path, name: str, role: str, host: str, attempt: Attempt) -> None:
        self.folder, self.name, self.role, self.host, self.attempt = folder, name, role, host, attempt
        self.stopping = False
        self.code = 0
        self.restarts = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep)

    @property
    def is_board(self) -> bool:
        return self.role == ROLE_RENDEZVOUS

    def start(self) -> None:
        self._say("running")
        self._thread.start()

    def wait(self) -> None:
        """Return when it has ended for good; `code` is how."""
        while self._thread.is_alive():  # a join without an end would hold signals back
            self._thread.join(0.1)

    def stop(self) -> None:
        """Ask it to end, and do not start it again."""
        self.stopping = True
        if (child := self._child) is not None:
            self._end(child)

    def _keep(self) -> None:
        while True:
            self.code = self._once()
            if self.code == 0 or self.stopping:
                self._say("shutdown" if self.code else "complete", self.code)
                return
            self._say("failed", self.code)
            time.sleep(_DELAY)
            self.restarts += 1
            self._say("running")

    def _once(self) -> int:
        argv = [*(_DEAF if self.is_board else []), sys.executable, "-m", MODULE, self.role]
        events: Any = (self.folder / EVENTS).open("ab") if self.is_board else contextlib.nullcontext()
        with written_down(self.folder / f"{self.name}.log") as log, events as out:
            # die_with_parent: of the thread, which lives as long as the child.
            child = self._child = start(argv, stdout=out or log, stderr=log, die_with_parent=True)
            if self.stopping:
                self._end(child)
            return child.wait()

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        child.send_signal(signal.SIGINT if self.is_board else signal.SIGTERM)

    def _say(self, state: str, exit_code: int | None = None) -> None:
        said = NodeState(self.host, state, self.attempt, exit_code, self.restarts)
        with contextlib.suppress(OSError):
            replace(self.folder / f"{self.name}.state", json.dumps(asdict(said)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
