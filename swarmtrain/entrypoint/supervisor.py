"""The node's supervisor: the parent of torch's agent, and the one who decides what happens after it.

`python -m swarmtrain.entrypoint node`, under every launcher. Standard library only. Its exit codes are what Swarm's
`restart_policy: on-failure` reads, and 0 is the only one that ends a service:

    0             this node is done, or a verdict stands on the board and there is nothing left to do
    EXIT_PLANNED  told to stop (SIGTERM): what was removed stays removed whatever the code, but a task that only got a
                  signal (`docker kill`, a restarting engine) must come back
    1             the board could not be reached in time; worth another start
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from multiprocessing.context import ForkServerProcess
from types import FrameType

from swarmtrain.board import Board
from swarmtrain.entrypoint import forks, gpus, liveness
from swarmtrain.entrypoint.agent import main as run_ranks
from swarmtrain.entrypoint.checks import permanent_problems, threads_per_rank, warnings
from swarmtrain.entrypoint.interface import Route, published_address, route
from swarmtrain.entrypoint.usage import Reporter
from swarmtrain.errors import EXIT_ERROR, EXIT_OK, BoardError
from swarmtrain.wire import EXIT_PLANNED, FAILURE, JOINED, NOTE, PREFIX, Event, NodeEnv, Orders

_BEAT = 1.0
_SOON = 0.3
_WAIT_FOR_BOARD = 600.0  # the rendezvous service may still be pulling its image
_BOARD_RESTARTS = 300.0
_FAREWELL = 15.0
_AFTER_FAILURE = 10.0  # a run that is given up made no step since its last save; torch's agent may wait for peers that are gone
_AFTER_RANKS = 3.0  # an agent without ranks has nothing to save; it may hang on a store that is gone, and hears no signal then
_AFTER_DONE = 330.0  # torch's agents wait up to 300 s for each other at their end
_LONG_LIFE = 30.0
_LONGEST_PAUSE = 15.0
_ALONE = 90.0  # without the board's answer a node may be cut off; one that restarts is back in less


def main() -> int:
    """Run this node until the run is over or it is told to stop; return the exit code."""
    try:
        node = NodeEnv.from_env(os.environ)
    except ValueError as error:
        return _refuse(str(error))
    liveness.guard()
    os.environ |= _environment(node)
    forks.warm()
    return Supervisor(node).run()


class Supervisor:
    """One node of a run. Holds at most one agent at a time, and outlives it."""

    def __init__(self, node: NodeEnv, *, beat: float = _BEAT, alone: float = _ALONE) -> None:
        """`beat`: seconds between two; `alone`: without an answer, until the agent is ended."""
        self.node, self.every, self.alone = node, beat, alone
        self.board = Board(node.board)
        self.agent: ForkServerProcess | None = None
        self.stopping = False
        self.asked = False
        self.kill_at = float("inf")
        self.pause = 0.0
        self.heard = time.monotonic()

    def run(self) -> int:
        """Return the exit code, when the run is over, this node is, or it was told to stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_stop)
        try:
            return self._run()
        except _ToldToStop:
            self._leave(EXIT_PLANNED)
            return EXIT_PLANNED
        except BoardError as error:
            _say(f"{error}; leaving, to be started again")
            return EXIT_ERROR

    def _run(self) -> int:
        self.board.wait(_WAIT_FOR_BOARD)
        if problems := permanent_problems(self.node):
            return self._refuse(problems)
        route = self._join()
        forks.await_warmth()  # before the board expects a beat every second
        self.board.join(self.node.node)
        Reporter(self.board, self.node.node).start()
        orders = self._next("")
        while orders.verdict is None:
            code = self._train(orders.round, route)
            if code == EXIT_OK:
                break
            if self.stopping:
                raise _ToldToStop
            orders = self._next(orders.round)
        self.stopping = True  # a signal that comes now is too late to change anything
        self._leave(EXIT_OK)
        return EXIT_OK

    def _refuse(self, problems: list[str]) -> int:
        error = "; ".join(problems)
        _say(error)
        self.board.post(Event(FAILURE, {"node": self.node.node, "error": error, "exit_code": EXIT_ERROR, "permanent": True}))
        self._leave(EXIT_ERROR)
        return EXIT_OK

    def _join(self) -> Route:
        try:
            way = route(self.node.interface, self.node.board)
        except OSError as error:
            raise BoardError(str(error), place=f"notice board {self.node.board}") from None
        here = {"host": socket.gethostname(), "address": way.address, "interface": way.interface, "slots": self.node.slots}
        self.board.post(Event(JOINED, {"node": self.node.node, **here}))
        for message in warnings(self.node):
            self.board.post(Event(NOTE, {"node": self.node.node, "message": message}))
        return way

    def _train(self, round: str, route: Route) -> int:
        """Run one agent from its start to its end, and return its exit code (negative: a signal)."""
        began = time.monotonic()
        self.asked, self.kill_at, self.heard = False, float("inf"), time.monotonic()
        self.agent = forks.start("agent", run_ranks, round, published_address(route), route.environment(os.environ))
        try:
            code = self._watch(self.agent, round)
        finally:
            self._sweep(self.agent)
            self.agent = None
        if code < 0 and not self.asked:
            self._report_killed(round, -code)
        self.pause = 0.0 if time.monotonic() - began > _LONG_LIFE else min(_LONGEST_PAUSE, self.pause * 2 + 0.5)
        return code

    def _watch(self, agent: ForkServerProcess, round: str) -> int:
        while (code := forks.exit_code(agent, self.every)) is None:
            self._beat(agent, round)
        return code

    def _beat(self, agent: ForkServerProcess, round: str) -> None:
        if time.monotonic() > self.kill_at:
            forks.kill(agent)
        elif self.asked and not forks.leads(agent):
            self.kill_at = min(self.kill_at, time.monotonic() + _AFTER_RANKS)
        try:
            orders = self.board.beat(self.node.node)
        except BoardError as error:
            self._miss(agent, error)
            return
        self.heard = time.monotonic()
        if orders.verdict and orders.verdict.done:
            self.kill_at = min(self.kill_at, time.monotonic() + _AFTER_DONE)
        elif orders.verdict:
            self._end_agent(agent, _AFTER_FAILURE)
        elif orders.round != round:
            # A round that others have left cannot form a world again: save, and meet them in the new one.
            self._end_agent(agent, self.node.stop_grace)

    def _miss(self, agent: ForkServerProcess, error: BoardError) -> None:
        """The board does not answer. It may be restarting; but a node that is cut off must not train on where others have begun again."""
        if time.monotonic() - self.heard > self.alone and self.kill_at == float("inf"):
            _say(f"{error}; no answer for {self.alone:.0f} s: this node may be cut off, and stops until it is heard again")
            self._end_agent(agent, self.node.stop_grace)

    def _end_agent(self, agent: ForkServerProcess, grace: float) -> None:
        """Ask the agent to end, once, and see to it that it has after `grace` seconds, within the node's own."""
        if not self.asked:
            self.asked = True
            self.kill_at = time.monotonic() + max(1.0, min(grace, self.node.stop_grace) - 1.0)
            agent.terminate()

    def _sweep(self, agent: ForkServerProcess) -> None:
        """Leave nothing of the agent's behind: forkserver, ranks, and what those started."""
        forks.kill(agent)
        agent.join()

    def _report_killed(self, round: str, number: int) -> None:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        error = f"this node's agent was killed by {name}"
        _say(error)
        self._try_to_post(Event(FAILURE, {"node": self.node.node, "round": round, "signal": name, "error": error}))

    def _next(self, round: str) -> Orders:
        """Get a round that is not `round` when it begins, or the verdict. Raises BoardError if the board stays away."""
        time.sleep(self.pause)
        while True:
            self.board.wait(_BOARD_RESTARTS)
            try:
                orders = self.board.close(self.node.node, round)
            except BoardError:
                continue
            if orders.verdict or (orders.round != round and not orders.wait):
                return orders
            time.sleep(_SOON)  # others are coming, or finishing, or this node sits out

    def _leave(self, exit_code: int) -> None:
        """Say that this node ends. A board that is gone by then has nothing more to learn."""
        try:
            self.board.wait(_FAREWELL if exit_code == EXIT_OK else _BEAT)
            self.board.leave(self.node.node, exit_code)
        except BoardError as error:
            _say(f"could not say goodbye: {error}")

    def _try_to_post(self, event: Event) -> None:
        try:
            self.board.post(event)
        except BoardError as error:
            _say(f"could not post `{event.kind}`: {error}")

    def _told_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            return
        self.stopping = True
        if self.agent is None:
            raise _ToldToStop
        self._end_agent(self.agent, self.node.stop_grace)


class _ToldToStop(BaseException):
    """SIGTERM came while no agent ran, so there is nothing to save; no `except Exception` may swallow it."""


def _environment(node: NodeEnv) -> dict[str, str]:
    """Return what must be set before torch is imported."""
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_rank(node.slots))}
    return {**threads, **gpus.environment(os.environ)}


def _refuse(error: str) -> int:
    """Report an environment that cannot be read, if as much as the board's address can."""
    _say(error)
    address = os.environ.get(PREFIX + "BOARD")
    if address is None:
        return EXIT_ERROR
    node = os.environ.get(PREFIX + "NODE", "a node")
    try:
        board = Board(address)
        board.wait(_WAIT_FOR_BOARD)
        board.post(Event(FAILURE, {"node": node, "error": error, "exit_code": EXIT_ERROR, "permanent": True}))
    except BoardError as unreachable:
        _say(str(unreachable))
        return EXIT_ERROR
    return EXIT_OK


def _say(line: str) -> None:
    sys.stderr.write(f"swarmtrain: {line}\n")
    sys.stderr.flush()
