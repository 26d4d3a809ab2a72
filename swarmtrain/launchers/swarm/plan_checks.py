"""Check a plan against the swarm with queries to the managers only."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.config.schema.fields.overlay_subnet import describe_size_problem
from swarmtrain.config.schema.fields.validators import HOST_NETWORK
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.errors import EngineError, ImageError, StackError
from swarmtrain.images import contents, pin_image
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.common import engine_variants
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.engine_values import parse_count, parse_environment
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.machines.generic_resources import format_gpu_settings
from swarmtrain.launchers.swarm.reconcile import check_networks
from swarmtrain.launchers.swarm.service_specs import StackSpecs
from swarmtrain.planning.inventory import Machine
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import ENV_PREFIX, LABEL_ROLE, LABEL_RUN, ROLE_RENDEZVOUS

_COORDINATOR_PORT_VARIABLE = f"{ENV_PREFIX}COORDINATOR_PORT"
# Number of consecutive ports that a run uses: for the coordinator and a probe.
_PORTS_PER_RUN = 2
_ANY = 999  # a version number that no engine has reached


def _applies_always(_plan: Plan) -> bool:
    return True


def _reserves_gpus(plan: Plan) -> bool:
    return plan.gpu_mode is GpuMode.reserve


def _uses_overlay(plan: Plan) -> bool:
    return not plan.config.runner.swarm.is_on_host_network


def _creates_overlay(plan: Plan) -> bool:
    return plan.config.runner.swarm.network is None


def _creates_encrypted_overlay(plan: Plan) -> bool:
    return _creates_overlay(plan) and plan.config.runner.swarm.encrypted


@dataclass(frozen=True)
class EngineBug:
    """Known bug of the engine versions from `first` to `last`, both included, in plans to which it `applies`."""

    first: tuple[int, int, int]
    last: tuple[int, int, int]
    effect: str
    """Effect of the bug, to be printed after the version of the engine."""
    hint: str
    applies: Callable[[Plan], bool] = _applies_always


ENGINE_BUGS = (
    # moby#44378
    EngineBug(
        (0, 0, 0),
        (25, 0, 2),
        "rejects tasks that reserve GPUs whenever the node changes, for instance when a network is added",
        "update it to 25.0.3, or set runner.swarm.gpu to visible",
        _reserves_gpus,
    ),
    # moby#51341
    EngineBug(
        (25, 0, 13),
        (25, 0, 13),
        "may not connect containers on different machines through an overlay network",
        "use another version, or set runner.swarm.network to host",
        _uses_overlay,
    ),
    # moby#48069
    EngineBug(
        (27, 0, 0),
        (27, 0, _ANY),
        "may give the networks of two runs the same subnet",
        "update it to 27.1, or set runner.swarm.network to an existing network",
        _creates_overlay,
    ),
    # moby#50129
    EngineBug(
        (28, 2, 0),
        (28, 2, _ANY),
        "may not find services by their names",
        "update it to 28.3, or set runner.swarm.network to host",
        _uses_overlay,
    ),
    # moby#51491
    EngineBug(
        (29, 0, 0),
        (29, 0, 0),
        "may not resolve names after docker swarm init",
        "use a later version, or set runner.swarm.network to host",
        _uses_overlay,
    ),
    # moby#53141; the coordinator's client then uses the last address that answered.
    EngineBug(
        (29, 0, 0),
        (29, 6, 2),
        "may not resolve the names of a node's services for hours after the node lost its link for seconds",
        "update it to a version after 29.6.2; while deploy or logs -f follow the run, they replace a coordinator that a node cannot find",
        _uses_overlay,
    ),
    # moby#51672
    EngineBug(
        (29, 0, 0),
        (29, _ANY, _ANY),
        "may not connect containers through an encrypted overlay network",
        "set runner.swarm.encrypted to false, or use an engine before 29",
        _creates_encrypted_overlay,
    ),
    # moby#51614
    EngineBug(
        (29, 1, 0),
        (29, 1, 0),
        "may not resolve the names of services",
        "use a later version, or set runner.swarm.network to host",
        _uses_overlay,
    ),
    EngineBug(
        (29, 6, 0),
        (29, 6, 2),
        "rejects images that it already has if their registry requires a login",
        "update it to 29.7",
    ),
    # moby#51485 (1,024 open files in containers of 29) is not in the table: the supervisor raises this limit itself.
)
"""Bugs of Docker engines that affect runs, as reported to moby, by their first version."""


def collect_findings(engine: DockerEngine, plan: Plan) -> list[Finding]:
    """Return the problems that would prevent `plan` from running. Raises EngineError if the managers do not answer."""
    machines = cluster_state.read_inventory(engine).machines
    planned_machines = [machine for node in plan.available_nodes for machine in machines if node.host in (machine.host, machine.id)]
    return [
        *_check_foreign_stack(engine, plan),
        *_check_image(engine, plan),
        *_check_managers(machines),
        *_check_ports(engine, plan),
        *_check_subnet_size(plan),
        *_check_resources(plan, planned_machines),
        *_check_engine_versions(plan, planned_machines),
        *engine_variants.collect_findings(
            engine.get("/info"),
            f"the engine at {engine.address}",
            uses_overlay=_uses_overlay(plan),
            uses_mounts=bool(plan.config.runner.docker_config.docker_mounts),
        ),
    ]


def collect_network_findings(specs: StackSpecs, existing: cluster_state.StackState) -> list[Finding]:
    """Return the problems that prevent the stack from using its existing networks."""
    try:
        check_networks(specs, existing)
    except StackError as error:
        return [Finding(error.place or "network", error.message, error.hint)]
    return []


def is_foreign_stack(services: list[cluster_state.Service]) -> bool:
    """Return whether `services` belong to a stack that is not a run of swarmtrain."""
    return bool(services) and not any(LABEL_RUN in service.labels for service in services)


def build_foreign_stack_finding(run: str) -> Finding:
    """Return the finding for a stack named `run` that is not a run of swarmtrain."""
    return Finding(f"run {run}", "a stack of this name already exists and is not a swarmtrain run", "choose another run name with --name")


def _check_foreign_stack(engine: DockerEngine, plan: Plan) -> list[Finding]:
    if not is_foreign_stack(cluster_state.list_services(engine, plan.run)):
        return []
    return [build_foreign_stack_finding(plan.run)]


def _check_image(engine: DockerEngine, plan: Plan) -> list[Finding]:
    image = plan.config.runner.docker_config.docker_container
    try:
        pinned = pin_image(engine, image)
    except ImageError as error:
        return [Finding(error.place or "image", error.message, error.hint)]
    try:
        image_contents = contents.read_image_contents(engine.get(f"/images/{pinned.reference}/json"))
    except EngineError:  # This engine does not have the image. Only an engine that has it can report its labels.
        return []
    built, added = contents.find_changed_files_and_folders(image_contents, Path.cwd(), {item.name for item in plan.cargo.code})
    if not built and not added:
        return []
    message = f"changed since it was built: {', '.join([*built, *(f'{name}/' for name in added)])}"
    why = "the nodes run the code in the image; only the script, runner.code and the config are sent with the run"
    return [Finding(f"image {image}", message, contents.build_rebuild_command(image, image_contents, built, added), fatal=False, why=why)]


def _check_managers(machines: tuple[Machine, ...]) -> list[Finding]:
    managers = [machine for machine in machines if machine.is_manager]
    if any(not machine.unavailable_reason for machine in managers):
        return []
    states = ", ".join(f"{machine.host} is {machine.unavailable_reason}" for machine in managers)
    hint = f"docker node update --availability active {managers[0].host}"
    return [Finding("rendezvous", f"runs on a manager, but no manager accepts tasks: {states}", hint)]


def _check_ports(engine: DockerEngine, plan: Plan) -> list[Finding]:
    """Return a finding for each other run on the host network whose ports overlap with this run's ports."""
    if plan.coordinator_machine is None:
        return []
    findings = []
    for item in engine.list_objects("/services", label=f"{LABEL_ROLE}={ROLE_RENDEZVOUS}"):
        run, template = item["Spec"]["Labels"].get(LABEL_RUN, ""), item["Spec"]["TaskTemplate"]
        port = parse_count(parse_environment((template.get("ContainerSpec") or {}).get("Env")).get(_COORDINATOR_PORT_VARIABLE))
        if run == plan.run or abs(port - plan.master_port) >= _PORTS_PER_RUN:
            continue
        if HOST_NETWORK in {cluster_state.read_network_name(engine, network["Target"]) for network in template.get("Networks") or []}:
            hint = f"-o runner.master_port={port + _PORTS_PER_RUN}, or any port that is followed by a free port"
            findings.append(
                Finding("config runner.master_port", f"run {run} listens on {port} and the ports after it, which this run needs too", hint)
            )
    return findings


def _check_subnet_size(plan: Plan) -> list[Finding]:
    """Return a finding if scaling has widened max_nodes so far that the configured subnet has too few addresses."""
    subnet = plan.config.runner.swarm.subnet
    problem = describe_size_problem(subnet, plan.max_nodes) if subnet else ""
    return (
        [Finding("config runner.swarm.subnet", problem, "set a larger subnet, and deploy again after swarmtrain down")] if problem else []
    )


def _check_resources(plan: Plan, planned_machines: list[Machine]) -> list[Finding]:
    swarm = plan.config.runner.swarm
    if plan.gpu_mode is not GpuMode.reserve:
        return []
    slots = {node.host: node.slots for node in plan.nodes}
    return [
        Finding(
            f"node {machine.host}",
            f"has {machine.resources.get(swarm.generic_resource, 0)} {swarm.generic_resource}, and {slots[machine.host]} are requested",
            format_gpu_settings(swarm.generic_resource),
            why="Swarm assigns only the GPUs that the engine's daemon.json declares; alternatively, reduce the slots",
            host=machine.host,
        )
        for machine in planned_machines
        if machine.resources.get(swarm.generic_resource, 0) < slots.get(machine.host, 0)
    ]


def _check_engine_versions(plan: Plan, planned_machines: list[Machine]) -> list[Finding]:
    """Return a finding for each known bug of each engine version, which names all machines with this version."""
    hosts_by_version: dict[str, list[str]] = {}
    for machine in planned_machines:
        hosts_by_version.setdefault(machine.engine, []).append(machine.host)
    return [
        Finding(f"{'node' if len(hosts) == 1 else 'nodes'} {', '.join(hosts)}", f"engine {version} {bug.effect}", bug.hint, fatal=False)
        for version, hosts in hosts_by_version.items()
        for bug in ENGINE_BUGS
        if bug.first <= _parse_version(version) <= bug.last and bug.applies(plan)
    ]


def _parse_version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
