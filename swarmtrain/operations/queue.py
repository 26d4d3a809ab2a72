"""The operations on the queue of a swarm: start and remove its scheduler, print it, change its policy and its order, cancel a run."""

from __future__ import annotations

import time
from pathlib import Path

from swarmtrain import __version__
from swarmtrain.config.loader import read_config_text
from swarmtrain.errors import ImageError, StackError
from swarmtrain.images import distribute_image, push_image, swarm_registry
from swarmtrain.images.queue_image import build_queue_image
from swarmtrain.images.swarm_nodes import list_other_engines
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.registry import create_launcher
from swarmtrain.operations.confirmation import confirm_change, require_confirmation
from swarmtrain.operations.runs import remove_run
from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing import queue_changes, queue_service
from swarmtrain.queueing.queue_service import SchedulerStatus
from swarmtrain.queueing.queue_state import QueueReader, QueueState
from swarmtrain.view.console import print_message, show_progress
from swarmtrain.view.queue_table import QueueTable, build_queue_table, estimate_queue_starts

_IMAGE_NAME = "swarmtrain-queue"
_ENGINE_TIMEOUT_SECONDS = 1800.0  # seconds without progress from the engine in one step of a build


def start_scheduler(image: str | None, base_image: str | None) -> SchedulerStatus:
    """Start or update the scheduler with `image`; without one, build it, and push it to the swarm's registry or copy it to all managers.

    `base_image`: that of the image that is built; by default Python's official one. Raises SwarmtrainError.
    """
    engine = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS)
    with show_progress("starting the scheduler of the queue", interrupt_hint="run swarmtrain queue up again") as report_progress:
        return queue_service.start_scheduler(engine, image or _build_image(engine, base_image, report_progress), report_progress)


def remove_scheduler(*, assume_yes: bool) -> None:
    """Remove the scheduler. Raises SwarmtrainError.

    If runs wait, which nobody starts then, the user must confirm it, unless `assume_yes`.
    """
    engine = DockerEngine()
    waiting = [run.run for run in queue_changes.list_waiting_runs(QueueReader(engine).read_state(time.time()))]
    if waiting:
        action = f"remove the scheduler, for which {', '.join(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        require_confirmation(action, "service swarmtrain-queue", assume_yes=assume_yes)
    with show_progress("removing the scheduler of the queue") as report_progress:
        queue_service.remove_scheduler(engine, report_progress)


def load_queue_table() -> QueueTable:
    """Return the table of the runs in the queue. Raises EngineError."""
    engine = DockerEngine()
    status = queue_service.find_scheduler_status(engine)
    state = QueueReader(engine).read_state(time.time())
    overviews = create_launcher("swarm").read_overviews() if queue_changes.list_waiting_runs(state) else []
    now = time.time()
    return build_queue_table(state, status, estimate_queue_starts(state, overviews, now), now)


def load_policy_text() -> str:
    """Return the YAML text of the queue's policy, of the default one if none is stored. Raises EngineError."""
    return queue_changes.load_policy_text(DockerEngine())


def store_policy(file: Path) -> None:
    """Store the policy in the YAML file `file`.

    Raises ConfigError, EngineError; StackError if it lacks the class of a run in the queue, or if the swarm lacks the secret of a channel.
    """
    engine, text = DockerEngine(), read_config_text(file, "swarmtrain queue policy > {} writes the present one there")
    policy = queue_changes.store_policy(engine, _read_state(engine), text, source=str(file))
    print_message(f"stored; classes: {', '.join(f'{name} {value}' for name, value in policy.classes.items())}")


def move_run(run: str, place: int, *, assume_yes: bool) -> QueueTable:
    """Move the waiting `run` to `place` among the waiting runs of its priority, and return the new table. Raises StackError, EngineError.

    If it passes somebody else's run, or is somebody else's, the user must confirm it, unless `assume_yes`.
    """
    engine = DockerEngine()
    launcher = create_launcher("swarm")
    confirm_change(launcher, run, f"move to place {place} of its priority:", assume_yes=assume_yes)
    with show_progress("changing the order of the queue") as report_progress:
        queue_changes.move_run(engine, _read_state(engine), run, place, report_progress)
    return load_queue_table()


def cancel_run(run: str, *, assume_yes: bool) -> None:
    """Remove the waiting `run`. If it is somebody else's, the user must confirm it, unless `assume_yes`. Raises StackError, EngineError."""
    engine = DockerEngine()
    launcher = create_launcher("swarm")
    member = _read_state(engine).members.get(run)
    if member is None or member.entry.state not in (EntryState.waiting, EntryState.incomplete):
        reason = f"does not wait: it is {member.entry.state}" if member else "is not in the queue"
        raise StackError(reason, place=f"run {run}", hint=f"swarmtrain stop {run}, or swarmtrain down {run}" if member else None)
    confirm_change(launcher, run, "cancel", assume_yes=assume_yes)
    queue_changes.withdraw_run(engine, run)
    remove_run(launcher, run)


def _read_state(engine: DockerEngine) -> QueueState:
    return QueueReader(engine).read_state(time.time())


def _build_image(engine: DockerEngine, base_image: str | None, report_progress: ProgressReporter) -> str:
    """Build the scheduler's image, make it available to all managers, and return its name. Raises ImageError, EngineError."""
    try:
        registry = swarm_registry.get_registry_status(engine)
    except ImageError:  # there is none
        registry = None
    prefix = f"{registry.address}/" if registry and not registry.trust_problem else ""
    tag = f"{prefix}{_IMAGE_NAME}:{__version__}"
    build_queue_image(engine.client, tag, base_image=base_image, report_progress=report_progress)
    if prefix:
        push_image(engine.client, tag, report_progress=report_progress)
        return tag
    return distribute_image(
        engine.client,
        tag,
        list_other_engines(engine, role="manager"),
        lambda address: DockerEngine(address, timeout=_ENGINE_TIMEOUT_SECONDS).client,
        report_progress=report_progress,
    )
