"""Benchmark of training over slow links: tokens per second of the ways to send less, against plain DDP, on two nodes of a lab."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.lab_startup import run_lab
from benchmarks.measurement import ROOT, SWARMTRAIN_ARGV, BenchmarkRow, Sample, print_progress
from benchmarks.run_startup import IMAGE, provide_image
from swarmtrain import process
from swarmtrain.lab import Lab

_REPEATS, _RUN = 3, "slow"
_RATES = ("1gbit", "100mbit")
_WARMUP_STEPS = 2
_GLOBAL_BATCH, _SEQUENCE_LENGTH = 4, 32
_OPTIONS = [
    "runner.nodes=2",
    "runner.min_nodes=2",
    "runner.max_nodes=2",
    f"runner.docker_config.docker_container={IMAGE}",
    f"trainer.save_dir=runs/{_RUN}",
    "trainer.save_interval=null",
    "trainer.eval_interval=null",
    f"topology.global_batch_size={_GLOBAL_BATCH}",
    "topology.micro_batch_size=1",
    f"transformer_architecture.sequence_length={_SEQUENCE_LENGTH}",
    "transformer_architecture.hidden_size=512",
    "transformer_architecture.num_layers=6",
    "transformer_architecture.num_attention_heads=8",
]
"""A model of 19 million parameters and a small batch: at 1 Gbit/s, about 80 % of a step of plain DDP is communication."""


@dataclass(frozen=True)
class _Method:
    """A way of training. `steps`: measured steps at each rate. `goals`: least ratio of tokens per second to plain DDP at each rate."""

    name: str
    options: Sequence[str]
    steps: int
    goals: Sequence[float | None]


_WINDOW_STEPS = 50
"""The throughput in a run's metrics is the mean of this many steps, or of all steps if there are fewer."""
_DDP = _Method("ddp", [], 4, (None, None))
_METHODS = (
    _Method("bf16", ["topology.gradient_compression=bf16"], 6, (None, None)),
    _Method("powersgd", ["topology.gradient_compression=powersgd", "topology.powersgd.start_step=0"], 16, (2.0, 6.0)),
    _Method("diloco", ["topology.learners=2", "diloco.inner_steps=50", "diloco.quantization=int8"], _WINDOW_STEPS, (4.0, 10.0)),
)


def measure_slow_network() -> Iterator[BenchmarkRow]:
    """Measure tokens per second of each way of training at each rate, in turns with plain DDP."""
    methods = (_DDP, *_METHODS)
    with run_lab(2) as lab:
        provide_image(lab)
        full_speed = Sample.from_values([_measure_step_seconds(lab, _DDP) for _ in range(_REPEATS)])
        for index, rate in enumerate(_RATES):
            for node in ("node0", "node1"):
                lab.limit_node_bandwidth(node, rate, report_progress=print_progress)
            rounds = [[_measure_step_seconds(lab, method) for method in methods] for _ in range(_REPEATS)]
            baseline, *samples = [Sample.from_values(values) for values in zip(*rounds, strict=True)]
            share = 1 - full_speed.median / baseline.median
            note = f"plain DDP: {baseline.median:.3g} s per step, {full_speed.median:.3g} s without a limit, so {share:.0%} for the link"
            for method, sample in zip(_METHODS, samples, strict=True):
                speed, ddp_speed = (Sample.from_values([1 / value for value in each.values]) for each in (sample, baseline))
                yield BenchmarkRow(
                    f"slow/{method.name}/{rate}",
                    f"steps per second on two nodes at {rate}, {method.name}",
                    "steps/s",
                    speed,
                    ddp_speed,
                    "the same run with plain DDP",
                    goal=method.goals[index],
                    note=note,
                )


def _measure_step_seconds(lab: Lab, method: _Method) -> float:
    """Run `method` on both nodes, and return the mean seconds per step after the first steps."""
    environment = {**os.environ, **lab.build_client_environment()}
    steps = _WARMUP_STEPS + method.steps
    options = [word for option in [*_OPTIONS, f"trainer.train_iterations={steps}", *method.options] for word in ("-o", option)]
    argv = [*SWARMTRAIN_ARGV, "deploy", "examples/quickstart.yml", "--name", _RUN, *options, "-o", "logger.log_interval=1"]
    try:
        process.run_command(argv, cwd=ROOT, env=environment, timeout=900)
        metrics = (lab.shared_disk / _RUN / "metrics.jsonl").read_text().splitlines()
        lines = [line for line in map(json.loads, metrics) if "learning_rate" in line]
    finally:
        process.run_command([*SWARMTRAIN_ARGV, "down", _RUN, "--yes"], env=environment)
        shutil.rmtree(lab.shared_disk / _RUN, ignore_errors=True)
    tokens = _GLOBAL_BATCH * _SEQUENCE_LENGTH
    elapsed = {line["step"]: min(line["step"], _WINDOW_STEPS) * tokens / line["tokens_per_second"] for line in lines}
    warmup = elapsed[_WARMUP_STEPS] if steps <= _WINDOW_STEPS else 0.0
    seconds: float = (elapsed[steps] - warmup) / method.steps
    print_progress(f"{method.name}: {seconds:.3g} s per step")
    return seconds
