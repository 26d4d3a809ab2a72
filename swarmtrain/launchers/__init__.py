"""Launchers: one module for each place that a run can live in, found by name and imported on use.

The functions here are what every command does with whichever launcher it is: find it, find a run, make a plan.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swarmtrain.config import Config
from swarmtrain.config.hosts import settled
from swarmtrain.config.runner import OVER_SSH, RunnerType
from swarmtrain.errors import EngineError, PlanError, RunNotFound, StackError, StateError, SwarmtrainError
from swarmtrain.launchers.owner import settle
from swarmtrain.plan import Cargo, Inventory, Plan, make_plan, noted, offline, read_cargo

if TYPE_CHECKING:
    from swarmtrain.launchers.base import Launcher

_HOSTS_ARE_TAKEN_AS_THEY_ARE = (RunnerType.local, RunnerType.docker, RunnerType.slurm)
_REGISTRY = {
    RunnerType.swarm: "swarmtrain.launchers.swarm:SwarmLauncher",
    RunnerType.local: "swarmtrain.launchers.local:LocalLauncher",
    RunnerType.docker: "swarmtrain.launchers.docker:DockerLauncher",
    RunnerType.pdsh: "swarmtrain.launchers.ssh:SshLauncher",
    RunnerType.pdsh_docker: "swarmtrain.launchers.ssh:SshDockerLauncher",
    RunnerType.slurm: "swarmtrain.launchers.slurm:SlurmLauncher",
}


def launcher(kind: RunnerType) -> Launcher:
    """Return the launcher of this kind. Raises SwarmtrainError where it cannot work at all."""
    return load(kind)()


def load(kind: RunnerType) -> Callable[[], Launcher]:
    """Import and return what makes the launcher of this kind."""
    module, _, name = _REGISTRY[kind].partition(":")
    maker: Callable[[], Launcher] = getattr(importlib.import_module(module), name)
    return maker


def plan_for(config: Config, run: str, *, folder: Path) -> Plan:
    """Return the plan of `run`, with the files that `config` names read from `folder`. Raises SwarmtrainError."""
    config = settled(config, folder, os.environ)
    cargo = read_cargo(config, folder)
    config, why = settle(config, lambda: _running(config, run))
    return noted(make_plan(config, inventory(config), cargo, run=run), why)


def _running(config: Config, run: str) -> Config | None:
    """Return the config that `run` is up with, None if it is not up, or has none that can be read."""
    try:
        return deployed(launcher(config.runner.runner_type), run)[0]
    except (RunNotFound, StackError):
        return None


def inventory(config: Config) -> Inventory:
    """Return the machines that `config` may use; hosts of a run on this machine alone are names without a machine."""
    runner = config.runner
    if runner.hosts and runner.runner_type in _HOSTS_ARE_TAKEN_AS_THEY_ARE:
        return offline(runner.hosts)
    if runner.runner_type in OVER_SSH:
        from swarmtrain.launchers import ssh

        return ssh.inventory(runner)
    return launcher(runner.runner_type).inventory()


def offline_plan(config: Config, run: str, *, folder: Path) -> Plan:
    """Return the plan from `hosts` alone where the config lists them, so that no cluster need be in reach."""
    config = settled(config, folder, os.environ)
    cargo = read_cargo(config, folder)
    machines = offline(config.runner.hosts) if config.runner.hosts else inventory(config)
    config, why = settle(config, lambda: None)
    return noted(make_plan(config, machines, cargo, run=run), why)


def planned_ranks(config: Config) -> int:
    """Return the ranks that `config` would be started with: as it says, else by its hosts, else by the machines there are.

    Raises SwarmtrainError if there is nothing to tell that from.
    """
    config = settled(config, Path.cwd(), os.environ)
    runner = config.runner
    if config.topology.world_size:
        return config.topology.world_size
    try:
        machines = offline(runner.hosts) if runner.hosts else inventory(config)
        return make_plan(config, machines, Cargo(()), run="memory").world_size
    except EngineError as error:
        raise EngineError(error.message, place=error.place, hint="--ranks N says how many there will be") from None


def scaled_plan(found: Launcher, run: str, nodes: int) -> Plan:
    """Return the plan of a run that exists, with `nodes` nodes; beyond its min..max the range is widened to hold them.

    Raises RunNotFound, PlanError.
    """
    config, cargo = deployed(found, run)
    low, _, high = config.runner.node_range
    runner = config.runner.model_copy(update={"nodes": None, "min_nodes": min(low, nodes), "max_nodes": max(high, nodes)})
    config = config.model_copy(update={"runner": runner})
    asked = runner.runner_type in OVER_SSH or (runner.hosts and runner.runner_type in _HOSTS_ARE_TAKEN_AS_THEY_ARE)
    machines = inventory(config) if asked else found.inventory()
    return make_plan(config, machines, cargo, run=run, nodes=nodes)


def deployed(found: Launcher, run: str) -> tuple[Config, Cargo]:
    """Return the config and the cargo that `run` was brought up with. Raises RunNotFound, StackError."""
    try:
        return found.deployed(run)
    except ValueError:  # pydantic's
        raise StackError(
            "its config is one of another version of swarmtrain, which this one does not read",
            place=f"run {run}",
            hint="go on with that version, or deploy the run's config file again with this one",
        ) from None


def find_run(name: str | None) -> tuple[Launcher, str]:
    """Return the launcher of run `name` and its name; without a name, the only run there is.

    Raises RunNotFound, which lists the runs there are.
    """
    places, runs, unreachable = everywhere()
    matching = [item for item in runs if name in (None, item[1])] or _leaving(places, name)
    if len(matching) == 1:
        return matching[0]
    if not matching and unreachable and not runs:
        raise min(unreachable, key=lambda error: isinstance(error, EngineError))  # many a machine has no engine
    known = ", ".join(sorted(run for _, run in runs or matching))
    if name is not None and not matching:
        hint = "swarmtrain deploy CONFIG --name NAME starts one"
        raise RunNotFound(f"there is no run of this name; there is: {known or 'none'}", place=f"run {name}", hint=hint)
    if not matching:
        raise RunNotFound("there is no run", hint="swarmtrain deploy CONFIG starts one")
    raise RunNotFound(f"there are several runs: {known}", hint="name the one you mean")


def everywhere() -> tuple[list[Launcher], list[tuple[Launcher, str]], list[SwarmtrainError]]:
    """Return the places that runs can be in, the runs that are there, and why other places could not be asked."""
    places: list[Launcher] = []
    runs: list[tuple[Launcher, str]] = []
    unreachable: list[SwarmtrainError] = []
    for kind in _REGISTRY:
        try:
            places.append(launcher(kind))
            runs += [(places[-1], run) for run in places[-1].runs()]
        except (EngineError, StateError) as error:
            unreachable.append(error)
    return places, runs, unreachable


def _leaving(places: list[Launcher], name: str | None) -> list[tuple[Launcher, str]]:
    found = []
    for place in places:
        with contextlib.suppress(EngineError):  # it was told already
            found += [(place, run) for run in place.leaving() if name in (None, run)]
    return found


def run_name(config_file: Path) -> str:
    """Return the name of a run that was given none: that of its config file, as far as it can stand in a host name."""
    name = "".join(char if char.isascii() and char.isalnum() else "-" for char in config_file.stem.lower()).strip("-")
    if not name:
        raise PlanError("makes no name for a run", place=str(config_file), hint="give it one with --name")
    return name
