"""What the board decides for a world that has broken: which step its survivors save, and which of them write it.

And for one that begins, on disks that no other has seen: its token.

A pure state machine, as notices.py is. Ranks say what they hold, again and again while they live. The rules:

- The newest step of which all parts are there wins. A rank that is ready for a step counts as one that has made it, if
  another has: ranks may have been told of a step's end unevenly, by one.
- Who is not ready has not joined in the last exchange of the next step, so nobody has got beyond it: where such a rank
  stands is the newest step there is, and it is decided on as soon as it is whole. Otherwise others are waited for.
- One rank writes each part, the lowest. When one of them falls silent, others are chosen, from those that are left.
- Where each node has its own disk, one node's ranks must hold all parts; all nodes of which that is so save, each for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from swarmtrain.wire import FAILURE, Event, Rescue, Stand

PATIENCE = 10.0
"""Seconds, from when the first rank has said where it stands, in which others may come that change the decision."""
SETTLED = 1.0
"""Seconds in which all nodes are to be heard that save for themselves: the more have it, the less goes over the network."""
SILENT = 5.0
"""Seconds without a word after which a survivor is taken for lost."""
_KEPT = 8


@dataclass
class _World:
    born: float
    stands: dict[int, Stand] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    seen: dict[int, float] = field(default_factory=dict)
    rescue: Rescue = field(default_factory=Rescue)
    saved: set[int] = field(default_factory=set)
    """Who has done what he was to do in this attempt, of the first writers."""


class Rescues:
    """The rescues of one run's worlds; `now` is in seconds, monotonic."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._worlds: dict[str, _World] = {}
        self._token = 0

    def answer(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a survivor asks, or a new world. Raises ValueError, KeyError or TypeError if it makes no sense."""
        if op == "stand":
            return asdict(self.stand(request["world"], int(request["rank"]), Stand(**request["stand"])))
        if op == "rescued":
            self.rescued(request["world"], int(request["attempt"]), int(request["rank"]))
        if op == "token":
            return {"token": self.token(int(request["above"]))}
        return {"rescuing": self.pending}

    def token(self, above: int) -> int:
        """Return a token higher than `above`, the highest on the disks of a world that begins, and than all that were drawn here."""
        self._token = max(self._token, above) + 1
        return self._token

    @property
    def pending(self) -> bool:
        """True while survivors are at it, so that a new world must wait for what they save."""
        return any(not world.rescue.over and self._alive(world) for world in self._worlds.values())

    def stand(self, key: str, rank: int, stand: Stand) -> Rescue:
        """Rank `rank` of the world `key` lives, and holds what `stand` says."""
        world = self._world(key)
        world.stands[rank], world.seen[rank] = stand, self._now()
        if not world.rescue.over:
            self._decide(world)
        return world.rescue

    def hear(self, event: Event) -> None:
        """Learn from a failure that a rank is dead: nobody needs to wait for what it might say."""
        if event.kind == FAILURE and {"world", "rank"} <= event.data.keys():
            world = self._world(str(event.data["world"]))
            world.dead.add(int(event.data["rank"]))

    def rescued(self, key: str, attempt: int, rank: int) -> None:
        """The first writer of a disk is done with an attempt: his checkpoint stands, or it could not be written."""
        world = self._worlds.get(key)
        if world and attempt == world.rescue.attempt:
            world.saved.add(rank)
            first: dict[int, int] = {}
            for writer in world.rescue.writers:
                first.setdefault(world.stands[writer].disk, writer)
            if world.saved >= set(first.values()):
                world.rescue = replace(world.rescue, over=True)

    def _world(self, key: str) -> _World:
        while len(self._worlds) > _KEPT:
            del self._worlds[next(iter(self._worlds))]
        return self._worlds.setdefault(key, _World(self._now()))

    def _decide(self, world: _World) -> None:
        alive, last = self._alive(world), world.rescue
        if last.writers and alive.keys() >= set(last.writers):
            return
        one, waited = next(iter(alive.values())), self._now() - world.born
        everybody = len(alive.keys() | world.dead) == one.size
        late = everybody or waited > PATIENCE
        step, writers = chosen(alive, late=late) if late or one.disks == 1 or waited > SETTLED else (0, ())
        if writers:
            world.rescue, world.saved = Rescue(step, writers, last.attempt + 1), set()
        elif late:
            world.rescue = Rescue(attempt=last.attempt, over=True)
        else:
            world.rescue = Rescue(attempt=last.attempt)

    def _alive(self, world: _World) -> dict[int, Stand]:
        return {rank: stand for rank, stand in world.stands.items() if rank not in world.dead and self._now() - world.seen[rank] <= SILENT}


def chosen(stands: dict[int, Stand], *, late: bool) -> tuple[int, tuple[int, ...]]:
    """Return the step to save and its writers, by rank; none if no step is whole, or, unless it is `late`, a newer one may come."""
    newest = max(stand.step for stand in stands.values())
    final = late or any(stand.step == newest and not stand.ready for stand in stands.values())
    for step in (newest, newest - 1) if late else (newest,) if final else ():
        holders: dict[int, dict[int, int]] = {}
        # Who has made the step goes before who would make it now.
        for rank, stand in sorted(stands.items(), key=lambda item: (item[1].step != step, item[0])):
            if stand.step == step or (stand.ready and stand.step == step - 1 and step == newest):
                holders.setdefault(stand.disk, {}).setdefault(stand.part, rank)
        whole = [ranks.values() for ranks in holders.values() if len(ranks) == next(iter(stands.values())).parts]
        if step > 0 and whole:
            return step, tuple(sorted(rank for ranks in whole for rank in ranks))
    return 0, ()
