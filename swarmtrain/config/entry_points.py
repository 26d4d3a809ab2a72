"""Entry points: plugins (classes) that other installed packages provide for swarmtrain, by group and name.

A package lists them in its metadata, for example in pyproject.toml below [project.entry-points."swarmtrain.launchers"].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarmtrain.errors import SwarmtrainError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LAUNCHER_GROUP = "swarmtrain.launchers"
METRICS_SINK_GROUP = "swarmtrain.metrics_sinks"


def list_entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of `group` in the installed packages, by name, without importing these packages."""
    from importlib.metadata import entry_points  # imported here because its import is slow and most commands do not need it

    return {entry_point.name: entry_point for entry_point in sorted(entry_points(group=group), key=lambda entry_point: entry_point.name)}


def load_entry_point(entry_point: EntryPoint) -> Any:
    """Import the object that `entry_point` refers to. Raises SwarmtrainError, which names the package, if it cannot be imported."""
    try:
        return entry_point.load()
    except Exception as error:  # another package's code may raise anything
        raise build_entry_point_error(entry_point, f"cannot be imported: {type(error).__name__}: {error}") from error


def build_entry_point_error(entry_point: EntryPoint, message: str) -> SwarmtrainError:
    """Return an error about the object that `entry_point` refers to, with its package and version."""
    package = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "unknown"
    hint = f"update or uninstall the package: pip show {entry_point.dist.name}" if entry_point.dist else None
    return SwarmtrainError(message, place=f"{entry_point.name} ({entry_point.value} of package {package})", hint=hint)
