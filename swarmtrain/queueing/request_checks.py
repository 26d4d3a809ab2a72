"""Checks of a plan before it is submitted to the queue: its priority class, whether it can ever start, and the state of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from swarmtrain import __version__
from swarmtrain.errors import ConfigError
from swarmtrain.launchers.base import Finding, Launcher
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state
from swarmtrain.launchers.swarm.queue.policy_store import read_policy
from swarmtrain.planning.inventory import Inventory
from swarmtrain.planning.node_selection import format_count
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol.run_identity import find_current_owner
from swarmtrain.queueing.decisions.queue_model import CORES, Allocation, Ledger, MachineSupply, OwnerLimit, count_gpus
from swarmtrain.queueing.queue_service import read_scheduler_status
from swarmtrain.queueing.queue_state import compute_needs, format_amounts
from swarmtrain.queueing.resource_allocation import build_capacity


def check_queue_request(launcher: Launcher, plan: Plan) -> list[Finding]:
    """Return why `plan` cannot be queued, or may wait although its machines are free; nothing if it is not queued. Raises EngineError."""
    if not isinstance(launcher, SwarmLauncher) or not launcher.queues_run(plan):
        return []
    return [*find_scheduler_problems(launcher.engine), *collect_findings(launcher.engine, plan)]


def collect_findings(engine: DockerEngine, plan: Plan) -> list[Finding]:
    """Return why `plan` cannot be queued: an unknown priority class, or a request that can never fit. Raises EngineError."""
    try:
        policy = read_policy(engine)
    except ConfigError as error:
        return [Finding("queue", f"its policy cannot be read: {error}", "store another one with: swarmtrain queue policy FILE")]
    findings = []
    priority = plan.config.runner.priority
    if priority and priority not in policy.classes:
        known = ", ".join(policy.classes)
        findings.append(Finding("config runner.priority", f"the queue has no class {priority!r}; its classes: {known}", None))
    inventory = cluster_state.read_inventory(engine)
    limits = policy.limits.get(find_current_owner()) or policy.limits.get("*")
    limit = OwnerLimit(limits.gpus, limits.nodes, limits.runs) if limits else OwnerLimit()
    if problem := describe_impossible_request(plan, inventory, limit):
        findings.append(Finding(*problem))
    return findings


def find_scheduler_problems(engine: DockerEngine) -> list[Finding]:
    """Return why a run that is queued now may wait although its machines are free. Raises EngineError; StackError without a scheduler."""
    status = read_scheduler_status(engine)
    findings = []
    if status.state != "running":
        reason = f": {status.reason}" if status.reason else ""
        message = f"its scheduler is {status.state}{reason}; runs wait until it runs again"
        findings.append(Finding("queue", message, "swarmtrain queue status", fatal=False))
    if status.version != __version__:
        message = f"its scheduler is swarmtrain {status.version}, and this is {__version__}"
        findings.append(Finding("queue", message, "update it with: swarmtrain queue up", fatal=False))
    return findings


def describe_impossible_request(plan: Plan, inventory: Inventory, limit: OwnerLimit) -> tuple[str, str, str] | None:
    """Return (place, reason, the largest request that would fit) if `plan` would not fit even on an empty cluster, else None."""
    needs = compute_needs(plan.config, inventory)
    machines = tuple(MachineSupply(machine.id, machine.host, build_capacity(machine)) for machine in inventory.machines)
    ledger = Ledger(machines)
    required = min(plan.min_nodes, max(1, plan.requested_node_count))
    fitting = [machine for machine, allocation in needs.items() if ledger.fits(machine, allocation)]
    if len(fitting) < required:
        allocation = next(iter(needs.values()), Allocation())
        have = f"{format_count(len(fitting), 'machine')} {'has' if len(fitting) == 1 else 'have'} that"
        message = f"{format_count(required, 'node')} with {format_amounts(allocation.total)} each never fit: {have}"
        return "config runner.min_nodes", message, _suggest_fitting_request(needs, machines, required, len(fitting))
    gpus = max((count_gpus(needs[machine]) for machine in fitting), default=0.0)
    for unit, per_node, maximum in (("node", 1.0, limit.nodes), ("GPU", gpus, limit.gpus)):
        if maximum is not None and required * per_node > maximum:
            needed = format_count(round(required * per_node), unit)
            message = f"{needed} never fit: the limit of {find_current_owner()} is {format_count(maximum, unit)}"
            most = format_count(int(maximum // per_node), "node")
            hint = f"the largest request that fits: {most}; swarmtrain queue policy prints the limits"
            return "config runner.min_nodes", message, hint
    return None


def _suggest_fitting_request(needs: Mapping[str, Allocation], machines: tuple[MachineSupply, ...], required: int, fitting: int) -> str:
    """Return a hint with the largest number of such nodes, and with the largest nodes in the required number, that would fit."""
    options = [f"runner.min_nodes: {fitting}"] if fitting else []
    kind = next((name for allocation in needs.values() for name in allocation.total if name != CORES), CORES)
    capacities = sorted((machine.get_capacity(kind) for machine in machines if machine.id in needs), reverse=True)
    if len(capacities) >= required and capacities[required - 1] >= 1:
        options.append(f"{format_count(required, 'node')} with {format_amounts({kind: capacities[required - 1]})} each")
    return f"the largest requests that fit: {' or '.join(options)}" if options else "swarmtrain join prints how machines join"
