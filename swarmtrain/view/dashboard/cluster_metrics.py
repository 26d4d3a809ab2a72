"""Metrics of a cluster for Prometheus: those of all runs with the label `run`, the queue, and the machines with their GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from swarmtrain.view.dashboard.cluster_machines import ClusterMachine
from swarmtrain.view.dashboard.cluster_page import ClusterPage
from swarmtrain.view.dashboard.page_data import PageData
from swarmtrain.view.dashboard.prometheus import MetricSample, format_samples, iterate_run_samples
from swarmtrain.view.queue_table import QueueRow, QueueTable

_QUEUE_STATES = ("waiting", "preempted", "running", "saving", "stopped", "incomplete")


def render_cluster_metrics(page: ClusterPage, run_pages: Iterable[tuple[str, PageData | None]], now: float, *, is_reachable: bool) -> str:
    """Return the metrics of the cluster in the Prometheus text format at `now`, in seconds since the epoch.

    `run_pages`: the page data of each run, by its key on the page; None if they could not be read. `is_reachable`: whether the last query
    succeeded.
    """
    return format_samples([*_iterate_cluster_samples(page, is_reachable=is_reachable), *_iterate_samples_of_runs(run_pages, now)])


def _iterate_samples_of_runs(run_pages: Iterable[tuple[str, PageData | None]], now: float) -> Iterator[MetricSample]:
    for run, page_data in run_pages:
        if page_data is None:
            yield "reachable", "gauge", "1 if the last query of the run succeeded.", {"run": run}, 0.0
        else:
            yield from iterate_run_samples(run, page_data, now)


def _iterate_cluster_samples(page: ClusterPage, *, is_reachable: bool) -> Iterator[MetricSample]:
    is_complete = is_reachable and not page.problems
    yield "cluster_reachable", "gauge", "1 if the last query of all launchers succeeded.", {}, float(is_complete)
    if page.queue:
        yield from _iterate_queue_samples(page.queue)
    for machine in page.machines:
        yield from _iterate_machine_samples(machine)


def _iterate_queue_samples(queue: QueueTable) -> Iterator[MetricSample]:
    is_scheduling = queue.scheduler is not None and queue.scheduler.state == "running"
    yield "scheduler_up", "gauge", "1 if the scheduler of the queue is running.", {}, float(is_scheduling)
    counts = Counter((row.priority_class, _describe_state(row)) for row in queue.runs)
    for priority_class in sorted({*queue.classes, *(row.priority_class for row in queue.runs)}):
        for state in _QUEUE_STATES:
            labels = {"class": priority_class, "state": state}
            help_text = "Runs in the queue by class and state. preempted: waits after it had nodes before; running: admitted."
            yield "queue_runs", "gauge", help_text, labels, float(counts[priority_class, state])
    yield "queue_oldest_wait_seconds", "gauge", "Seconds for which the oldest waiting run has been waiting.", {}, _find_oldest_wait(queue)


def _describe_state(row: QueueRow) -> str:
    return "preempted" if row.state == "waiting" and row.trained_seconds > 0 else row.state


def _find_oldest_wait(queue: QueueTable) -> float:
    waits: Sequence[float] = [queue.time - row.since for row in queue.runs if row.state == "waiting" and row.since]
    return max(0.0, *waits) if waits else 0.0


def _iterate_machine_samples(machine: ClusterMachine) -> Iterator[MetricSample]:
    labels = {"host": machine.name}
    if machine.state:
        yield "machine_available", "gauge", "1 if nodes of runs can start on the machine.", labels, float(machine.state == "ready")
        yield "machine_gpus", "gauge", "GPUs of the machine, as declared or as last probed.", labels, float(len(machine.gpu_ids))
    yield (
        "machine_gpus_allocated",
        "gauge",
        "GPUs of the machine that are allocated to runs or other services.",
        labels,
        machine.gpus_allocated,
    )
    yield "machine_cores", "gauge", "Cores of the machine.", labels, machine.cores
    if machine.cores is not None:
        yield (
            "machine_cores_allocated",
            "gauge",
            "Cores of the machine that are allocated to runs or other services.",
            labels,
            machine.cores_allocated,
        )
