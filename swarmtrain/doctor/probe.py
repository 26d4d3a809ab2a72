"""Run a probe on every node: a short run in the job's own image, network, mounts and reservations, removed after a few seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace

from swarmtrain import protocol
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.doctor.probe_results import ProbeResults
from swarmtrain.errors import ResourcesReserved, RunNotFound, StackError
from swarmtrain.launchers.base import Launcher, ProgressReporter, TaskState
from swarmtrain.planning.plan import Plan, build_probe_run_name
from swarmtrain.protocol import Event

_TIMEOUT_SECONDS = 300.0
_STEP_TIME_TIMEOUT_SECONDS = 300.0


def run_probe(
    launcher: Launcher, plan: Plan, report_progress: ProgressReporter, *, reserve_gpus: bool = True, step_time_seconds: float = 0.0
) -> ProbeResults:
    """Probe the available nodes of `plan` and return the results. The probe is always removed afterwards.

    `step_time_seconds`: about how long to measure training steps on each node, in seconds; 0: not at all.

    If `reserve_gpus` is False because another run has reserved the GPUs, the probe sees the GPUs but reserves none. Raises
    NodesRefused if a machine refuses to start its node, and StackError if the probe cannot be started for another reason.
    """
    plan = replace(plan, nodes=plan.available_nodes, missing_nodes=())
    probe = replace(
        plan,
        run=build_probe_run_name(plan.run),
        is_probe=True,
        step_time_seconds=step_time_seconds,
        config=plan.config if reserve_gpus else _drop_gpu_reservation(plan.config),
    )
    # The outcome of a probe is nothing to notify about.
    probe = replace(
        probe, config=probe.config.model_copy(update={"notify": {}}), cargo=replace(probe.cargo, secrets=probe.cargo.node_secrets)
    )
    is_up = plan.run in launcher.list_runs()
    if is_up:
        probe = replace(probe, config=_drop_subnet(probe.config))
    if not reserve_gpus:
        report_progress("the GPUs are reserved by a run: the probe checks the nodes without reserving GPUs")
    if is_up:
        report_progress(f"{plan.run} is up: it keeps running, and shares its nodes with the probe for a few seconds")
    report_progress(f"probing {len(plan.nodes)} nodes, as run {probe.run}")
    try:
        launcher.deploy_run(probe, report_progress)
        return _collect_probe_results(launcher, plan, probe, report_progress)
    except ResourcesReserved as error:  # by a run that was deployed since `reserve_gpus` was determined
        hint = "wait until they are free, or skip the probe with: swarmtrain doctor CONFIG --no-probe"
        raise StackError(error.message, place=error.place, hint=hint) from None
    finally:
        with contextlib.suppress(RunNotFound):  # if the probe failed to start, it has already been removed
            launcher.tear_down_run(probe.run, lambda _: None)


def _drop_gpu_reservation(config: Config) -> Config:
    """Return a copy of `config` for a run that sees the GPUs but reserves none."""
    swarm = config.runner.swarm.model_copy(update={"gpu": GpuMode.visible})
    return config.model_copy(update={"runner": config.runner.model_copy(update={"swarm": swarm})})


def _drop_subnet(config: Config) -> Config:
    """Return a copy of `config` for a probe that runs at the same time as the run, whose network has the configured subnet."""
    swarm = config.runner.swarm.model_copy(update={"subnet": None})
    return config.model_copy(update={"runner": config.runner.model_copy(update={"swarm": swarm})})


def _collect_probe_results(launcher: Launcher, plan: Plan, probe: Plan, report_progress: ProgressReporter) -> ProbeResults:
    deadline = time.monotonic() + _TIMEOUT_SECONDS + (_STEP_TIME_TIMEOUT_SECONDS if probe.step_time_seconds else 0.0)
    last_kind = protocol.EVENT_STEP_TIME if probe.step_time_seconds else protocol.EVENT_COLLECTIVE
    events: list[Event] = []
    service_states: dict[str, str] = {}
    failure_reason = ""
    for update in launcher.watch_run(probe.run):
        if isinstance(update, Event):
            events.append(update)
            if update.kind == protocol.EVENT_OUTCOME and update.data["status"] != "done":
                failure_reason = update.data["reason"]
            if line := _format_progress(update):
                report_progress(line)
        elif isinstance(update, TaskState):
            service_states[update.node] = f"{update.state}: {update.reason}" if update.reason else update.state
        is_complete = _index_event_data_by_node(events, last_kind).keys() >= {node.name for node in plan.nodes}
        if is_complete or time.monotonic() > deadline:
            break
    links = tuple(event.data for event in events if event.kind == protocol.EVENT_LINK)
    return ProbeResults(
        plan,
        _index_event_data_by_node(events, protocol.EVENT_NODE_PROBE),
        links,
        _index_event_data_by_node(events, protocol.EVENT_COLLECTIVE),
        failure_reason,
        service_states,
        _index_event_data_by_node(events, protocol.EVENT_STEP_TIME),
    )


def _index_event_data_by_node(events: Iterable[Event], kind: str) -> dict[str, dict[str, object]]:
    return {str(event.data["node"]): event.data for event in events if event.kind == kind}


def _format_progress(event: Event) -> str:
    match event.kind:
        case protocol.EVENT_NODE_PROBE:
            return f"{event.data['node']} has completed its local checks"
        case protocol.EVENT_LINK:
            return f"{event.data['a']} and {event.data['b']} have measured their link"
        case protocol.EVENT_COLLECTIVE:
            return f"{event.data['node']} has completed the all-reduce"
        case protocol.EVENT_STEP_TIME:
            return f"{event.data['node']} has measured its training steps"
    return ""
