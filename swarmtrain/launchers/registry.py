"""The registry of launchers, built-in and from other packages: create a launcher by its runner type, and find runs among all of them."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.schema.runner_types import BUILT_IN_LAUNCHERS, list_runner_types, load_installed_launcher
from swarmtrain.errors import EngineError, RunNotFound, StackError, StateDirectoryError, SwarmtrainError
from swarmtrain.launchers.base import Launcher
from swarmtrain.launchers.common import engine_endpoint


def create_launcher(runner_type: str) -> Launcher:
    """Return the launcher of `runner_type`. Raises SwarmtrainError if it cannot be used on this machine, or its package is broken."""
    launcher_class: Callable[[], Launcher] = load_launcher_class(runner_type)
    return launcher_class()


def load_launcher_class(runner_type: str) -> type[Launcher]:
    """Import and return the launcher class of `runner_type`. Raises SwarmtrainError if it is in a package that is missing or broken."""
    built_in = BUILT_IN_LAUNCHERS.get(runner_type)
    if built_in is None:
        return _load_installed_launcher_class(runner_type)
    module, _, class_name = built_in.location.partition(":")
    launcher_class: type[Launcher] = getattr(importlib.import_module(module), class_name)
    return launcher_class


def _load_installed_launcher_class(runner_type: str) -> type[Launcher]:
    launcher_class: type[Launcher] = load_installed_launcher(runner_type)
    required = [name for name, _ in inspect.getmembers(Launcher) if not name.startswith("_")]
    if missing := [name for name in required if not hasattr(launcher_class, name)]:
        raise SwarmtrainError(
            f"does not implement {', '.join(missing)} of swarmtrain.launchers.base.Launcher", place=f"launcher {runner_type}"
        )
    return launcher_class


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

    Raises RunNotFound, whose message lists the existing runs, if there is no such run, or if there are several runs and no name is given.
    """
    launchers, runs, unreachable = discover_runs()
    matching = [item for item in runs if name in (None, item[1])] or _find_terminating_runs(launchers, name)
    if len(matching) == 1:
        return matching[0]
    errors = [error for error in unreachable if not _is_engine_absence(error)]
    if not matching and errors and not runs:
        raise min(errors, key=lambda error: isinstance(error, EngineError))
    known_runs = ", ".join(sorted(run for _, run in runs or matching))
    swarm_hint = "; for the runs of a swarm, set DOCKER_HOST to a manager" if len(errors) < len(unreachable) else ""
    if name is not None and not matching:
        hint = f"start one with: swarmtrain deploy CONFIG --name NAME{swarm_hint}"
        raise RunNotFound(f"unknown run; existing runs: {known_runs or 'none'}", place=f"run {name}", hint=hint)
    if not matching:
        raise RunNotFound("no run exists", hint=f"start one with: swarmtrain deploy CONFIG{swarm_hint}")
    raise RunNotFound(f"several runs exist: {known_runs}", hint="specify the run name")


def discover_runs() -> tuple[dict[str, Launcher], list[tuple[Launcher, str]], list[SwarmtrainError]]:
    """Return the launchers that work on this machine, by runner type; their runs; and the errors of launchers that could not list runs."""
    launchers: dict[str, Launcher] = {}
    runs: list[tuple[Launcher, str]] = []
    unreachable: list[SwarmtrainError] = []
    for runner_type in list_runner_types():
        try:
            launchers[runner_type] = create_launcher(runner_type)
            runs += [(launchers[runner_type], run) for run in launchers[runner_type].list_runs()]
        except Exception as error:  # noqa: BLE001  # another package's launcher may raise anything
            unreachable.append(_convert_listing_error(runner_type, error))
    return launchers, runs, unreachable


def _is_engine_absence(error: SwarmtrainError) -> bool:
    """Return whether the error only says that this machine has no Docker engine, and so no runs of one."""
    return isinstance(error, EngineError) and engine_endpoint.is_engine_absent(os.environ)


def _convert_listing_error(runner_type: str, error: Exception) -> SwarmtrainError:
    """Return `error`, which a launcher raised while it listed its runs, as a SwarmtrainError.

    Re-raises `error` if it is a bug of a built-in launcher.
    """
    if runner_type in BUILT_IN_LAUNCHERS:
        if isinstance(error, EngineError | StateDirectoryError):
            return error
        raise error
    if isinstance(error, SwarmtrainError):
        return error
    return SwarmtrainError(f"cannot list its runs: {type(error).__name__}: {error}", place=f"launcher {runner_type}")


def _find_terminating_runs(launchers: dict[str, Launcher], name: str | None) -> list[tuple[Launcher, str]]:
    terminating = []
    for runner_type, launcher in launchers.items():
        try:
            terminating += [(launcher, run) for run in launcher.list_terminating_runs() if name in (None, run)]
        except Exception as error:  # noqa: BLE001  # another package's launcher may raise anything
            _convert_listing_error(runner_type, error)  # discover_runs has returned this error already
    return terminating
