"""Benchmark of tensor parallelism on the host: milliseconds that Python and torch need for a layer, against one that is not sharded."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial

from benchmarks.measurement import ROOT, BenchmarkRow, measure_in_turns
from swarmtrain import process

_REPEATS = 5
_GOAL = "; goal: at most 1.3 times as long"
_ARCHITECTURE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "sequence_length": 8,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "mlp_factor": 2.0,
    "weight_tying": False,
}


def measure_layer_host_time() -> Iterator[BenchmarkRow]:
    """Measure the host time, in milliseconds, of the forward and backward pass of a layer, with two tensor-parallel ranks and without."""
    for name, topology, goal in (("", {}, _GOAL), ("/sequence-parallel", {"sequence_parallel": True}, "")):
        result, baseline = measure_in_turns(
            _REPEATS, partial(_measure, {"model_parallel_size": 2, **topology}), partial(_measure, {}), warm_up=False
        )
        ranks = f"one of two tensor-parallel ranks{name.replace('/', ', ')}"
        description = f"host time of a layer's forward and backward pass, on {ranks}{goal}"
        yield BenchmarkRow(f"tensor-parallel{name}", description, "ms", result, baseline, "a layer that is not sharded")


def _measure(topology: dict[str, object]) -> float:
    sections = {"transformer_architecture": _ARCHITECTURE, "topology": {**topology, "global_batch_size": 1, "micro_batch_size": 1}}
    output = process.run_command([sys.executable, "-m", "benchmarks.loops.layer_host_time", json.dumps(sections)], cwd=ROOT)
    return float(output.splitlines()[-1])
