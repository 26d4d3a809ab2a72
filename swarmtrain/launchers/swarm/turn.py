"""A run gets all its GPUs at once or waits for all of them: two runs that each hold a half would wait for each other for ever.

Swarm gives each service what it reserves as soon as it is free, one by one, and in no order. So a run that finds too
little free creates nothing; it writes down in the swarm what it waits for, in a config object beside its lock, and looks
again. Whoever came earlier is counted as if it had what it wants already: first come, first served, and nobody is passed
over for ever. The places are in the order in which the managers made them; a run looks only when it has one, and gives it
up only when its services are there, so that of two that look at once the later one sees the earlier. Places are renewed
every few seconds; one that stands still has lost its owner and counts no more.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from swarmtrain.errors import StackError
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm.claims import Supply, Wants, node_of, supplies
from swarmtrain.launchers.swarm.lock import Lock
from swarmtrain.launchers.swarm.observe import LABEL_QUEUE
from swarmtrain.launchers.swarm.patience import USUAL, Patience

_WANTS = "swarmtrain.queue.wants"
_KIND = "swarmtrain.queue.kind"
_PLACE = "swarmtrain.queue.place"
_LOOK = 1.0
_REMIND = 30.0
Raw = dict[str, Any]


@dataclass(frozen=True)
class Need:
    """What a run reserves: how many of `kind`, by the constraint that pins each of its nodes. Nothing: it need not wait.

    One that is not `patient` is refused where others would wait.
    """

    run: str
    kind: str = ""
    wants: Wants = field(default_factory=dict)
    patient: bool = True


@contextlib.contextmanager
def turn(engine: Engine, need: Need, lock: Lock, say: Say, patience: Patience = USUAL) -> Iterator[None]:
    """Enter when all that the run reserves is free and nobody waits for it longer; leave when its services are there.

    `lock` is the run's, and held; while this waits it is lent. Raises EngineError; StackError if somebody else takes the
    lock meanwhile, or for a node that does not have what is wanted of it.
    """
    if not need.wants:
        yield
        return
    place = Lock(engine, need.run, f"waits for {need.kind} of other runs", patience, kind=LABEL_QUEUE)
    place.labels = {_KIND: need.kind, _WANTS: json.dumps(dict(need.wants), sort_keys=True)}
    with place.held(say):
        # Later changes give it other numbers: the first one is its place.
        place.labels[_PLACE] = str(_own(engine, need)["Version"]["Index"])
        place.write()
        _await(engine, need, lock, say, patience)
        place.check()
        yield


def _await(engine: Engine, need: Need, lock: Lock, say: Say, patience: Patience) -> None:
    told, reminded, lent = "", time.monotonic(), False
    while missing := _missing(engine, need, patience):
        if not need.patient:
            hint = "wait until they are, or ask without a probe: swarmtrain doctor CONFIG --no-probe"
            raise StackError(f"not all its {need.kind} are free: {missing}", place=f"run {need.run}", hint=hint)
        if not lent:
            lock.lend()
            lent = True
        if missing != told or time.monotonic() - reminded > _REMIND:
            told, reminded = missing, time.monotonic()
            say(f"waiting until all its {need.kind} are free: {missing}")
        time.sleep(_LOOK)
        if not lock.mine():
            raise lock.taken()
    if lent and not lock.take_back():
        raise lock.taken()


def _missing(engine: Engine, need: Need, patience: Patience) -> str:
    """Return what is not free for this run, and who has it; nothing if it is its turn."""
    # The places come first: whose place is gone by now has its services already, and those are looked at next.
    before_us = ahead(engine.listing("/configs", label=LABEL_QUEUE), need, patience.dead)
    nodes = engine.listing("/nodes")
    found = supplies(nodes, engine.listing("/services"), engine.listing("/tasks"), need.kind, but=need.run)
    told = [_lack(nodes, found, need, constraint, before_us) for constraint in need.wants]
    return "; ".join(filter(None, told))


def _lack(nodes: list[Raw], found: dict[str, Supply], need: Need, constraint: str, ahead: list[Need]) -> str:
    node, wanted = node_of(constraint, nodes), need.wants[constraint]
    if node is None:
        return ""  # it is not there, and Swarm says so
    supply = found[node["ID"]]
    if supply.declared < wanted:
        message = f"has {supply.declared} {need.kind}, and {wanted} are wanted"
        raise StackError(message, place=f"node {supply.host}", hint="swarmtrain doctor CONFIG prints the settings that declare them")
    # What an earlier one has already of what it wants is counted as claimed.
    before = {other.run: more for other in ahead if (more := _wanted(other, node, nodes) - supply.claimed.get(other.run, 0)) > 0}
    if supply.free - sum(before.values()) >= wanted:
        return ""
    holders = [f"{_called(stack)} has {count}" for stack, count in sorted(supply.claimed.items())]
    holders += [f"run {run} waits for {count}" for run, count in before.items()]
    return f"{supply.host} has {supply.declared}, {wanted} wanted, {', '.join(holders)}"


def _wanted(other: Need, node: Raw, nodes: list[Raw]) -> int:
    return sum(count for constraint, count in other.wants.items() if node_of(constraint, nodes) is node)


def _called(stack: str) -> str:
    return stack or "a service of no stack"


def _own(engine: Engine, need: Need) -> Raw:
    found: Raw = engine.get(f"/configs/{need.run}_queue")
    return found


def ahead(places: list[Raw], need: Need, dead: float) -> list[Need]:
    """Return what those wait for who came before, in their order. Ages are by the managers' clock, which wrote them all."""
    order = {place["Spec"]["Labels"][LABEL_QUEUE]: _number(place) for place in places}
    renewed = {place["ID"]: datetime.fromisoformat(place["UpdatedAt"]).timestamp() for place in places}
    now = max(renewed.values(), default=0.0)
    living = [place for place in places if now - renewed[place["ID"]] < dead]
    others = [_need(place) for place in sorted(living, key=_number)]
    return [other for other in others if other.kind == need.kind and order[other.run] < order.get(need.run, 0)]


def _number(place: Raw) -> int:
    return int(place["Spec"]["Labels"].get(_PLACE, place["Version"]["Index"]))


def _need(place: Raw) -> Need:
    labels = place["Spec"]["Labels"]
    return Need(labels[LABEL_QUEUE], labels.get(_KIND, ""), json.loads(labels.get(_WANTS, "{}")))
