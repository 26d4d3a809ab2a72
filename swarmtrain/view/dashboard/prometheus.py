"""Dashboard data in the Prometheus text format: https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.

Units are those that Prometheus recommends: seconds, bytes, ratios from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from swarmtrain.protocol import RENDEZVOUS_SERVICE
from swarmtrain.view.dashboard.page_data import PageData

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("queued", "starting", "training", "done", "failed", "stopped", "down")
_PROGRESS = (
    ("step", "step", "Optimizer steps completed."),
    ("steps", "steps", "Total number of optimizer steps."),
    ("loss", "loss", "Training loss of the newest step."),
    ("learning_rate", "learning_rate", "Learning rate."),
    ("gradient_norm", "gradient_norm", "Gradient norm before clipping."),
    ("tokens_per_second", "tokens_per_second", "Training tokens per second, summed over all ranks."),
    ("mfu", "mfu_ratio", "Model FLOPs utilization (MFU): the model's FLOPs as a fraction of the devices' peak."),
    ("tflops", "tflops", "Model TFLOP per second, summed over all ranks."),
    ("eta_seconds", "eta_seconds", "Estimated seconds to the last step at the current speed."),
)
_NODE = (
    ("cpu", "node_cpus_used", "CPUs in use by the run."),
    ("cpus", "node_cpus", "CPU limit of the run."),
    ("memory", "node_memory_bytes", "Memory in use by the run."),
    ("memory_limit", "node_memory_limit_bytes", "Memory limit of the run."),
)
_GPU = (
    ("utilization", "gpu_utilization_ratio", "Fraction of time in which the GPU was busy.", 0.01),
    ("memory", "gpu_memory_bytes", "GPU memory in use.", 1.0),
    ("memory_total", "gpu_memory_total_bytes", "Total GPU memory.", 1.0),
    ("temperature", "gpu_temperature_celsius", "Temperature of the GPU.", 1.0),
    ("power", "gpu_power_watts", "Power draw of the GPU.", 1.0),
)

MetricSample = tuple[str, str, str, Mapping[str, Any], float | None]
"""One Prometheus sample: metric name without the prefix, type (gauge or counter), help text, labels, value."""


def render_metrics(page_data: PageData, now: float) -> str:
    """Return the metrics of a run in the Prometheus text format at `now`, in seconds since the epoch. Unreported values are omitted."""
    return format_samples(iterate_run_samples(page_data["run"], page_data, now))


def iterate_run_samples(run: str, page_data: PageData, now: float) -> Iterator[MetricSample]:
    """Yield the samples of a run, with the label `run`."""
    for name, kind, help_text, labels, value in _iterate_metric_samples(page_data, now):
        yield name, kind, help_text, {"run": run, **labels}, value


def format_samples(samples: Iterable[MetricSample]) -> str:
    """Return `samples` in the Prometheus text format, with all samples of a metric together. Values that are not finite are omitted."""
    metrics: dict[str, tuple[str, str, list[str]]] = {}
    for name, kind, help_text, labels, value in samples:
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        pairs = ",".join(f'{key}="{_escape_label_value(str(item))}"' for key, item in labels.items())
        line = f"swarmtrain_{name}{f'{{{pairs}}}' if pairs else ''} {_format_number(value)}"
        metrics.setdefault(f"swarmtrain_{name}", (kind, help_text, []))[2].append(line)
    blocks = (
        "\n".join([f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *lines]) + "\n"
        for name, (kind, help_text, lines) in metrics.items()
    )
    return "".join(blocks)


def _iterate_metric_samples(page_data: PageData, now: float) -> Iterator[MetricSample]:
    for state in _STATES:
        yield "run_state", "gauge", "1 for the current state of the run.", {"state": state}, float(page_data["state"] == state)
    progress, world, checkpoints, evaluation = page_data["progress"], page_data["world"], page_data["checkpoints"], page_data["validation"]
    for key, name, help_text in _PROGRESS:
        yield name, "gauge", help_text, {}, progress.get(key)
    yield "validation_loss", "gauge", "Newest validation loss.", {}, evaluation.get("loss")
    for phase, seconds in (progress.get("phases") or {}).items():
        yield "step_phase_seconds", "gauge", "Seconds of a step by phase.", {"phase": phase}, seconds
    for name, value in (progress.get("metrics") or {}).items():
        yield "metric", "gauge", "Custom metrics that the script reports.", {"name": name}, value
    for node, counts in (progress.get("micro_batches") or {}).items():
        yield "node_micro_batches", "gauge", "Micro batches of a step that are assigned to the node by speed.", {"node": node}, sum(counts)
    if (last_progress_time := progress.get("time") or page_data["started"]) is not None:
        yield (
            "since_last_step_seconds",
            "gauge",
            "Seconds since the last reported step, or since the start.",
            {},
            max(0.0, now - last_progress_time),
        )
    yield "reachable", "gauge", "1 if the last query of the run succeeded.", {}, float(not page_data.get("connection_error"))
    yield "world_size", "gauge", "Ranks of the newest world.", {}, world.get("world_size")
    yield "worlds_total", "counter", "Number of worlds that have formed.", {}, page_data["worlds"]
    yield "failures_total", "counter", "Failures that ranks and supervisors reported.", {}, page_data["failures"]
    running_nodes = [node["state"] == "running" for node in page_data["nodes"] if node["node"] != RENDEZVOUS_SERVICE]
    yield "nodes_desired", "gauge", "Number of nodes that the run should have.", {}, len(running_nodes)
    yield "nodes_running", "gauge", "Number of nodes whose container or process is running.", {}, sum(running_nodes)
    yield "straggler", "gauge", "1 if the other ranks wait for a straggler.", {}, float(bool(page_data["straggler"]))
    if checkpoints:
        yield "checkpoint_step", "gauge", "Step of the newest checkpoint.", {}, checkpoints[-1].get("step")
        yield "checkpoint_age_seconds", "gauge", "Seconds since the newest checkpoint.", {}, max(0.0, now - checkpoints[-1]["time"])
        yield "checkpoint_seconds", "gauge", "Seconds spent writing the newest checkpoint.", {}, checkpoints[-1].get("seconds")
    for node in page_data["nodes"]:
        yield from _iterate_node_samples(node)


def _iterate_node_samples(node: Mapping[str, Any]) -> Iterator[MetricSample]:
    labels = {"node": node["node"], "host": node["host"]}
    restarts = node["restarts"]
    yield "node_up", "gauge", "1 if the node's container or process is running.", labels, float(node["state"] == "running")
    yield (
        "node_restarts_total",
        "counter",
        "Number of rank restarts caused by this node.",
        labels,
        restarts["count"] if restarts else 0,
    )
    for key, name, help_text in _NODE:
        yield name, "gauge", help_text, labels, node.get(key)
    for number, gpu in enumerate(node["gpus"]):
        for key, name, help_text, factor in _GPU:
            if isinstance(value := gpu.get(key), int | float):
                yield name, "gauge", help_text, {**labels, "gpu": number}, value * factor


def _escape_label_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
