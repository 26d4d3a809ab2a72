"""The registry of launchers, built-in and from other packages: create a launcher by its runner type."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.schema.runner_types import BUILT_IN_LAUNCHERS, load_installed_launcher
from swarmtrain.errors import StackError, SwarmtrainError
from swarmtrain.launchers.base import Launcher


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
