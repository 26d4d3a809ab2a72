"""Count what a training step costs on a GPU, against torchtitan's: kernels, casts, host synchronizations, bytes moved and bytes sent.

The steps run on fake tensors (benchmarks.counting), so no GPU is needed, and the counts are exact. The cost of a layer is the difference
between models with different numbers of layers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import third_party_tools
from benchmarks.measurement import ROOT, BenchmarkRow, Sample, print_progress
from swarmtrain import process

Costs = Mapping[str, float]
"""The fields of counting.operation_counter.OperationCosts, by name."""
StepCosts = tuple[Costs, Costs]
"""Costs of a step: of its forward and backward passes, and of the rest of it."""
Request = Mapping[str, object]
"""A config and a world size, see counting.swarmtrain_step."""

_LAYERS = 2, 3
_MICRO_BATCHES = 1, 2, 3
_MICRO_BATCH_SIZE, _SEQUENCE_LENGTH = 4, 4096
_FSDP_RANKS = 8
_ARCHITECTURE: Mapping[str, Any] = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "sequence_length": _SEQUENCE_LENGTH,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "mlp_factor": 2.75,
    "weight_tying": False,
    "precision": "bfloat16",
}
"""The model of 1.2 billion parameters of `make gpu`, except for its number of layers."""


@dataclass(frozen=True)
class Quantity:
    """A counted quantity: the field of OperationCosts, its unit, and the number by which it is divided."""

    field: str
    unit: str
    divisor: float = 1


_KERNELS, _CASTS = Quantity("kernels", "kernels"), Quantity("casts", "casts")
_SYNCHRONIZATIONS = Quantity("synchronizations", "times")
_MEGABYTES_MOVED, _MEGABYTES_SENT = Quantity("bytes_moved", "MB", 1e6), Quantity("bytes_sent", "MB", 1e6)
_BYTES_MOVED = Quantity("bytes_moved", "bytes")


@dataclass(frozen=True)
class CostRow:
    """A row of this benchmark: a quantity of one part of a step, and its budget."""

    name: str
    part: str
    quantity: Quantity
    budget: float


ROWS = (
    CostRow("layer/kernels", "layer", _KERNELS, 60),
    CostRow("layer/casts", "layer", _CASTS, 9),
    CostRow("layer/moved", "layer", _MEGABYTES_MOVED, 6632),
    CostRow("further/casts", "further", _CASTS, 0),
    CostRow("further/moved", "further", _MEGABYTES_MOVED, 6529),
    CostRow("rest/kernels", "rest", _KERNELS, 142),
    CostRow("rest/casts", "rest", _CASTS, 15),
    CostRow("rest/moved", "rest", _MEGABYTES_MOVED, 45938),
    CostRow("update/moved", "update", _BYTES_MOVED, 44.1),
    CostRow("step/synchronizations", "step", _SYNCHRONIZATIONS, 1),
    CostRow("fsdp/layer/kernels", "layer", _KERNELS, 56),
    CostRow("fsdp/layer/casts", "layer", _CASTS, 2),
    CostRow("fsdp/layer/moved", "layer", _MEGABYTES_MOVED, 7223),
    CostRow("fsdp/layer/sent", "layer", _MEGABYTES_SENT, 360),
    CostRow("fsdp/further/moved", "further", _MEGABYTES_MOVED, 7300),
    CostRow("fsdp/further/sent", "further", _MEGABYTES_SENT, 360),
)
"""All rows. Those whose names begin with fsdp/ are of FSDP on 8 ranks, the others of one GPU."""
_DESCRIPTIONS = {
    "layer": "{} of one layer in the forward and backward pass of one micro batch",
    "further": "{} of one layer in each further micro batch of a step",
    "rest": "{} of everything else in these passes: embedding, last norm, output layer, loss",
    "update": "{} per parameter, after the backward pass",
    "step": "{} in a step, when it is not logged",
}
_QUANTITY_TEXTS = {
    "kernels": "kernels",
    "casts": "kernels that only convert a type",
    "synchronizations": "waits of the host for the device",
    "bytes_moved": "bytes read and written, without matrix products and attention,",
    "bytes_sent": "bytes sent by each rank",
}


def measure_costs() -> Iterator[BenchmarkRow]:
    """Count the costs of each part of a step, of swarmtrain's trainer and of torchtitan's Llama 3 model of the same shape."""
    python = str(third_party_tools.install_with_shared_packages(third_party_tools.TORCHTITAN, third_party_tools.TRITON))
    tool = third_party_tools.TORCHTITAN.replace("==", " ")
    print_progress("counting operations")
    for prefix, ranks in (("", 1), ("fsdp/", _FSDP_RANKS)):
        result = count_parts(ranks, lambda requests: _run_counter(sys.executable, "swarmtrain_step", requests))
        baseline = count_parts(ranks, lambda requests: _run_counter(python, "torchtitan_step", requests))
        setup = f"1.2B model, bfloat16, {_MICRO_BATCH_SIZE} × {_SEQUENCE_LENGTH} tokens, not compiled" + (
            f", FSDP on {ranks} GPUs" if prefix else ""
        )
        for row in (each for each in ROWS if each.name.startswith("fsdp/") == bool(prefix)):
            yield BenchmarkRow(
                f"costs/{row.name}",
                f"{_DESCRIPTIONS[row.part].format(_QUANTITY_TEXTS[row.quantity.field])}; {setup}",
                row.quantity.unit,
                Sample.from_values([read_quantity(result, row)]),
                Sample.from_values([read_quantity(baseline, row)]),
                f"{tool}'s model",
                limit=row.budget,
            )


def count_parts(ranks: int, count_steps: Callable[[Sequence[Request]], Sequence[StepCosts]]) -> Mapping[str, Costs]:
    """Return the costs of each part of a step on one of `ranks` ranks, by the part's name.

    `count_steps` returns the costs of a step of each request.
    """
    shapes = [(layers, micro_batches) for layers in _LAYERS for micro_batches in _MICRO_BATCHES]
    step_costs = dict(zip(shapes, count_steps([build_request(*shape, ranks) for shape in shapes]), strict=True))
    fewer, more = _LAYERS
    passes = {shape: costs for shape, (costs, _) in step_costs.items()}
    update = step_costs[fewer, 1][1]
    layers_in_passes = [_combine(passes[more, count], passes[fewer, count], -1) for count in _MICRO_BATCHES]
    layer = layers_in_passes[0]
    parameters = _count_parameters(fewer) / ranks
    return {
        "layer": layer,
        "further": _combine(layers_in_passes[2], layers_in_passes[1], -1),
        "rest": _combine(passes[fewer, 1], layer, -fewer),
        "update": {name: cost / parameters for name, cost in update.items()},
        "step": _combine(passes[fewer, 1], update, 1),
    }


def read_quantity(parts: Mapping[str, Costs], row: CostRow) -> float:
    """Return the value of `row` in the result of `count_parts`."""
    return parts[row.part][row.quantity.field] / row.quantity.divisor


def build_request(layers: int, micro_batches: int, ranks: int) -> Request:
    """Return the request for a step of a model with `layers` layers, with `micro_batches` micro batches on each of `ranks` ranks."""
    config = {
        "transformer_architecture": {**_ARCHITECTURE, "num_layers": layers},
        "topology": {
            "global_batch_size": _MICRO_BATCH_SIZE * micro_batches * ranks,
            "micro_batch_size": _MICRO_BATCH_SIZE,
            "data_parallel_type": "fsdp" if ranks > 1 else "ddp",
        },
        "learning_rate_scheduler": {"learning_rate": 1e-4},
        "trainer": {"train_iterations": 10, "deterministic": "ignore"},
    }
    return {"config": config, "world_size": ranks}


def _count_parameters(layers: int) -> float:
    """Return the number of parameters of the model with `layers` layers, without norms."""
    width = _ARCHITECTURE["hidden_size"]
    count: float = 2 * _ARCHITECTURE["vocab_size"] * width + layers * (4 + 3 * _ARCHITECTURE["mlp_factor"]) * width**2
    return count


def _combine(costs: Costs, other: Costs, factor: float) -> Costs:
    return {name: cost + factor * other[name] for name, cost in costs.items()}


def _run_counter(python: str, program: str, requests: Sequence[Request]) -> Sequence[StepCosts]:
    """Return the costs that `benchmarks.counting.PROGRAM` counts. Raises ProcessError if it fails."""
    argv = [python, "-m", f"benchmarks.counting.{program}", json.dumps(requests)]
    output = process.run_command(argv, env={**third_party_tools.build_environment(), "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    costs: list[StepCosts] = [(passes, update) for passes, update in json.loads(output.splitlines()[-1])]
    return costs
