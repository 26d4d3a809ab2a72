"""What stands in the way of a plan on this swarm, found by asking the managers only."""

from __future__ import annotations

import re
from pathlib import Path

from swarmtrain.config.names import HOST_NETWORK
from swarmtrain.config.runner import GpuMode
from swarmtrain.errors import EngineError, ImageError, StackError
from swarmtrain.images import contents, pin
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe
from swarmtrain.launchers.swarm.reconcile import check_networks
from swarmtrain.launchers.swarm.resources import settings
from swarmtrain.launchers.swarm.specs import Specs
from swarmtrain.plan import Machine, Plan
from swarmtrain.wire import LABEL_ROLE, LABEL_RUN, PREFIX, ROLE_RENDEZVOUS

_STORE_PORT = f"{PREFIX}STORE_PORT="
# The store, the board, and a probe.
_PORTS = 3
# The first engine that does not reject tasks with reserved GPUs after any change of their node.
_GPU_ENGINE = (25, 0, 3)
# These refuse an image that the node has if the registry answers "unauthorized".
_BROKEN_PULL = ((29, 6, 0), (29, 6, 2))


def findings(engine: Engine, plan: Plan) -> list[Finding]:
    """Return what stands in the way of `plan`. Raises EngineError if the managers cannot be asked."""
    machines = observe.inventory(engine).machines
    used = [machine for node in plan.nodes for machine in machines if node.host in (machine.host, machine.id)]
    return [
        *_foreign(engine, plan),
        *_image(engine, plan),
        *_managers(machines),
        *_ports(engine, plan),
        *_resources(plan, used),
        *_versions(plan, used),
    ]


def network_findings(specs: Specs, there: observe.Observed) -> list[Finding]:
    """Return what keeps the stack's networks from being used as they are."""
    try:
        check_networks(specs, there)
    except StackError as error:
        return [Finding(error.place or "network", error.message, error.hint)]
    return []


def foreign(services: list[observe.Service]) -> bool:
    """Say whether these services are a stack that is no run of ours."""
    return bool(services) and not any(LABEL_RUN in service.spec.get("Labels", {}) for service in services)


def foreign_finding(run: str) -> Finding:
    """Return what to say of a stack that took the run's name."""
    return Finding(f"run {run}", "a stack of this name exists that is no run of swarmtrain", "give the run another name: --name")


def _foreign(engine: Engine, plan: Plan) -> list[Finding]:
    if not foreign(observe.services(engine, plan.run)):
        return []
    return [foreign_finding(plan.run)]


def _image(engine: Engine, plan: Plan) -> list[Finding]:
    image = plan.config.runner.docker_config.docker_container
    try:
        pinned = pin(engine, image)
    except ImageError as error:
        return [Finding(error.place or "image", error.message, error.hint)]
    try:
        there = contents.read(engine.get(f"/images/{pinned.reference}/json"))
    except EngineError:  # this engine does not have it, and only those that do know what is in it
        return []
    built, added = contents.changed(there, Path.cwd(), {item.name for item in plan.cargo.code})
    if not built and not added:
        return []
    message = f"changed since it was built: {', '.join([*built, *(f'{name}/' for name in added)])}"
    why = "the nodes run what is in the image; only the script, runner.code and the config come with the run"
    return [Finding(f"image {image}", message, contents.rebuild(image, there, built, added), fatal=False, why=why)]


def _managers(machines: tuple[Machine, ...]) -> list[Finding]:
    managers = [machine for machine in machines if machine.manager]
    if any(not machine.unavailable for machine in managers):
        return []
    states = ", ".join(f"{machine.host} is {machine.unavailable}" for machine in managers)
    hint = f"docker node update --availability active {managers[0].host}"
    return [Finding("rendezvous", f"it runs on a manager, and none takes containers: {states}", hint)]


def _ports(engine: Engine, plan: Plan) -> list[Finding]:
    """Find another run on the machines' own network whose ports this one would have."""
    if plan.board is None:
        return []
    found = []
    for item in engine.listing("/services", label=f"{LABEL_ROLE}={ROLE_RENDEZVOUS}"):
        run, template = item["Spec"]["Labels"].get(LABEL_RUN, ""), item["Spec"]["TaskTemplate"]
        port = next((int(each.partition("=")[2]) for each in template["ContainerSpec"]["Env"] if each.startswith(_STORE_PORT)), 0)
        if run == plan.run or abs(port - plan.master_port) >= _PORTS:
            continue
        if HOST_NETWORK in {observe.network_of(engine, network["Target"]) for network in template.get("Networks") or []}:
            hint = f"-o runner.master_port={port + _PORTS}, or any port with two free ones behind it"
            found.append(Finding("config runner.master_port", f"run {run} listens on {port} and the next ones, as this one would", hint))
    return found


def _resources(plan: Plan, used: list[Machine]) -> list[Finding]:
    swarm = plan.config.runner.swarm
    if swarm.gpu is not GpuMode.reserve:
        return []
    slots = {node.host: node.slots for node in plan.nodes}
    return [
        Finding(
            f"node {machine.host}",
            f"has {machine.resources.get(swarm.generic_resource, 0)} {swarm.generic_resource}, and {slots[machine.host]} are wanted",
            settings(swarm.generic_resource),
            why="Swarm knows of no GPUs but those that an engine's settings name; fewer slots would do too",
        )
        for machine in used
        if machine.resources.get(swarm.generic_resource, 0) < slots.get(machine.host, 0)
    ]


def _versions(plan: Plan, used: list[Machine]) -> list[Finding]:
    found = []
    for machine in used:
        version = _version(machine.engine)
        if plan.config.runner.swarm.gpu is GpuMode.reserve and version < _GPU_ENGINE:
            message = f"engine {machine.engine} rejects tasks that reserve GPUs whenever the node changes, as when a network comes to it"
            found.append(Finding(f"node {machine.host}", message, "update it to 25.0.3, or set runner.swarm.gpu to visible", fatal=False))
        if _BROKEN_PULL[0] <= version <= _BROKEN_PULL[1]:
            message = f"engine {machine.engine} rejects images that it has, if their registry wants a login"
            found.append(Finding(f"node {machine.host}", message, "update it to 29.7", fatal=False))
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
