"""Plan the changes that `swarmtrain scale` requests: another number of nodes, and hosts that are added, removed and replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarmtrain.config import Config
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner_types import HostSource
from swarmtrain.errors import PlanError
from swarmtrain.launchers.base import Launcher
from swarmtrain.launchers.planner import read_inventory
from swarmtrain.launchers.registry import load_deployment
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.placement import Placement
from swarmtrain.planning.plan import Plan, build_plan


@dataclass(frozen=True)
class ScaleRequest:
    """The changes that `swarmtrain scale` requests. Hosts are names or node ids; added ones may be entries of `runner.hosts`."""

    node_count: int | None = None
    """New number of nodes. None: it changes with the added and removed hosts."""
    added_hosts: tuple[str, ...] = ()
    removed_hosts: tuple[str, ...] = ()
    replaced_hosts: tuple[str, ...] = ()
    """Hosts whose nodes move to other hosts."""

    @property
    def changes_hosts(self) -> bool:
        """Whether the request names hosts."""
        return bool(self.added_hosts or self.removed_hosts or self.replaced_hosts)


@dataclass(frozen=True)
class _HostChange:
    """The hosts of a request, each by one key for all its names."""

    added: dict[str, HostEntry]
    removed: frozenset[str]
    replaced: frozenset[str]
    node_count: int


class _HostKeys:
    """One key for all names of a host: the id of its machine in a swarm; where hosts have only one name, this name."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        host_counts = Counter(machine.host for machine in machines)
        self._keys = {machine.host: machine.id or machine.host for machine in machines if host_counts[machine.host] == 1}
        self._keys |= {machine.id: machine.id for machine in machines if machine.id}

    def find_key(self, name: str) -> str:
        """Return the key of the host `name`, which is the name itself for a host that is not in the cluster."""
        return self._keys.get(name, name)


def plan_scaled_run(launcher: Launcher, run: str, request: ScaleRequest) -> Plan:
    """Return the plan of an existing run, changed by `request`; the other nodes keep their hosts.

    A node range that excludes the new number of nodes is widened to include it. Raises RunNotFound, PlanError.
    """
    config, cargo = load_deployment(launcher, run)
    placement = launcher.read_placement(run)
    if not request.changes_hosts:
        config = _widen_node_range(config, request.node_count or 1)
        inventory = read_inventory(config, launcher)
        plan = build_plan(config, inventory, cargo, run=run, node_count=request.node_count, placement=placement)
        _check_machine_count(plan, inventory)
        return plan
    source = config.runner.capabilities.hosts
    if source is HostSource.as_written:
        raise PlanError(f"the launcher {config.runner.runner_type} has no hosts to choose from", place="scale", hint="use --nodes N")
    inventory = read_inventory(config, launcher) if source is HostSource.cluster else Inventory("", ())
    keys = _HostKeys(inventory.machines)
    change = _resolve_request(request, placement, keys, run)
    config = _change_listed_hosts(_widen_node_range(config, change.node_count), change, keys)
    if source is not HostSource.cluster:  # the machines are those in the config
        inventory = read_inventory(config, launcher)
    machines = _order_machines(inventory, change, keys)
    plan = build_plan(config, Inventory(inventory.origin, machines), cargo, run=run, node_count=change.node_count, placement=placement)
    _check_added_hosts(plan, inventory, change, keys)
    _check_machine_count(plan, inventory)
    return plan


def _widen_node_range(config: Config, node_count: int) -> Config:
    low, _, high = config.runner.node_range
    changes = {"nodes": None, "min_nodes": min(low, node_count), "max_nodes": max(high, node_count)}
    return config.model_copy(update={"runner": config.runner.model_copy(update=changes)})


def _resolve_request(request: ScaleRequest, placement: Placement, keys: _HostKeys, run: str) -> _HostChange:
    """Return the change that `request` describes. Raises PlanError if it does not fit the placement of the run."""
    used = {keys.find_key(name) for name in placement.machines.values()}
    hint = f"swarmtrain status {run} shows its hosts"
    for option, names in (("--without", request.removed_hosts), ("--replace", request.replaced_hosts)):
        if unused := next((name for name in names if keys.find_key(name) not in used), None):
            raise PlanError(f"no node of {run} runs on {unused}", place=f"scale {option}", hint=hint)
    added: dict[str, HostEntry] = {}
    for text in request.added_hosts:
        try:
            entry = HostEntry.parse(text)
        except ValueError as error:
            raise PlanError(str(error), place="scale --add") from None
        if keys.find_key(entry.name) in used:
            raise PlanError(f"a node of {run} already runs on {entry.name}", place="scale --add", hint=hint)
        added[keys.find_key(entry.name)] = entry
    removed = frozenset(map(keys.find_key, request.removed_hosts))
    replaced = frozenset(map(keys.find_key, request.replaced_hosts)) - removed
    node_count = request.node_count if request.node_count is not None else len(placement.machines) + len(added) - len(removed)
    if node_count < 1:
        raise PlanError("no node would be left", place="scale --without", hint=f"swarmtrain stop {run}")
    new_nodes = node_count - len(used - removed - replaced)
    if len(added) > new_nodes:
        raise PlanError(
            f"{node_count} nodes have no place for {', '.join(entry.name for entry in added.values())}: the other hosts keep their nodes",
            place="scale --nodes",
            hint="omit --nodes, or remove a host with --without",
        )
    return _HostChange(added, removed, replaced, node_count)


def _change_listed_hosts(config: Config, change: _HostChange, keys: _HostKeys) -> Config:
    """Return `config` with the change made in its list of hosts, if it has one. Raises PlanError."""
    runner, excluded = config.runner, change.removed | change.replaced | change.added.keys()
    if not runner.hosts:
        if entry := next((entry for entry in change.added.values() if entry.text != entry.name), None):
            hint = "the config of the run lists no hosts: its slots are those of runner.default_gpu_count or of the cluster"
            raise PlanError(f"{entry.text!r}: only the name of a host can be given", place="scale --add", hint=hint)
        return config
    kept_hosts = [entry.text for entry in runner.host_entries if keys.find_key(entry.name) not in excluded]
    added_hosts = [entry.text for entry in change.added.values()]  # before entries without a node
    return config.model_copy(update={"runner": runner.model_copy(update={"hosts": (*added_hosts, *kept_hosts)})})


def _order_machines(inventory: Inventory, change: _HostChange, keys: _HostKeys) -> tuple[Machine, ...]:
    """Return the machines of `inventory` without those that the change excludes, and with the added ones first."""
    machines = [(keys.find_key(machine.id or machine.host), machine) for machine in inventory.machines]
    kept = [item for item in machines if item[0] not in change.removed | change.replaced]
    return tuple(machine for _, machine in sorted(kept, key=lambda item: item[0] not in change.added))


def _check_machine_count(plan: Plan, inventory: Inventory) -> None:
    """Check that there is a machine for each requested node, even if it is missing now. Raises PlanError."""
    if shortage := plan.requested_node_count - len({*plan.nodes, *plan.missing_nodes}):
        machine_count = plan.requested_node_count - shortage
        raise PlanError(
            f"{plan.requested_node_count} nodes requested, but {machine_count} can be used on {inventory.origin}",
            place="scale",
            hint="request fewer nodes with --nodes, or add machines: swarmtrain join prints the commands",
        )


def _check_added_hosts(plan: Plan, inventory: Inventory, change: _HostChange, keys: _HostKeys) -> None:
    """Check that a node runs on each added host. Raises PlanError with the reason why not."""
    planned = {keys.find_key(node.constraint.partition("==")[2]) for node in plan.nodes}
    for key, entry in change.added.items():
        if key not in planned:
            machine = next((machine for machine in inventory.machines if key in (machine.id, machine.host)), None)
            if machine is None:
                available = ", ".join(machine.host for machine in inventory.machines)
                raise PlanError(f"{entry.name} is not in {inventory.origin}", place="scale --add", hint=f"its hosts: {available}")
            reason = machine.unavailable_reason or "lacks the labels in runner.swarm.labels"
            raise PlanError(f"{entry.name} cannot run a node: {reason}", place="scale --add", hint="docker node ls shows its state")
