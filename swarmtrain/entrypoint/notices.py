"""What the notice board knows and decides: who is here, which rendezvous round counts, and how the run ended.

A pure state machine: calls in, events out through `publish`, time through `now` (seconds, monotonic). The rules:

- A round is used until a node says that it is closed; N nodes that close the same round draw one new round.
- A world that fails costs one of `max_restarts`, however many of its ranks fail. A step higher than any before gives all
  of them back, but for those of `max_restarts_per_hour`. When none is left, the run has failed, and the first failure of
  its last world says why. The same exception at the same step twice in a row is a bug, and the end, whatever is left.
- A run is done when the trainer says so, or, with a script that says nothing, when all nodes of a world have left with 0.
- Progress, and what all nodes use, are printed so seldom that a month of them leaves room in the log for all the rest.
- After one node has finished, the others cannot form that world again: if one of them fails, the run has failed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain.entrypoint.budget import Budget
from swarmtrain.wire import (
    ASKED,
    AT_FIRST,
    BOARD_UP,
    CHECKPOINT,
    EXIT_PLANNED,
    FAILURE,
    FINISHED,
    LEFT,
    NOTE,
    PROGRESS,
    RETURNED,
    USAGE,
    VERDICT,
    WORLD,
    Event,
    Orders,
    Receipt,
    Verdict,
    collateral,
)

SILENT = 30.0
"""Seconds without a beat after which a node is taken for lost."""
LINGER = 2.0
"""Seconds that the board stays at least after the verdict."""
STEADY = 300.0
"""Seconds that a world must live to count as progress, for scripts that report no steps."""
COLLATERAL_GRACE = 3.0
"""Seconds to wait for the cause, when all we have heard of is what came in its wake."""
PROGRESS_EVERY = (0.5, 30.0)
"""Seconds between two lines of progress: the least and the most; between them a hundredth of the run's age."""
USAGE_EVERY = 10.0
"""Seconds between two lines of what the nodes use, of a run of a few nodes."""
USAGE_BYTES = 12.0
"""Bytes a second that these lines may take: the engine keeps 100 MB of the board's log, and a month of them is less than half of it."""

_OURS = {ASKED, BOARD_UP, LEFT, VERDICT}


@dataclass
class _Node:
    seen: float
    exit_code: int | None = None
    gone: bool = False


@dataclass
class _World:
    key: str
    nodes: int
    ranks: dict[str, list[int]]
    born: float
    finished: set[str] = field(default_factory=set)

    @property
    def members(self) -> set[str]:
        return set(self.ranks)


@dataclass
class _Cause:
    world: str
    data: dict[str, Any]

    @property
    def collateral(self) -> bool:
        return collateral(self.data)


class Notices:
    """The state of one board, from its start to its end; `boot` tells this board's rounds from those of its predecessor."""

    def __init__(
        self,
        *,
        run: str,
        max_restarts: int,
        max_restarts_per_hour: int,
        boot: str,
        now: Callable[[], float],
        publish: Callable[[Event], None],
    ) -> None:
        self._budget = Budget(max_restarts, max_restarts_per_hour, now)
        self._boot = boot
        self._now = now
        self._print = publish
        self._number = 1
        self._nodes: dict[str, _Node] = {}
        self._forming: dict[str, dict[str, list[int]]] = {}
        self._world: _World | None = None
        self._changing = True
        self._counted: set[str] = set()
        self._reported: set[tuple[str, str, int]] = set()
        self._told: dict[str, dict[str, bool]] = {}
        self._cause: _Cause | None = None
        self._decide_at: float | None = None
        self._best_step = -1
        self._born = now()
        self._held: Event | None = None
        self._progress_at = float("-inf")
        self._usage: dict[str, dict[str, Any]] = {}
        self._usage_at = float("-inf")
        self._verdict: Verdict | None = None
        self._verdict_at = 0.0
        self._publish(Event(BOARD_UP, {"run": run}))

    @property
    def round(self) -> str:
        return f"{self._boot}-{self._number}"

    @property
    def orders(self) -> Orders:
        return Orders(self.round, self._verdict)

    @property
    def _failed(self) -> bool:
        return self._verdict is not None and not self._verdict.done

    @property
    def ended(self) -> bool:
        """Whether there is a verdict, and nobody left who has not heard it."""
        return (
            self._verdict is not None
            and self._now() - self._verdict_at >= LINGER
            and all(node.gone or self._silent(node) for node in self._nodes.values())
        )

    def join(self, name: str) -> Orders:
        """A node's supervisor has started, for the first time or again."""
        node = self._nodes.get(name)
        if node is None or node.gone:
            self._changing = True
        elif name in self._unfinished():
            self._fail_unfinished(f"{name} was lost")
        self._nodes[name] = _Node(self._now())
        return self.orders

    def beat(self, name: str) -> Orders:
        """A node's supervisor lives."""
        self._see(name)
        return self.orders

    def close(self, name: str, round: str) -> Orders:
        """A node's agent has ended without success; `round` is of no more use to it.

        The answer holds the same round again while the others are finishing: nothing is to be started then.
        """
        self._see(name)
        if round != self.round or self._verdict:
            return self.orders
        if name in self._unfinished():
            self._fail_unfinished(f"{name} ended")
        elif not self._finishing():
            self._number += 1
        return self.orders

    def leave(self, name: str, exit_code: int) -> Orders:
        """A node has ended: 0 with success, EXIT_PLANNED because it was told to, anything else because it could not go on."""
        self._see(name)
        self._nodes[name].exit_code = exit_code
        self._gone(name, exit_code)
        if exit_code == EXIT_PLANNED:
            self._changing = True
        if exit_code == 0 and self._world:
            self._world.finished.add(name)
            left = [member for member in self._world.members if self._nodes.get(member, _Node(0.0)).exit_code == 0]
            if len(left) >= self._world.nodes:
                self._decide(Verdict("done", f"all {len(left)} nodes have finished" if len(left) > 1 else "its node has finished", 0))
        elif name in self._unfinished():
            self._fail_unfinished(f"{name} left with exit code {exit_code}")
        return self.orders

    def post(self, event: Event) -> Receipt:
        """Take an event from a node or a rank. Raises ValueError for a kind that only the board itself may write."""
        if event.kind in _OURS:
            raise ValueError(f"an event of kind `{event.kind}` is the board's own to write")
        known = False
        if event.kind == WORLD:
            self._form(event)
        elif event.kind == FAILURE:
            known = self._fail(event)
        elif event.kind == USAGE:
            self._use(event.data)
        elif event.kind == PROGRESS:
            self._note(event)
            self._hold(event)
        else:
            self._publish(event)
            self._note(event)
        return Receipt(known, over=self._failed)

    def tick(self) -> None:
        """Let time pass: find lost nodes, and give the verdict that was waiting for a better reason."""
        for name, node in self._nodes.items():
            if not node.gone and self._silent(node):
                self._gone(name, None)
                if name in self._unfinished():
                    self._fail_unfinished(f"{name} was lost")
        if self._held is not None:
            self._hold(self._held)
        if self._decide_at is not None and self._now() >= self._decide_at:
            self._give_up()

    def _publish(self, event: Event) -> None:
        """Print an event, behind the progress that was made before it."""
        held, self._held = self._held, None
        if held is not None:
            self._print(held)
        self._print(event)

    def _hold(self, event: Event) -> None:
        """Print progress if it is time, and keep it until then; the newest takes the place of one that waits."""
        now, (least, most) = self._now(), PROGRESS_EVERY
        self._held = event
        if now >= self._progress_at:
            self._progress_at = now + min(most, max(least, (now - self._born) / 100))
            self._held = None
            self._print(event)

    def _use(self, data: dict[str, Any]) -> None:
        """Remember what a node uses, and print that of all that are here when it is time."""
        self._usage[str(data["node"])] = {key: value for key, value in data.items() if key != "node"}
        if self._now() < self._usage_at:
            return
        here = {name: used for name, used in self._usage.items() if name in self._nodes and not self._nodes[name].gone}
        event = Event(USAGE, {"nodes": here})
        self._usage_at = self._now() + max(USAGE_EVERY, len(event.to_line()) / USAGE_BYTES)
        self._publish(event)

    def _note(self, event: Event) -> None:
        if event.kind == RETURNED and self._world and event.data.get("world") == self._world.key:
            self._world.finished.add(str(event.data.get("node")))
        elif event.kind == FINISHED:
            self._decide(Verdict("done", f"the last step, {event.data.get('step')}, is done", 0))
        elif event.kind in {PROGRESS, CHECKPOINT}:
            step = event.data.get("step")
            if isinstance(step, int) and step > self._best_step:
                self._best_step = step
                self._budget.progress()
                self._decide_at = None

    def _form(self, event: Event) -> None:
        key, size = str(event.data["world"]), int(event.data["nodes"])
        ranks = self._forming.setdefault(key, {})
        ranks.update(event.data["ranks"])
        if len(ranks) < size:
            return
        self._forming.clear()
        self._world = _World(key, size, dict(ranks), self._now())
        self._changing = False
        self._publish(Event(WORLD, {**event.data, "ranks": dict(sorted(ranks.items(), key=lambda item: item[1]))}, event.time))

    def _fail(self, event: Event) -> bool:
        """Take a failure; return whether its reason has been told before."""
        cause = _Cause(self._world_of(event.data), self._placed(event.data))
        teller, identity = _identity(cause.world, event.data), _identity(cause.world, cause.data)
        known = self._is_known(cause)
        if identity not in self._reported and not self._failed:
            self._publish(Event(FAILURE, cause.data, event.time))
            self._weigh(cause, identity[1])
        self._reported |= {teller, identity}
        return known

    def _placed(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the failure as that of the rank that it befell, which may be another than the one that tells it."""
        told = {key: value for key, value in data.items() if key != "befell"}
        for node, ranks in (self._world.ranks if self._world else {}).items():
            if data.get("befell") in ranks:
                return {**told, "node": node, "rank": data["befell"], "local_rank": ranks.index(data["befell"])}
        return told

    def _is_known(self, cause: _Cause) -> bool:
        """Whether another rank of its world has told the same reason, or one of which this is but a consequence."""
        told = self._told.setdefault(cause.world, {})
        reason = str(cause.data.get("error"))
        known = reason in told or (cause.collateral and not all(told.values()))
        told[reason] = cause.collateral
        return known

    def _weigh(self, cause: _Cause, node: str) -> None:
        permanent = cause.data.get("permanent")
        if permanent is True or (permanent == AT_FIRST and self._best_step < 0):
            self._cause = cause
            self._give_up("this does not get better by trying again")
        elif self._world and cause.world == self._world.key and self._world.finished - {node}:
            self._cause = cause
            self._fail_unfinished("")
        else:
            self._count(cause)

    def _count(self, cause: _Cause) -> None:
        if cause.world not in self._counted:
            if cause.collateral and self._changing:
                return  # a node came or went, and its peers stumbled over that: nobody's fault
            self._counted.add(cause.world)
            if self._steady(cause.world):
                self._budget.progress()
            self._budget.failed()
            self._blame(cause)
        elif self._cause and self._cause.world == cause.world and self._cause.collateral and not cause.collateral:
            self._blame(cause)
        if self._budget.bug:
            self._give_up(self._budget.bug)
        elif self._budget.spent and self._cause:
            self._decide_at = self._now() + (COLLATERAL_GRACE if self._cause.collateral else 0.0)
            self.tick()

    def _blame(self, cause: _Cause) -> None:
        self._cause = cause
        self._budget.caused(cause.world, cause.data)
        if not self._budget.bug and (found := self._budget.suspect()):
            node, times = found
            often = f"{times} times within an hour, more often than all others together"
            message = f"{node} was the first to fail {often}: is its machine sound? A drained one is done without, if min_nodes allows"
            self._publish(Event(NOTE, {"node": node, "message": message}))

    def _world_of(self, data: dict[str, Any]) -> str:
        """Name the world that a failure belongs to; an agent that fails knows only its round."""
        if "world" in data:
            return str(data["world"])
        its_round = str(data.get("round", self.round))
        return self._world.key if self._world and self._world.key.startswith(f"{its_round}/") else its_round

    def _steady(self, key: str) -> bool:
        world = self._world
        return self._best_step < 0 and world is not None and world.key == key and self._now() - world.born >= STEADY

    def _finishing(self) -> bool:
        return self._world is not None and bool(self._world.finished)

    def _unfinished(self) -> set[str]:
        """Return the nodes of the world that are still needed after another one has finished."""
        return self._world.members - self._world.finished if self._world and self._finishing() else set()

    def _fail_unfinished(self, what: str) -> None:
        first = min(self._world.finished) if self._world else ""
        reason = f"{first} had finished by then, so this world cannot form again"
        self._give_up(f"{what}; {reason}" if what else reason, lead=bool(what))

    def _give_up(self, reason: str | None = None, *, lead: bool = False) -> None:
        data = self._cause.data if self._cause else {}
        reason = reason or self._budget.spent or "given up"
        why = reason if lead or not data else f"{_name(data)}: {data.get('error', 'no reason given')}; {reason}"
        self._decide(Verdict("failed", why, _exit_code(data), str(data.get("hint") or "")))

    def _decide(self, verdict: Verdict) -> None:
        self._decide_at = None
        if self._verdict:
            return
        self._verdict, self._verdict_at = verdict, self._now()
        self._publish(Event(VERDICT, {key: value for key, value in asdict(verdict).items() if key != "hint" or value}))

    def _see(self, name: str) -> None:
        node = self._nodes.setdefault(name, _Node(self._now()))
        node.seen, node.gone = self._now(), False

    def _gone(self, name: str, exit_code: int | None) -> None:
        self._nodes[name].gone = True
        self._publish(Event(LEFT, {"node": name, "exit_code": exit_code}))

    def _silent(self, node: _Node) -> bool:
        return self._now() - node.seen > SILENT


def _identity(world: str, data: dict[str, Any]) -> tuple[str, str, int]:
    return world, str(data.get("node")), int(data.get("rank", -1))


def _name(data: dict[str, Any]) -> str:
    rank = data.get("rank")
    return str(data.get("node", "a node")) + (f" rank {rank}" if rank is not None else "")


def _exit_code(data: dict[str, Any]) -> int:
    """Return the code that a shell would show for this failure; 1 if nobody knows it."""
    if name := data.get("signal"):
        return 128 + getattr(signal, str(name), 0)
    code = data.get("exit_code")
    return code if isinstance(code, int) and code else 1
