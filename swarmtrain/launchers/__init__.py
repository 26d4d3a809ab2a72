"""Launchers: one module for each kind of place that runs a job, selected by runner type and imported on first use.

The functions of this package serve every command and every launcher: create a launcher, find a run, make a plan.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swarmtrain.config import Config
from swarmtrain.config.external_inputs import resolve_external_inputs
from swarmtrain.config.schema.runner import SSH_RUNNER_TYPES, RunnerType
from swarmtrain.errors import EngineError, PlanError, RunNotFound, StackError, StateDirectoryError, SwarmtrainError
from swarmtrain.launchers.common.container_user import resolve_container_user
from swarmtrain.plan import Cargo, Inventory, Plan, add_notes, build_offline_inventory, make_plan, read_cargo

if TYPE_CHECKING:
    from swarmtrain.launchers.base import Launcher

_LITERAL_HOSTS_RUNNER_TYPES = (RunnerType.local, RunnerType.docker, RunnerType.slurm)
_REGISTRY = {
    RunnerType.swarm: "swarmtrain.launchers.swarm:SwarmLauncher",
    RunnerType.local: "swarmtrain.launchers.local:LocalLauncher",
    RunnerType.docker: "swarmtrain.launchers.docker:DockerLauncher",
    RunnerType.ssh: "swarmtrain.launchers.ssh:SshLauncher",
    RunnerType.ssh_docker: "swarmtrain.launchers.ssh:SshDockerLauncher",
    RunnerType.slurm: "swarmtrain.launchers.slurm:SlurmLauncher",
}


def create_launcher(kind: RunnerType) -> Launcher:
    """Return the launcher of runner type `kind`. Raises SwarmtrainError if this launcher cannot work on this machine."""
    return load_launcher_factory(kind)()


def load_launcher_factory(kind: RunnerType) -> Callable[[], Launcher]:
    """Import the launcher of runner type `kind`, and return its factory."""
    module, _, attribute = _REGISTRY[kind].partition(":")
    factory: Callable[[], Launcher] = getattr(importlib.import_module(module), attribute)
    return factory


def plan_run(config: Config, run: str, *, folder: Path) -> Plan:
    """Return the plan for `run` with `config`; files that `config` names are read from `folder`.

    Raises SwarmtrainError if a file cannot be read, or the machines cannot hold the run.
    """
    config = resolve_external_inputs(config, folder, os.environ)
    cargo = read_cargo(config, folder)
    config, user_note = resolve_container_user(config, lambda: _load_running_config(config, run))
    return add_notes(make_plan(config, read_inventory(config), cargo, run=run), user_note)


def _load_running_config(config: Config, run: str) -> Config | None:
    """Return the config that `run` was deployed with; None if the run does not exist, or its config cannot be read."""
    try:
        return load_deployment(create_launcher(config.runner.runner_type), run)[0]
    except (RunNotFound, StackError):
        return None


def read_inventory(config: Config) -> Inventory:
    """Return the inventory of machines that `config` may use.

    For local, docker and slurm, configured hosts are names only, with no machine behind them.
    """
    runner = config.runner
    if runner.hosts and runner.runner_type in _LITERAL_HOSTS_RUNNER_TYPES:
        return build_offline_inventory(runner.host_entries)
    if runner.runner_type in SSH_RUNNER_TYPES:
        from swarmtrain.launchers import ssh

        return ssh.read_host_inventory(runner)
    return create_launcher(runner.runner_type).read_inventory()


def plan_run_offline(config: Config, run: str, *, folder: Path) -> Plan:
    """Return the plan for `run`, without a cluster if the config lists `hosts`: these alone are then the machines."""
    config = resolve_external_inputs(config, folder, os.environ)
    cargo = read_cargo(config, folder)
    machines = build_offline_inventory(config.runner.host_entries) if config.runner.hosts else read_inventory(config)
    config, user_note = resolve_container_user(config, lambda: None)
    return add_notes(make_plan(config, machines, cargo, run=run), user_note)


def count_planned_ranks(config: Config) -> int:
    """Return the number of ranks that `config` would start: its world size if set, else from its hosts, else from the inventory.

    Raises SwarmtrainError if none of these is known.
    """
    config = resolve_external_inputs(config, Path.cwd(), os.environ)
    runner = config.runner
    if config.topology.world_size:
        return config.topology.world_size
    try:
        machines = build_offline_inventory(runner.host_entries) if runner.hosts else read_inventory(config)
        return make_plan(config, machines, Cargo(()), run="memory").world_size
    except EngineError as error:
        raise EngineError(error.message, place=error.place, hint="set the number of ranks with --ranks N") from None


def plan_scaled_run(launcher: Launcher, run: str, nodes: int) -> Plan:
    """Return the plan of an existing run with `nodes` nodes; a node range that excludes this number is widened to include it.

    Raises RunNotFound, PlanError.
    """
    config, cargo = load_deployment(launcher, run)
    low, _, high = config.runner.node_range
    runner = config.runner.model_copy(update={"nodes": None, "min_nodes": min(low, nodes), "max_nodes": max(high, nodes)})
    config = config.model_copy(update={"runner": runner})
    inventory_from_config = runner.runner_type in SSH_RUNNER_TYPES or (runner.hosts and runner.runner_type in _LITERAL_HOSTS_RUNNER_TYPES)
    machines = read_inventory(config) if inventory_from_config else launcher.read_inventory()
    return make_plan(config, machines, cargo, run=run, node_count=nodes)


def load_deployment(launcher: Launcher, run: str) -> tuple[Config, Cargo]:
    """Return the config and the cargo (script, files, secrets) with which `run` was deployed. Raises RunNotFound, StackError."""
    try:
        return launcher.load_deployment(run)
    except ValueError:  # raised by pydantic
        raise StackError(
            "its config was written by another version of swarmtrain and cannot be read by this one",
            place=f"run {run}",
            hint="use that version, or redeploy the run's config file with this one",
        ) from None


def find_run(name: str | None) -> tuple[Launcher, str]:
    """Return the launcher of run `name`, and the run's name. Without a name, the only existing run is returned.

    Raises RunNotFound, which lists the existing runs, if there is no such run, or several and no name.
    """
    launchers, runs, unreachable = discover_runs()
    matching = [item for item in runs if name in (None, item[1])] or _find_terminating_runs(launchers, name)
    if len(matching) == 1:
        return matching[0]
    if not matching and unreachable and not runs:
        raise min(unreachable, key=lambda error: isinstance(error, EngineError))  # many machines have no Docker engine
    known_runs = ", ".join(sorted(run for _, run in runs or matching))
    if name is not None and not matching:
        hint = "start one with: swarmtrain deploy CONFIG --name NAME"
        raise RunNotFound(f"unknown run; existing runs: {known_runs or 'none'}", place=f"run {name}", hint=hint)
    if not matching:
        raise RunNotFound("there is no run", hint="start one with: swarmtrain deploy CONFIG")
    raise RunNotFound(f"several runs exist: {known_runs}", hint="specify the run name")


def discover_runs() -> tuple[list[Launcher], list[tuple[Launcher, str]], list[SwarmtrainError]]:
    """Return the launchers that work on this machine, their runs, and the errors of the launchers that could not list their runs."""
    launchers: list[Launcher] = []
    runs: list[tuple[Launcher, str]] = []
    unreachable: list[SwarmtrainError] = []
    for kind in _REGISTRY:
        try:
            launchers.append(create_launcher(kind))
            runs += [(launchers[-1], run) for run in launchers[-1].list_runs()]
        except (EngineError, StateDirectoryError) as error:
            unreachable.append(error)
    return launchers, runs, unreachable


def _find_terminating_runs(launchers: list[Launcher], name: str | None) -> list[tuple[Launcher, str]]:
    terminating = []
    for launcher in launchers:
        with contextlib.suppress(EngineError):  # discover_runs has returned this error already
            terminating += [(launcher, run) for run in launcher.list_terminating_runs() if name in (None, run)]
    return terminating


def derive_run_name(config_file: Path) -> str:
    """Return a run name from the name of the config file, with only the characters that a host name allows.

    Raises PlanError if none is left.
    """
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in config_file.stem.lower()).strip("-")
    if not name:
        raise PlanError("cannot be turned into a run name", place=str(config_file), hint="set the run name with --name")
    return name
