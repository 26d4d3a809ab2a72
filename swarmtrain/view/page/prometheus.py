"""A page's data as text that Prometheus reads: https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.

Units are those that Prometheus asks for: seconds, bytes, ratios from 0 to 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from swarmtrain.view.page.data import Data
from swarmtrain.wire import RENDEZVOUS

TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("starting", "training", "done", "failed", "stopped", "down")
_PROGRESS = (
    ("step", "step", "Optimizer steps made."),
    ("steps", "steps", "Optimizer steps in all."),
    ("loss", "loss", "Training loss of the newest step, nats per token."),
    ("learning_rate", "learning_rate", "Learning rate."),
    ("gradient_norm", "gradient_norm", "Norm of the gradient before it is clipped."),
    ("tokens_per_second", "tokens_per_second", "Tokens trained on per second, all ranks together."),
    ("mfu", "mfu_ratio", "Model FLOPs utilization: of the devices' peak, what the model's own arithmetic uses."),
    ("tflops", "tflops", "Model TFLOP per second, all ranks together."),
    ("eta_seconds", "eta_seconds", "Seconds to the last step at this speed."),
)
_NODE = (
    ("cpu", "node_cpus_used", "CPUs in use by the run."),
    ("cpus", "node_cpus", "CPUs that the run may use."),
    ("memory", "node_memory_bytes", "Memory in use by the run."),
    ("memory_limit", "node_memory_limit_bytes", "Memory that the run may use."),
)
_GPU = (
    ("use", "gpu_use_ratio", "Part of the time in which the GPU did something.", 0.01),
    ("memory", "gpu_memory_bytes", "GPU memory in use.", 1.0),
    ("memory_total", "gpu_memory_total_bytes", "GPU memory there is.", 1.0),
    ("temperature", "gpu_temperature_celsius", "Temperature of the GPU.", 1.0),
    ("power", "gpu_power_watts", "Power that the GPU draws.", 1.0),
)

Sample = tuple[str, str, str, Mapping[str, Any], float | None]
"""Name without the prefix, gauge or counter, help, labels, value."""


def text(data: Data, now: float) -> str:
    """Return the samples of a run at `now`, in seconds since the epoch; what nobody told is left out."""
    metrics: dict[str, tuple[str, str, list[str]]] = {}
    for name, kind, about, labels, value in _samples(data, now):
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        pairs = ",".join(f'{key}="{_escaped(str(item))}"' for key, item in {"run": data["run"], **labels}.items())
        metrics.setdefault(f"swarmtrain_{name}", (kind, about, []))[2].append(f"swarmtrain_{name}{{{pairs}}} {_number(value)}")
    blocks = (
        "\n".join([f"# HELP {name} {about}", f"# TYPE {name} {kind}", *lines]) + "\n" for name, (kind, about, lines) in metrics.items()
    )
    return "".join(blocks)


def _samples(data: Data, now: float) -> Iterator[Sample]:
    for state in _STATES:
        yield "run_state", "gauge", "1 for the state that the run is in.", {"state": state}, float(data["state"] == state)
    progress, world, saved, held_out = data["progress"], data["world"], data["checkpoints"], data["evaluation"]
    for key, name, about in _PROGRESS:
        yield name, "gauge", about, {}, progress.get(key)
    yield "held_out_loss", "gauge", "Newest loss on held-out data, nats per token.", {}, held_out.get("loss")
    for part, seconds in (progress.get("parts") or {}).items():
        yield "step_part_seconds", "gauge", "Seconds of a step by what they are spent on.", {"part": part}, seconds
    for name, value in (progress.get("metrics") or {}).items():
        yield "metric", "gauge", "What the script itself measures.", {"name": name}, value
    if (since := progress.get("time") or data["started"]) is not None:
        yield "since_last_step_seconds", "gauge", "Seconds since a step was last told of, or since it began.", {}, max(0.0, now - since)
    yield "reachable", "gauge", "1 if the run could be asked the last time.", {}, float(not data.get("lost"))
    yield "world_size", "gauge", "Ranks of the newest world.", {}, world.get("world_size")
    yield "worlds_total", "counter", "Worlds that have formed.", {}, data["worlds"]
    yield "failures_total", "counter", "Failures that ranks and supervisors told of.", {}, data["failures"]
    up = [node["state"] == "running" for node in data["nodes"] if node["node"] != RENDEZVOUS]
    yield "nodes_wanted", "gauge", "Nodes that the run is to have.", {}, len(up)
    yield "nodes_running", "gauge", "Nodes whose container or process runs.", {}, sum(up)
    yield "straggler", "gauge", "1 if the others wait for one rank.", {}, float(bool(data["straggler"]))
    if saved:
        yield "checkpoint_step", "gauge", "Step of the newest checkpoint.", {}, saved[-1].get("step")
        yield "checkpoint_age_seconds", "gauge", "Seconds since the newest checkpoint.", {}, max(0.0, now - saved[-1]["time"])
        yield "checkpoint_seconds", "gauge", "Seconds that writing the newest checkpoint took.", {}, saved[-1].get("seconds")
    for node in data["nodes"]:
        yield from _node(node)


def _node(node: Mapping[str, Any]) -> Iterator[Sample]:
    where = {"node": node["node"], "host": node["host"]}
    again = node["restarts"]
    yield "node_up", "gauge", "1 if the node's container or process runs.", where, float(node["state"] == "running")
    yield "node_restarts_total", "counter", "How often something there made ranks start again.", where, again["count"] if again else 0
    for key, name, about in _NODE:
        yield name, "gauge", about, where, node.get(key)
    for number, gpu in enumerate(node["gpus"]):
        for key, name, about, factor in _GPU:
            if isinstance(value := gpu.get(key), int | float):
                yield name, "gauge", about, {**where, "gpu": number}, value * factor


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
