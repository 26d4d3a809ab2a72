"""What the board decides for a world that has broken: which step its survivors save, and which of them write it.

A pure state machine, as notices.py is. Ranks say what they hold, again and again while they live. The rules:

- The newest step of which all parts are there wins. A rank that is ready for a step counts as one that has made it, if
  another has: ranks may have been told of a step's end unevenly, by one.
- Who is not ready has not joined in the last exchange of the next step, so nobody has got beyond it: where such a rank
  stands is the newest step there is, and it is decided on as soon as it is whole. Otherwise others are waited for.
- One rank writes each part, the lowest. When one of them falls silent, others are chosen, from those that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain.wire import Rescue, Stand

PATIENCE = 10.0
"""Seconds, from when the first rank has said where it stands, in which others may come that change the decision."""
SILENT = 5.0
"""Seconds without a word after which a survivor is taken for lost."""
_KEPT = 8


@dataclass
class _World:
    born: float
    stands: dict[int, Stand] = field(default_factory=dict)
    seen: dict[int, float] = field(default_factory=dict)
    rescue: Rescue = field(default_factory=Rescue)


class Rescues:
    """The rescues of one run's worlds; `now` is in seconds, monotonic."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._worlds: dict[str, _World] = {}

    def answer(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a survivor asks, or a new world. Raises ValueError, KeyError or TypeError if it makes no sense."""
        if op == "stand":
            return asdict(self.stand(request["world"], int(request["rank"]), Stand(**request["stand"])))
        if op == "rescued":
            self.rescued(request["world"], int(request["attempt"]))
        return {"rescuing": self.pending}

    @property
    def pending(self) -> bool:
        """True while survivors are at it, so that a new world must wait for what they save."""
        return any(not world.rescue.over and self._alive(world) for world in self._worlds.values())

    def stand(self, key: str, rank: int, stand: Stand) -> Rescue:
        """Rank `rank` of the world `key` lives, and holds what `stand` says."""
        world = self._worlds.setdefault(key, _World(self._now()))
        while len(self._worlds) > _KEPT:
            del self._worlds[next(iter(self._worlds))]
        world.stands[rank], world.seen[rank] = stand, self._now()
        if not world.rescue.over:
            self._decide(world)
        return world.rescue

    def rescued(self, key: str, attempt: int) -> None:
        """The first writer of an attempt is done: its checkpoint stands, or it could not be written."""
        world = self._worlds.get(key)
        if world and attempt == world.rescue.attempt:
            world.rescue = Rescue(world.rescue.step, world.rescue.writers, attempt, over=True)

    def _decide(self, world: _World) -> None:
        alive, last = self._alive(world), world.rescue
        if last.writers and alive.keys() >= set(last.writers):
            return
        everybody = len(alive) == next(iter(alive.values())).size
        late = everybody or self._now() - world.born > PATIENCE
        step, writers = chosen(alive, late=late)
        if writers:
            world.rescue = Rescue(step, writers, last.attempt + 1)
        elif late:
            world.rescue = Rescue(attempt=last.attempt, over=True)
        else:
            world.rescue = Rescue(attempt=last.attempt)

    def _alive(self, world: _World) -> dict[int, Stand]:
        return {rank: stand for rank, stand in world.stands.items() if self._now() - world.seen[rank] <= SILENT}


def chosen(stands: dict[int, Stand], *, late: bool) -> tuple[int, tuple[int, ...]]:
    """Return the step to save and its writers, by rank; none if no step is whole, or, unless it is `late`, a newer one may come."""
    newest = max(stand.step for stand in stands.values())
    final = late or any(stand.step == newest and not stand.ready for stand in stands.values())
    for step in (newest, newest - 1) if late else (newest,) if final else ():
        holders: dict[int, int] = {}
        # Who has made the step goes before who would make it now.
        for rank, stand in sorted(stands.items(), key=lambda item: (item[1].step != step, item[0])):
            if stand.step == step or (stand.ready and stand.step == step - 1 and step == newest):
                holders.setdefault(stand.part, rank)
        if step > 0 and len(holders) == next(iter(stands.values())).parts:
            return step, tuple(sorted(holders.values()))
    return 0, ()
