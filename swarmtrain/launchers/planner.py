"""Make the plan of a run: resolve its config, read the inventory from the launcher, and compute the plan."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.external_inputs import resolve_external_inputs
from swarmtrain.config.learning_rate_schedule import describe_learning_rate_change
from swarmtrain.config.loader import STDIN_PATH
from swarmtrain.config.schema.runner_types import HostSource
from swarmtrain.errors import EngineError, PlanError, RunNotFound, StackError
from swarmtrain.launchers.base import Launcher
from swarmtrain.launchers.common import engine_endpoint
from swarmtrain.launchers.config_resolution import resolve_config
from swarmtrain.launchers.registry import create_launcher, load_deployment
from swarmtrain.planning.inventory import Inventory, build_offline_inventory, build_placeholder_inventory
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement
from swarmtrain.planning.plan import Plan, add_notes, build_plan


def plan_run(config: Config, run: str, *, working_folder: Path, min_nodes: int | None = None) -> Plan:
    """Return the plan for `run` with `config`; files that `config` names are read from `working_folder`.

    At least `min_nodes`, by default runner.min_nodes, must be available. Raises SwarmtrainError if a file cannot be read, or if the run
    does not fit on the machines.
    """
    launcher = create_launcher(config.runner.runner_type)
    load_running_config = cache(lambda: _load_running_config(launcher, run))
    resolved = resolve_config(config, working_folder, load_running_config)
    inventory, placement = read_inventory(resolved.config, launcher), _read_placement(launcher, resolved.config, run)
    plan = resolved.build_plan(inventory, run, placement, min_nodes=min_nodes)
    running_config = load_running_config() if plan.cargo.calls_built_in_trainer else None
    return add_notes(plan, _describe_changed_length(running_config, resolved.config) if running_config else "")


def _describe_changed_length(running: Config, config: Config) -> str:
    """Return a note if other trainer.train_iterations change the learning rate of the step at which the shorter training ends."""
    lengths = running.trainer.train_iterations, config.trainer.train_iterations
    return describe_learning_rate_change(running, config, min(lengths)) if lengths[0] != lengths[1] else ""


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
    placement = _find_placement(resolved.config, run, is_offline=use_placeholders)
    if runner.hosts and placement is not None and runner.capabilities.hosts is HostSource.cluster:
        inventory = _add_known_gpus(inventory, read_inventory(resolved.config))
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


def _add_known_gpus(inventory: Inventory, known: Inventory) -> Inventory:
    """Return `inventory` with the GPUs that its machines have in `known`, so that a generated file has the slots of a deployed run."""
    known_machines = {name: machine for machine in known.machines for name in (machine.host, machine.id)}
    pairs = [(machine, known_machines.get(machine.host, machine)) for machine in inventory.machines]
    machines = tuple(replace(machine, resources=other.resources, gpu_count=other.gpu_count) for machine, other in pairs)
    return replace(inventory, machines=machines)


def _read_placement(launcher: Launcher, config: Config, run: str) -> Placement:
    """Return the placement of the existing `run`; a fresh one if it does not exist. Raises EngineError if the cluster cannot be queried."""
    if config.runner.capabilities.hosts is HostSource.as_written:
        return FRESH_PLACEMENT
    try:
        return launcher.read_placement(run)
    except RunNotFound:
        return FRESH_PLACEMENT


def _find_placement(config: Config, run: str, *, is_offline: bool) -> Placement | None:
    """Return the placement of `run`, fresh if it does not exist; None if the cluster cannot, or if `is_offline` must not, be queried."""
    capabilities = config.runner.capabilities
    if capabilities.hosts is HostSource.as_written:
        return FRESH_PLACEMENT
    try:
        if is_offline or (capabilities.has_managers and engine_endpoint.is_engine_absent(os.environ)):  # known without loading docker
            return None
        return _read_placement(create_launcher(config.runner.runner_type), config, run)
    except EngineError:
        return None


def _load_running_config(launcher: Launcher, run: str) -> Config | None:
    """Return the config that `run` was deployed with; None if the run does not exist, or its config cannot be read."""
    try:
        return load_deployment(launcher, run)[0]
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
