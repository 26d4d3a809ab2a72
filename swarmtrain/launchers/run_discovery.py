"""Find runs among all launchers, by name or id: those that exist, and those that are only recorded on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarmtrain.config.schema.runner_types import BUILT_IN_LAUNCHERS, list_runner_types
from swarmtrain.errors import AmbiguousRun, EngineError, HostError, RunNotFound, StateDirectoryError, SwarmtrainError
from swarmtrain.launchers.base import Launcher, RunOverview
from swarmtrain.launchers.common import engine_endpoint
from swarmtrain.launchers.common.history_store import RecordedRun, find_recorded_run
from swarmtrain.launchers.registry import create_launcher
from swarmtrain.protocol.run_identity import ID_LENGTH, RunIdentity

_RUN_ID_PATTERN = re.compile(rf"[0-9a-z]{{{ID_LENGTH}}}")


@dataclass(frozen=True)
class FoundRun:
    """A run that exists, or that is only recorded on this machine."""

    recorded_run: RecordedRun
    launcher: Launcher | None = None
    """Launcher of the run; None if the run does not exist, or its cluster cannot be reached."""
    error: SwarmtrainError | None = None
    """The reason why there is no launcher."""

    @property
    def name(self) -> str:
        return self.recorded_run.name


def find_run(name: str | None) -> tuple[Launcher, str]:
    """Return the launcher of the run `name`, which is a name or an id, and the run's name. Without it, the user's only run is returned.

    Raises RunNotFound if there is no such run; AmbiguousRun if there are several, whose names, ids and owners its message lists.
    """
    launchers, runs, unreachable = discover_runs()
    matching = [item for item in runs if item[1] == name] or _select_runs(runs, name)
    if not matching and (name is not None or not runs):
        matching = _find_terminating_runs(launchers, name)
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise _build_ambiguity_error(name, matching)
    errors = [error for error in unreachable if not _is_engine_absence(error)]
    if errors and not runs:
        raise min(errors, key=lambda error: isinstance(error, EngineError))
    swarm_hint = "; for the runs of a swarm, set DOCKER_HOST to a manager" if len(errors) < len(unreachable) else ""
    if name is None and runs:
        raise RunNotFound(f"no run of yours exists; runs of others: {_list_run_names(runs)}", hint="specify the run name")
    if name is None:
        raise RunNotFound("no run exists", hint=f"start one with: swarmtrain deploy CONFIG{swarm_hint}")
    hint = f"start one with: swarmtrain deploy CONFIG --name NAME{swarm_hint}"
    raise RunNotFound(f"unknown run; existing runs: {_list_run_names(runs) or 'none'}", place=f"run {name}", hint=hint)


def find_run_or_record(name: str | None) -> FoundRun:
    """Return the run `name`, which is a name or an id; if it does not exist, the newest one that is recorded on this machine.

    Without a name, the user's only run is returned. Raises the errors of `find_run` if no such run is recorded.
    """
    try:
        launcher, run = find_run(name)
    except (RunNotFound, EngineError, HostError, StateDirectoryError) as error:
        recorded_run = find_recorded_run(name) if name else None
        if recorded_run is None:
            raise
        return FoundRun(recorded_run, error=error)
    return FoundRun(find_recorded_run_of(launcher, run), launcher)


def find_recorded_run_of(launcher: Launcher, run: str) -> RecordedRun:
    """Return the records on this machine of the existing `run`. Raises RunNotFound if the run does not exist."""
    return RecordedRun(run, launcher.read_identity(run))


def _select_runs(runs: Sequence[tuple[Launcher, str]], name: str | None) -> list[tuple[Launcher, str]]:
    """Return the runs of the current user, or, with a `name`, those whose id it is."""
    if name is not None and not _RUN_ID_PATTERN.fullmatch(name):
        return []
    identities = [(item, identity) for item in runs if (identity := _read_identity_if_exists(*item))]
    return [item for item, identity in identities if (identity.is_own if name is None else identity.id == name)]


def _build_ambiguity_error(name: str | None, runs: Sequence[tuple[Launcher, str]]) -> AmbiguousRun:
    if name is None:
        return AmbiguousRun(f"several runs exist: {_list_run_names(runs)}", hint="specify the run name")
    listed = "; ".join(f"{_read_identity_if_exists(launcher, run)}, on {launcher.location}" for launcher, run in runs)
    return AmbiguousRun(f"several runs have this name: {listed}", place=f"run {name}", hint="specify the id instead of the name")


def _list_run_names(runs: Iterable[tuple[Launcher, str]]) -> str:
    """Return the names of the runs, each with its owner if it belongs to somebody else."""
    identities = [(run, _read_identity_if_exists(launcher, run)) for launcher, run in runs]
    return ", ".join(sorted(run if identity is None or identity.is_own else f"{run} ({identity.owner})" for run, identity in identities))


def _read_identity_if_exists(launcher: Launcher, run: str) -> RunIdentity | None:
    try:
        return launcher.read_identity(run)
    except RunNotFound:  # removed in the meantime
        return None


def discover_overviews(launchers: dict[str, Launcher]) -> tuple[list[tuple[Launcher, RunOverview]], list[SwarmtrainError]]:
    """Return an overview of each run, with its launcher; and the errors of launchers that could not be queried.

    The errors do not include those that only say that this machine has no Docker engine. `launchers`: those of earlier calls, by runner
    type, which keep their connections; new ones are added.
    """
    overviews: list[tuple[Launcher, RunOverview]] = []
    errors: list[SwarmtrainError] = []
    for runner_type in list_runner_types():
        try:
            launcher = launchers.get(runner_type) or create_launcher(runner_type)
            launchers[runner_type] = launcher
            overviews += [(launcher, overview) for overview in launcher.read_overviews()]
        except Exception as error:  # noqa: BLE001  # another package's launcher may raise anything
            errors.append(_convert_listing_error(runner_type, error))
            if isinstance(error, EngineError) and error.status is None:  # no answer: its SSH tunnel may be closed
                launchers.pop(runner_type, None)
    return overviews, [error for error in errors if not _is_engine_absence(error)]


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
