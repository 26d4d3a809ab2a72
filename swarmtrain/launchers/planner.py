"""Make the plan of a run: resolve the config values that depend on this machine, read the inventory, and compute the plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.cargo import Cargo, read_cargo
from swarmtrain.config import Config
from swarmtrain.config.external_inputs import resolve_external_inputs
from swarmtrain.config.loader import STDIN_PATH
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import HostSource
from swarmtrain.errors import EngineError, PlanError, RunNotFound, StackError
from swarmtrain.launchers.base import Launcher
from swarmtrain.launchers.common import engine_endpoint
from swarmtrain.launchers.common.container_user import resolve_container_user
from swarmtrain.launchers.registry import create_launcher, load_deployment
from swarmtrain.placement import FRESH_PLACEMENT, Placement
from swarmtrain.plan import Inventory, Plan, add_notes, build_offline_inventory, build_placeholder_inventory, build_plan


@dataclass(frozen=True)
class ResolvedConfig:
    """A config without references to this machine's files or environment variables, its shipped files (`cargo`), and notes for the user."""

    config: Config
    cargo: Cargo
    notes: tuple[str, ...]

    def build_plan(self, inventory: Inventory, run: str, placement: Placement = FRESH_PLACEMENT) -> Plan:
        """Return the plan for `run` on the machines of `inventory`. Raises PlanError if the machines do not suffice."""
        return add_notes(build_plan(self.config, inventory, self.cargo, run=run, placement=placement), *self.notes)


def resolve_config(config: Config, working_folder: Path, load_running_config: Callable[[], Config | None]) -> ResolvedConfig:
    """Return `config` with the values that depend on this machine resolved: files, environment variables, the owner of save_dir.

    Paths are relative to `working_folder`. Raises SwarmtrainError if a file cannot be read. `load_running_config` returns the deployed
    config of the run, or None.
    """
    config = resolve_external_inputs(config, working_folder, os.environ)  # the hostsfile, the env file, and environment variables
    cargo = read_cargo(config, working_folder)  # the script, its files and secrets
    config, user_note = resolve_container_user(config, load_running_config)  # the owner of save_dir
    return ResolvedConfig(config, cargo, (user_note, _describe_code(config, cargo)))


def _describe_code(config: Config, cargo: Cargo) -> str:
    """Return a note on the code files if runner.code names folders or patterns; else an empty string."""
    if len(cargo.code) <= len(config.runner.code) + 1:
        return ""
    return f"code: {len(cargo.code)} files, {sum(len(file.content) for file in cargo.code) / 1e3:,.0f} kB"


def plan_run(config: Config, run: str, *, working_folder: Path) -> Plan:
    """Return the plan for `run` with `config`; files that `config` names are read from `working_folder`.

    Raises SwarmtrainError if a file cannot be read, or if the run does not fit on the machines.
    """
    resolved = resolve_config(config, working_folder, lambda: _load_running_config(config, run))
    return resolved.build_plan(read_inventory(resolved.config), run, _read_placement(resolved.config, run))


def plan_run_offline(config: Config, run: str, *, working_folder: Path, use_placeholders: bool = False) -> Plan:
    """Return the plan for `run` on the config's `hosts`, which are not queried. If the cluster is reachable, nodes keep their hosts.

    Without `hosts`, the cluster is queried, unless `use_placeholders`: then the plan has placeholders instead of host names. Raises
    EngineError if the cluster cannot be queried.
    """
    resolved = resolve_config(config, working_folder, lambda: None)
    runner = resolved.config.runner
    if use_placeholders and not runner.hosts:
        plan = resolved.build_plan(build_placeholder_inventory(runner), run)
        if runner.capabilities.hosts is not HostSource.cluster:
            return plan
        placeholders = ", ".join(node.host for node in plan.nodes)
        return add_notes(plan, f"replace {placeholders} in the file by host names of the swarm (docker node ls)")
    try:
        inventory = _read_offline_inventory(resolved.config)
    except EngineError as error:
        hint = "list the host names in runner.hosts, or use placeholders: swarmtrain generate --offline"
        raise EngineError(error.message, place=error.place, hint=hint) from None
    placement = None if use_placeholders else _find_placement(resolved.config, run)
    note = f"placement: fresh, since {run} cannot be looked up; if it is deployed, its nodes may change their hosts"
    return add_notes(resolved.build_plan(inventory, run, placement or FRESH_PLACEMENT), "" if placement else note)


def count_planned_ranks(config: Config) -> int:
    """Return the number of ranks that `config` would start: its world size if set, else from its hosts, else from the inventory.

    Raises SwarmtrainError if none of these is known.
    """
    config = resolve_external_inputs(config, Path.cwd(), os.environ)
    if config.topology.world_size:
        return config.topology.world_size
    try:
        return build_plan(config, _read_offline_inventory(config), Cargo(()), run="memory").world_size
    except EngineError as error:
        raise EngineError(error.message, place=error.place, hint="set the number of ranks with --ranks N") from None


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
    def excluded_hosts(self) -> tuple[str, ...]:
        """Hosts on which no node runs any more."""
        return (*self.removed_hosts, *self.replaced_hosts)

    def compute_node_count(self, placement: Placement) -> int:
        """Return the new number of nodes of a run with `placement`."""
        return self.node_count or len(placement.machines) + len(self.added_hosts) - len(self.removed_hosts)


def plan_scaled_run(launcher: Launcher, run: str, request: ScaleRequest) -> Plan:
    """Return the plan of an existing run, changed by `request`.

    A node range that excludes the new number of nodes is widened to include it. Raises RunNotFound, PlanError.
    """
    config, cargo = load_deployment(launcher, run)
    placement = launcher.read_placement(run)
    node_count = request.compute_node_count(placement)
    low, _, high = config.runner.node_range
    runner = config.runner.model_copy(update={"nodes": None, "min_nodes": min(low, node_count), "max_nodes": max(high, node_count)})
    if request.added_hosts or request.excluded_hosts:
        if runner.capabilities.hosts is HostSource.as_written:
            raise PlanError(f"the launcher {runner.runner_type} has no hosts to choose from", place="scale", hint="use --nodes N")
        _check_scale_request(request, set(placement.machines.values()) | _find_aliases(placement.machines.values(), launcher, runner), run)
    excluded = {*request.excluded_hosts, *_find_aliases(request.excluded_hosts, launcher, runner)}
    if runner.hosts:
        kept_hosts = tuple(entry.text for entry in runner.host_entries if entry.name not in excluded)
        runner = runner.model_copy(update={"hosts": (*request.added_hosts, *kept_hosts)})  # before entries without a node
    config = config.model_copy(update={"runner": runner})
    inventory = _select_machines(read_inventory(config, launcher), excluded, request.added_hosts)
    return build_plan(config, inventory, cargo, run=run, node_count=node_count, placement=placement)


def _find_aliases(hosts: Collection[str], launcher: Launcher, runner: RunnerConfig) -> set[str]:
    """Return the ids and the host names of those machines in a swarm that `hosts` names. Empty for launchers whose hosts have one name."""
    if not hosts or not runner.capabilities.has_managers:
        return set()
    machines = launcher.read_inventory(runner).machines
    return {name for machine in machines if {machine.id, machine.host} & set(hosts) for name in (machine.id, machine.host)}


def _check_scale_request(request: ScaleRequest, used_hosts: set[str], run: str) -> None:
    """Check that nodes run on the hosts that `request` excludes, and not on those that it adds. Raises PlanError."""
    hint = f"swarmtrain status {run} shows its hosts"
    for option, hosts in (("--without", request.removed_hosts), ("--replace", request.replaced_hosts)):
        if unused := next((host for host in hosts if host not in used_hosts), None):
            raise PlanError(f"no node of {run} runs on {unused}", place=f"scale {option}", hint=hint)
    for host in request.added_hosts:
        try:
            name = HostEntry.parse(host).name
        except ValueError as error:
            raise PlanError(str(error), place="scale --add") from None
        if name in used_hosts:
            raise PlanError(f"a node of {run} already runs on {name}", place="scale --add", hint=hint)


def _select_machines(inventory: Inventory, excluded_hosts: set[str], added_hosts: Sequence[str]) -> Inventory:
    """Return `inventory` without the excluded hosts, and with the added ones first. Raises PlanError if an added one is not in it."""
    machines = [machine for machine in inventory.machines if not {machine.id, machine.host} & excluded_hosts]
    names = {HostEntry.parse(host).name for host in added_hosts}
    if missing := names - {name for machine in machines for name in (machine.id, machine.host)}:
        available = ", ".join(machine.host for machine in machines)
        raise PlanError(f"{', '.join(sorted(missing))} is not in {inventory.origin}", place="scale --add", hint=f"its hosts: {available}")
    machines.sort(key=lambda machine: not {machine.id, machine.host} & names)
    return Inventory(inventory.origin, tuple(machines))


def read_inventory(config: Config, launcher: Launcher | None = None) -> Inventory:
    """Return the inventory of machines that `config` may use, from `launcher` or a new launcher of its type.

    If the launcher uses `runner.hosts` as written, the inventory has only these host names, and no machine is queried.
    """
    runner = config.runner
    if runner.hosts and runner.capabilities.hosts is HostSource.as_written:
        return build_offline_inventory(runner.host_entries)
    return (launcher or create_launcher(runner.runner_type)).read_inventory(runner)


def _read_offline_inventory(config: Config) -> Inventory:
    return build_offline_inventory(config.runner.host_entries) if config.runner.hosts else read_inventory(config)


def _read_placement(config: Config, run: str) -> Placement:
    """Return the placement of the existing `run`; a fresh one if it does not exist. Raises EngineError if the cluster cannot be queried."""
    if config.runner.capabilities.hosts is HostSource.as_written:
        return FRESH_PLACEMENT
    try:
        return create_launcher(config.runner.runner_type).read_placement(run)
    except RunNotFound:
        return FRESH_PLACEMENT


def _find_placement(config: Config, run: str) -> Placement | None:
    """Return the placement of `run`, fresh if it does not exist; None if the cluster cannot be queried."""
    try:
        if config.runner.capabilities.has_managers and engine_endpoint.is_engine_absent(os.environ):  # known without loading docker
            return None
        return _read_placement(config, run)
    except EngineError:
        return None


def _load_running_config(config: Config, run: str) -> Config | None:
    """Return the config that `run` was deployed with; None if the run does not exist, or its config cannot be read."""
    try:
        return load_deployment(create_launcher(config.runner.runner_type), run)[0]
    except (RunNotFound, StackError):
        return None


def derive_run_name(config_file: Path) -> str:
    """Return a run name from the name of the config file, with only the characters that a host name allows.

    For a config from standard input, it is `stdin`. Raises PlanError if no characters are left.
    """
    if config_file == STDIN_PATH:
        return "stdin"
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in config_file.stem.lower()).strip("-")
    if not name:
        raise PlanError(
            "does not contain a character that is valid in a run name", place=str(config_file), hint="set the run name with --name"
        )
    return name
