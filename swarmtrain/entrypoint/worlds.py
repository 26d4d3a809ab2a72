"""The worlds of a run: the one that is forming, the one that trains, and what befell each of them.

Pure: values in, values out. A world is known by its key (wire.world_key), a failure by the world, the node and the rank
that it befell.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.wire import collateral

_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass
class World:
    """All nodes of which have told that they are in it."""

    key: str
    nodes: int
    ranks: dict[str, list[int]]
    born: float
    finished: set[str] = field(default_factory=set)
    """Nodes whose ranks have returned: they cannot form this world again."""

    @property
    def members(self) -> set[str]:
        return set(self.ranks)


@dataclass(frozen=True)
class Cause:
    """Why a world has failed, or what came in the wake of that."""

    world: str
    data: dict[str, Any]

    @property
    def collateral(self) -> bool:
        return collateral(self.data)

    @property
    def node(self) -> str:
        return str(self.data.get("node"))

    @property
    def name(self) -> str:
        """Whom it befell, for a person."""
        rank = self.data.get("rank")
        return str(self.data.get("node", "a node")) + (f" rank {rank}" if rank is not None else "")

    @property
    def exit_code(self) -> int:
        """The code that a shell would show for it; 1 if nobody knows that."""
        if name := self.data.get("signal"):
            return 128 + getattr(signal, str(name), 0)
        code = self.data.get("exit_code")
        return code if isinstance(code, int) and code else 1


class Worlds:
    """The newest world, and the one that comes after it."""

    def __init__(self) -> None:
        self.newest: World | None = None
        self._forming: dict[str, dict[str, list[int]]] = {}

    def form(self, data: Mapping[str, Any], now: float) -> World | None:
        """Take one node's word that it is in a world; return that world once all its nodes are."""
        key, size = str(data["world"]), int(data["nodes"])
        ranks = self._forming.setdefault(key, {})
        ranks.update(data["ranks"])
        if len(ranks) < size:
            return None
        self._forming.clear()
        self.newest = World(key, size, dict(ranks), now)
        return self.newest

    def cause(self, data: Mapping[str, Any], round: str) -> Cause:
        """Return the failure as that of the world that it belongs to, and of the rank that it befell, which another may have told of.

        `round` is the one that counts now: an agent that fails knows of no world.
        """
        told = {key: value for key, value in data.items() if key != "befell"}
        for node, ranks in (self.newest.ranks if self.newest else {}).items():
            if data.get("befell") in ranks:
                told |= {"node": node, "rank": data["befell"], "local_rank": ranks.index(data["befell"])}
        if "world" in data:
            return Cause(str(data["world"]), told)
        its_round = str(data.get("round", round))
        return Cause(self.newest.key if self.newest and self.newest.key.startswith(f"{its_round}/") else its_round, told)

    @property
    def finishing(self) -> bool:
        """Whether the newest world can no more form again, since one of its nodes has finished."""
        return self.newest is not None and bool(self.newest.finished)

    @property
    def unfinished(self) -> set[str]:
        """The nodes of the newest world that are still needed after another one has finished."""
        return self.newest.members - self.newest.finished if self.newest and self.finishing else set()


class Told:
    """What has been told of each world's failures, so that nothing is printed twice."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str, int]] = set()
        self._reasons: dict[str, dict[str, bool]] = {}

    def known(self, cause: Cause) -> bool:
        """Whether another rank of its world has told the same reason, but for its numbers, or one of which this is but a consequence."""
        reasons = self._reasons.setdefault(cause.world, {})
        reason = _NUMBER.sub("0", str(cause.data.get("error")))
        known = reason in reasons or (cause.collateral and not all(reasons.values()))
        reasons[reason] = cause.collateral
        return known

    def first(self, cause: Cause, teller: Mapping[str, Any]) -> bool:
        """Whether nobody has told of this rank yet. `teller` is the failure as it was told, which counts for who told it too."""
        new = _identity(cause.world, cause.data) not in self._reported
        self._reported |= {_identity(cause.world, teller), _identity(cause.world, cause.data)}
        return new


def _identity(world: str, data: Mapping[str, Any]) -> tuple[str, str, int]:
    return world, str(data.get("node")), int(data.get("rank", -1))
