"""What the notice board knows and decides: which rendezvous round counts, and how the run ended.

A pure state machine: calls in, events out through `publish`, time through `now` (seconds, monotonic). The rules:

- A round is used until a node says that it is closed; N nodes that close the same round draw one new round.
- A world that fails costs one of `max_restarts`, however many of its ranks fail. A step higher than any before gives all
  of them back, but for those of `max_restarts_per_hour`. When none is left, the run has failed, and the first failure of
  its last world says why. The same exception at the same step twice in a row is a bug, and the end, whatever is left.
- A run is done when the trainer says so, or, with a script that says nothing, when all nodes of a world have left with 0.
- After one node has finished, the others cannot form that world again: if one of them fails, the run has failed.

Who is here is presence.py's, when a round begins gathering.py's, what is printed when printing.py's, what befell which
world worlds.py's, how often a run may fail budget.py's, and which nodes are left out suspects.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from swarmtrain.entrypoint.budget import Budget
from swarmtrain.entrypoint.gathering import Gathering
from swarmtrain.entrypoint.presence import Presence
from swarmtrain.entrypoint.printing import Printer
from swarmtrain.entrypoint.suspects import Suspects, of_a_machine
from swarmtrain.entrypoint.worlds import Cause, Told, Worlds
from swarmtrain.wire import (
    ASKED,
    AT_FIRST,
    BOARD_UP,
    CHECKPOINT,
    EXIT_PLANNED,
    FAILURE,
    FINISHED,
    JOINED,
    LEFT,
    LEFT_OUT,
    LET_IN,
    PROGRESS,
    RETURNED,
    USAGE,
    VERDICT,
    WORLD,
    Event,
    Orders,
    Receipt,
    Verdict,
)

LINGER = 2.0
"""Seconds that the board stays at least after the verdict."""
STEADY = 300.0
"""Seconds that a world must live to count as progress, for scripts that report no steps."""
COLLATERAL_GRACE = 3.0
"""Seconds to wait for the cause, when all we have heard of is what came in its wake."""

_OURS = {ASKED, BOARD_UP, LEFT, LEFT_OUT, LET_IN, VERDICT}


class Notices:
    """The state of one board, from its start to its end; `boot` tells this board's rounds from those of its predecessor."""

    def __init__(
        self,
        *,
        run: str,
        max_restarts: int,
        max_restarts_per_hour: int,
        min_nodes: int,
        boot: str,
        now: Callable[[], float],
        publish: Callable[[Event], None],
    ) -> None:
        self._budget = Budget(max_restarts, max_restarts_per_hour, now)
        self._suspects = Suspects(min_nodes, now)
        self._boot = boot
        self._now = now
        self._printer = Printer(publish, now)
        self._nodes = Presence(now)
        self._gathering = Gathering(now)
        self._worlds = Worlds()
        self._told = Told()
        self._number = 1
        self._changing = True
        self._counted: set[str] = set()
        self._cause: Cause | None = None
        self._decide_at: float | None = None
        self._best_step = -1
        self._verdict: Verdict | None = None
        self._verdict_at = 0.0
        self._printer.print(Event(BOARD_UP, {"run": run}))

    @property
    def round(self) -> str:
        return f"{self._boot}-{self._number}"

    @property
    def orders(self) -> Orders:
        return Orders(self.round, self._verdict)

    @property
    def ended(self) -> bool:
        """Whether there is a verdict, and nobody left who has not heard it."""
        return self._verdict is not None and self._now() - self._verdict_at >= LINGER and self._nodes.deserted

    def join(self, name: str) -> Orders:
        """A node's supervisor has started, for the first time or again."""
        if name not in self._nodes:
            self._changing = True
        elif name in self._worlds.unfinished:
            self._fail_unfinished(f"{name} was lost")
        if self._nodes.join(name) and self._worlds.newest:
            self._suspect(self._worlds.newest.key, name)
        return self.orders

    def beat(self, name: str) -> Orders:
        """A node's supervisor lives."""
        self._nodes.see(name)
        return self.orders

    def close(self, name: str, round: str) -> Orders:
        """A node has no agent yet ("") or any more; `round` is of no more use to it.

        The answer holds the same round again while the others are finishing: nothing is to be started then.
        """
        self._nodes.see(name)
        if round == self.round and not self._verdict:
            if name in self._worlds.unfinished:
                self._fail_unfinished(f"{name} ended")
            elif not self._worlds.finishing:
                self._number += 1
        if round == self.round or self._verdict:
            return self.orders
        others = self._nodes.lively - self._suspects.sitting_out
        wait = name in self._suspects.sitting_out or not self._gathering.come(self.round, name, others)
        return replace(self.orders, wait=wait)

    def leave(self, name: str, exit_code: int) -> Orders:
        """A node has ended: 0 with success, EXIT_PLANNED because it was told to, anything else because it could not go on."""
        self._nodes.leave(name, exit_code)
        self._gathering.leave(name)
        self._printer.print(Event(LEFT, {"node": name, "exit_code": exit_code}))
        if exit_code == EXIT_PLANNED:
            self._changing = True
            self._suspects.left(name)
        if exit_code == 0 and (world := self._worlds.newest):
            world.finished.add(name)
            left = [member for member in world.members if self._nodes.has_finished(member)]
            if len(left) >= world.nodes:
                self._decide(Verdict("done", f"all {len(left)} nodes have finished" if len(left) > 1 else "its node has finished", 0))
        elif name in self._worlds.unfinished:
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
            self._printer.usage(event.data, self._nodes)
        elif event.kind == PROGRESS:
            self._note(event)
            self._printer.progress(event)
        elif event.kind == JOINED:
            self._gathering.announce(str(event.data["node"]))
            self._printer.print(event)
        else:
            self._printer.print(event)
            self._note(event)
        return Receipt(known, over=self._failed)

    def tick(self) -> None:
        """Let time pass: find lost nodes, and give the verdict that was waiting for a better reason."""
        for name in self._nodes.lost():
            self._printer.print(Event(LEFT, {"node": name, "exit_code": None}))
            if name in self._worlds.unfinished:
                self._fail_unfinished(f"{name} was lost")
        for event in [] if self._verdict else self._suspects.let_in(self._nodes.here):
            self._changing = True
            self._printer.print(event)
        self._printer.tick()
        if self._decide_at is not None and self._now() >= self._decide_at:
            self._give_up()

    def _note(self, event: Event) -> None:
        world = self._worlds.newest
        if event.kind == RETURNED and world and event.data.get("world") == world.key:
            world.finished.add(str(event.data.get("node")))
        elif event.kind == FINISHED:
            self._decide(Verdict("done", f"the last step, {event.data.get('step')}, is done", 0))
        elif event.kind in {PROGRESS, CHECKPOINT}:
            step = event.data.get("step")
            if isinstance(step, int) and step > self._best_step:
                self._best_step = step
                self._budget.progress()
                self._decide_at = None

    def _form(self, event: Event) -> None:
        if world := self._worlds.form(event.data, self._now()):
            self._changing = False
            ranks = dict(sorted(world.ranks.items(), key=lambda item: item[1]))
            self._printer.print(Event(WORLD, {**event.data, "ranks": ranks}))

    def _fail(self, event: Event) -> bool:
        """Take a failure; return whether its reason has been told before."""
        cause = self._worlds.cause(event.data, self.round)
        known = self._told.known(cause)
        if self._told.first(cause, event.data) and not self._failed:
            self._printer.print(Event(FAILURE, cause.data))
            self._weigh(cause)
        return known

    def _weigh(self, cause: Cause) -> None:
        permanent, world = cause.data.get("permanent"), self._worlds.newest
        if permanent is True or (permanent == AT_FIRST and self._best_step < 0):
            self._cause = cause
            self._give_up("this does not get better by trying again")
        elif world and cause.world == world.key and world.finished - {cause.node}:
            self._cause = cause
            self._fail_unfinished("")
        else:
            self._count(cause)

    def _count(self, cause: Cause) -> None:
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

    def _blame(self, cause: Cause) -> None:
        self._cause = cause
        self._budget.caused(cause.world, cause.data)
        if of_a_machine(cause.data):
            self._suspect(cause.world, cause.node)

    def _suspect(self, world: str, node: str) -> None:
        """The machine of `node` made `world` fail: leave it out if that is too often. The others meet without it, in a new round."""
        if self._verdict or self._worlds.finishing:
            return
        event = self._suspects.failed(world, node, self._nodes.here)
        if event and event.kind == LEFT_OUT:
            self._number += 1
            self._changing = True
            self._decide_at = None
            self._budget.progress()  # the others fail no more for what it did
        if event:
            self._printer.print(event)

    def _steady(self, key: str) -> bool:
        world = self._worlds.newest
        return self._best_step < 0 and world is not None and world.key == key and self._now() - world.born >= STEADY

    def _fail_unfinished(self, what: str) -> None:
        first = min(self._worlds.newest.finished) if self._worlds.newest else ""
        reason = f"{first} had finished by then, so this world cannot form again"
        self._give_up(f"{what}; {reason}" if what else reason, lead=bool(what))

    @property
    def _failed(self) -> bool:
        return self._verdict is not None and not self._verdict.done

    def _give_up(self, reason: str | None = None, *, lead: bool = False) -> None:
        cause, reason = self._cause, reason or self._budget.spent or "given up"
        data = cause.data if cause else {}
        why = f"{cause.name}: {data.get('error', 'no reason given')}; {reason}" if cause and not lead else reason
        self._decide(Verdict("failed", why, cause.exit_code if cause else 1, str(data.get("hint") or "")))

    def _decide(self, verdict: Verdict) -> None:
        self._decide_at = None
        if self._verdict:
            return
        self._verdict, self._verdict_at = verdict, self._now()
        self._printer.print(Event(VERDICT, {key: value for key, value in asdict(verdict).items() if key != "hint" or value}))
