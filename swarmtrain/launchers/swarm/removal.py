"""Taking a stack down, or only its nodes, and returning when it is really so.

`docker stack rm` returns while tasks still stop and the network is still in use, which is why a deploy right after it
fails. Here each kind of thing is gone before the next is touched; whatever an earlier attempt left is taken along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from swarmtrain.errors import EngineError, StackError
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe
from swarmtrain.launchers.swarm.deploy import Check, side_by_side, update
from swarmtrain.launchers.swarm.follow import last_words
from swarmtrain.launchers.swarm.observe import Service

_POLL = 0.3
_SAY_EVERY = 5.0
# On top of the stop grace: Swarm waits 2 s before it signals, and its reapers take a moment.
_MARGIN = 60.0
_NETWORK_PATIENCE = 60.0


def take_down(engine: Engine, stack: str, say: Say, check: Check = lambda: None) -> None:
    """Remove all that is labelled as of `stack` and return when it is gone. Raises StackError if it will not go in time.

    `check` is called before each change, and raises if nothing may be changed any more.
    """
    services = observe.services(engine, stack)
    with last_words(engine, stack, services):
        for group in _nodes_first(services):
            _remove_services(engine, stack, group, say, check)
        await_forgotten(engine, stack, say)  # meanwhile what they said last arrives
    check()
    there = observe.observe(engine, stack)
    for name, network in there.networks.items():
        _remove_network(engine, network["Id"], name, say)
    check()
    for secret in there.secrets.values():
        engine.delete(f"/secrets/{secret}")
    for config in _mark_last(there):
        engine.delete(f"/configs/{config}")
    _await(f"what is left of {stack}", _MARGIN, say, lambda: _left(engine, stack))


def take_back(engine: Engine, stack: str, made: Collection[str], say: Say, check: Check) -> None:
    """Remove a stack whose first deploy has failed, but for services that somebody else has made or changed since.

    `made` are the names of what that deploy has made. Raises StackError, EngineError.
    """
    services = observe.services(engine, stack)
    ours = [service for service in services if service.name in made and not service.changed]
    if len(ours) == len(services):
        take_down(engine, stack, say, check)
        return
    kept = ", ".join(service.name for service in services if service not in ours)
    say(f"somebody else has made or changed {kept}: that stays, with what it uses")
    _remove_services(engine, stack, ours, say, check)


def _mark_last(there: observe.Observed) -> list[str]:
    """Return the ids of the configs, at the end the one by which a run that is half removed is known."""
    return [there.configs[name] for name in sorted(there.configs, key=lambda name: observe.is_mark(there.stack, name))]


def _remove_services(engine: Engine, stack: str, services: list[Service], say: Say, check: Check) -> None:
    if not services:
        return
    check()
    say(f"removing {', '.join(service.name for service in services)}")
    side_by_side(lambda service: engine.delete(f"/services/{service.id}"), services)
    await_stopped(engine, stack, services, say)


def await_stopped(engine: Engine, stack: str, services: list[Service], say: Say) -> None:
    """Return when no container of `services` runs any more. Raises StackError if one still does after its grace and a minute."""
    ids = {service.id for service in services}
    grace = max((_grace(service) for service in services), default=0.0)
    _await("their containers", grace + _MARGIN, say, lambda: _tasks(engine, stack, ids, say))


def await_forgotten(engine: Engine, stack: str, say: Say) -> None:
    """Return when Swarm has forgotten the tasks of services that are gone: until then they hold on to the network.

    Raises StackError if it has not after their grace and a minute.
    """
    left = _orphans(engine, stack)
    grace = max((task.grace for task in left), default=0.0)
    _await("tasks that are going down", grace + _MARGIN, say, lambda: _forgotten(engine, stack))


def stop(engine: Engine, stack: str, services: list[Service], say: Say, check: Check) -> None:
    """Set the nodes' replicas to 0 and return when none of their containers runs. Raises StackError, EngineError.

    The notice board stays, and with it all that is known of the run.
    """
    nodes = [service for service in services if service.is_node]
    running = [service for service in nodes if service.replicas]
    with last_words(engine, stack, nodes):
        if running:
            check()
            say(f"stopping {', '.join(service.name for service in running)}")
            side_by_side(lambda service: _to_zero(engine, service), running)
        await_stopped(engine, stack, nodes, say)


def _nodes_first(services: list[Service]) -> list[list[Service]]:
    """Ranks that save on their way out still talk to the board; a probe has nothing to save, and all of it goes at once."""
    if any(service.is_probe for service in services):
        return [services]
    return [[service for service in services if service.is_node], [service for service in services if not service.is_node]]


def _to_zero(engine: Engine, service: Service) -> None:
    update(engine, service.id, service.version, {**service.spec, "Mode": {"Replicated": {"Replicas": 0}}})


def _grace(service: Service) -> float:
    container = service.spec["TaskTemplate"].get("ContainerSpec", {})
    return float(container.get("StopGracePeriod", 10 * 10**9)) / 1e9


def _tasks(engine: Engine, stack: str, services: set[str], say: Say) -> list[str]:
    """Return the services' tasks whose containers may still run. A node that is down cannot tell, and is not waited for."""
    running = [task for task in observe.tasks(engine, stack) if task.service in services and task.node and not task.over]
    if not running:
        return []
    down = observe.down_nodes(engine)
    hosts = observe.hosts(engine)
    lost = sorted({down[task.node] for task in running if task.node in down})
    waiting = [f"{task.state} on {hosts.get(task.node, task.node)}" for task in running if task.node not in down]
    if lost and not waiting:
        say(f"{', '.join(lost)} is down: what runs there is removed when it comes back")
    return waiting


def _forgotten(engine: Engine, stack: str) -> list[str]:
    """Return the tasks that Swarm has not cleared away yet. Those of a node that is down stay until it comes back."""
    left = _orphans(engine, stack)
    down = observe.down_nodes(engine) if left else {}
    return [f"{task.name} ({task.state})" for task in left if task.node not in down]


def _orphans(engine: Engine, stack: str) -> list[observe.Task]:
    # The services second: one that is made between the two requests has no task among the first.
    found = observe.tasks(engine, stack)
    there = {service.id for service in observe.services(engine, stack)} if found else set()
    return [task for task in found if task.service not in there]


def _remove_network(engine: Engine, id: str, name: str, say: Say) -> None:
    """Remove a network, again while Swarm still counts a task that is gone among its users."""
    say(f"removing network {name}")
    end = time.monotonic() + _NETWORK_PATIENCE
    while True:
        try:
            engine.delete(f"/networks/{id}")
            return
        except EngineError as error:
            if error.status is None:
                raise
            if time.monotonic() > end:
                hint = "remove what uses it, and repeat"
                raise StackError(f"cannot be removed: {error.message}", place=f"network {name}", hint=hint) from None
        time.sleep(_POLL)


def _left(engine: Engine, stack: str) -> list[str]:
    there = observe.observe(engine, stack)
    return [*there.services, *there.networks, *there.configs, *there.secrets]


def _await(what: str, patience: float, say: Say, left: Callable[[], list[str]]) -> None:
    """Return when nothing is `left`. Raises StackError after `patience` seconds."""
    begun = told = time.monotonic()
    while waiting := left():
        now = time.monotonic()
        if now - begun > patience:
            message = f"{what}: still there after {patience:.0f} s: {', '.join(waiting)}"
            raise StackError(message, hint="repeat it; docker node ls shows nodes that hang")
        if now - told > _SAY_EVERY:
            told = now
            say(f"waiting for {what}: {', '.join(waiting)}")
        time.sleep(_POLL)
