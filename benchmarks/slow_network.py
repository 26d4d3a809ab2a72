"""Benchmark of training over slow links: tokens per second of the ways to send less, against plain DDP, on two nodes of a lab."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.lab_runs import measure_step_seconds
from benchmarks.lab_startup import run_lab
from benchmarks.measurement import BenchmarkRow, Sample, print_progress
from benchmarks.run_startup import provide_image
from swarmtrain.lab import Lab

_REPEATS, _RUN = 3, "slow"
_RATES = ("1gbit", "100mbit")
_GLOBAL_BATCH, _SEQUENCE_LENGTH = 4, 16
_OPTIONS = [
    "runner.nodes=2",
    "runner.min_nodes=2",
    "runner.max_nodes=2",
    f"topology.global_batch_size={_GLOBAL_BATCH}",
    "topology.micro_batch_size=1",
    f"transformer_architecture.sequence_length={_SEQUENCE_LENGTH}",
    "transformer_architecture.hidden_size=512",
    "transformer_architecture.num_layers=6",
    "transformer_architecture.num_attention_heads=8",
]
"""A model of 19 million parameters and a small batch: at 1 Gbit/s, the limit of the link takes about 75 % of a step of plain DDP."""
_WARMUP_STEPS = 2
_ROUND_STEPS = 100
_LEARNERS = ["topology.learners=2", "diloco.quantization=int8"]


@dataclass(frozen=True)
class _Method:
    """A way of training. `steps`: measured steps at each rate. `goals`: least ratio of tokens per second to plain DDP at each rate."""

    name: str
    options: Sequence[str]
    steps: int
    goals: Sequence[float | None] = (None, None)


_DDP = _Method("ddp", [], 4)
_METHODS = (
    _Method("bf16", ["topology.gradient_compression=bf16"], 6),
    _Method("powersgd", ["topology.gradient_compression=powersgd", "topology.powersgd.start_step=0"], 16, (2.0, 6.0)),
    _Method("diloco", [*_LEARNERS, f"diloco.inner_steps={_ROUND_STEPS}"], _ROUND_STEPS, (4.0, 10.0)),
    _Method("diloco-overlap", [*_LEARNERS, f"diloco.inner_steps={_ROUND_STEPS}", "diloco.overlap=20"], _ROUND_STEPS, (4.0, 10.0)),
)
_WITHOUT_EXCHANGE = _Method("diloco without an exchange", [*_LEARNERS, "diloco.inner_steps=1000"], _ROUND_STEPS)
_COMPUTE_GOAL = 0.95


def measure_slow_network() -> Iterator[BenchmarkRow]:
    """Measure tokens per second of each way of training at each rate, in turns with plain DDP. DiLoCo also without its exchanges."""
    with run_lab(2) as lab:
        provide_image(lab)
        measure = partial(_measure_step_seconds, lab)
        full_speed = Sample.from_values([measure(_DDP) for _ in range(_REPEATS)])
        for index, rate in enumerate(_RATES):
            for node in ("node0", "node1"):
                lab.limit_node_bandwidth(node, rate, report_progress=print_progress)
            rounds = [[measure(method) for method in (_DDP, *_METHODS, _WITHOUT_EXCHANGE)] for _ in range(_REPEATS)]
            ddp, *methods, without_exchange = [Sample.from_values([1 / value for value in values]) for values in zip(*rounds, strict=True)]
            share = 1 - full_speed.median * ddp.median
            seconds = f"{1 / ddp.median:.3g} s per step, {full_speed.median:.3g} s without a limit"
            note = f"plain DDP: {seconds}, so {share:.0%} for the link"
            for method, sample in zip(_METHODS, methods, strict=True):
                yield BenchmarkRow(
                    f"slow/{method.name}/{rate}",
                    f"steps per second on two nodes at {rate}, {method.name}",
                    "steps/s",
                    sample,
                    ddp,
                    "the same run with plain DDP",
                    goal=method.goals[index],
                    note=note,
                )
                if method.options[0] == _LEARNERS[0]:
                    yield BenchmarkRow(
                        f"slow/{method.name}/{rate}/computation",
                        f"steps per second on two nodes at {rate}, {method.name}",
                        "steps/s",
                        sample,
                        without_exchange,
                        "the same run without an exchange between the nodes",
                        goal=_COMPUTE_GOAL,
                    )


def _measure_step_seconds(lab: Lab, method: _Method) -> float:
    seconds = measure_step_seconds(
        lab,
        _RUN,
        [*_OPTIONS, *method.options],
        tokens_per_step=_GLOBAL_BATCH * _SEQUENCE_LENGTH,
        steps=method.steps,
        warmup_steps=_WARMUP_STEPS,
    )
    print_progress(f"{method.name}: {seconds:.3g} s per step")
    return seconds
