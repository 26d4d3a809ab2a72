"""Benchmark of the step times that `plan` estimates: how far they are from those of runs, on two nodes with links of three speeds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.lab_runs import build_options, measure_step_cost
from benchmarks.lab_startup import run_lab
from benchmarks.measurement import ROOT, SWARMTRAIN_ARGV, BenchmarkRow, Sample, print_progress
from benchmarks.run_startup import provide_image
from swarmtrain import process
from swarmtrain.lab import Lab

_REPEATS, _RUN = 3, "estimated"
_RATES = {"full-speed": "", "1gbit": "1gbit", "100mbit": "100mbit"}
_GLOBAL_BATCH, _SEQUENCE_LENGTH = 12, 128
_STEPS, _WARMUP_STEPS = 9, 3
_OPTIONS = [
    "runner.nodes=2",
    "runner.min_nodes=2",
    "runner.max_nodes=2",
    f"topology.global_batch_size={_GLOBAL_BATCH}",
    "transformer_architecture.hidden_size=256",
    "transformer_architecture.num_layers=4",
]
_METHODS = {
    "ddp": [],
    "bf16": ["topology.gradient_compression=bf16"],
    "powersgd": ["topology.gradient_compression=powersgd", "topology.powersgd.start_step=0"],
    "diloco": ["topology.learners=2", f"diloco.inner_steps={_STEPS // 3}", "diloco.quantization=int8"],
}
"""The options of each way of training. Only the slowest links are used with all of them: there they differ most."""
_LIMIT = 1.25


def measure_step_estimates() -> Iterator[BenchmarkRow]:
    """Measure steps with doctor, estimate them with plan, and train, in turns. The result is the larger time divided by the smaller one."""
    with run_lab(2) as lab:
        provide_image(lab)
        for rate_name, rate in _RATES.items():
            for node in ("node0", "node1") if rate else ():
                lab.limit_node_bandwidth(node, rate, report_progress=print_progress)
            methods = _METHODS if rate == "100mbit" else {"ddp": _METHODS["ddp"]}
            rounds = [[_compare(lab, name, options) for name, options in methods.items()] for _ in range(_REPEATS)]
            for name, pairs in zip(methods, zip(*rounds, strict=True), strict=True):
                texts = ", ".join(f"{estimated:.3g} and {measured:.3g}" for estimated, measured in pairs)
                yield BenchmarkRow(
                    f"estimates/{name}/{rate_name}",
                    f"distance of plan's estimate of a step from that of a run on two nodes, {name}, {rate_name.replace('-', ' ')}",
                    "×",
                    Sample.from_values([max(pair) / min(pair) for pair in pairs]),
                    limit=_LIMIT,
                    note=f"estimated and measured seconds: {texts}",
                )


def _compare(lab: Lab, name: str, options: Sequence[str]) -> tuple[float, float]:
    """Return the estimated and the measured seconds of a step."""
    run = partial(process.run_command, cwd=ROOT, env={**os.environ, **lab.build_client_environment()}, timeout=300)
    settings = build_options(_RUN, _STEPS + _WARMUP_STEPS, [*_OPTIONS, *options])
    run([*SWARMTRAIN_ARGV, "doctor", "examples/quickstart.yml", "--step-times", "--name", _RUN, *settings])
    plan = json.loads(run([*SWARMTRAIN_ARGV, "plan", "examples/quickstart.yml", "--json", "--name", _RUN, *settings]))
    estimated = float(plan["step_estimates"]["rows"][0]["seconds"])
    measured = measure_step_cost(
        lab,
        _RUN,
        [*_OPTIONS, *options],
        tokens_per_step=_GLOBAL_BATCH * _SEQUENCE_LENGTH,
        steps=_STEPS,
        warmup_steps=_WARMUP_STEPS,
    ).seconds
    print_progress(f"{name}: estimated {estimated:.3g} s per step, measured {measured:.3g} s")
    return estimated, measured
