"""Benchmark of training over slow links: the ways to send less, against plain DDP, on two nodes of a lab; also the bytes of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.lab_runs import StepCost, measure_step_cost
from benchmarks.lab_startup import run_lab
from benchmarks.measurement import BenchmarkRow, Sample, print_progress
from benchmarks.run_startup import provide_image
from swarmtrain.lab import Lab

_RUN = "slow"
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
"""A model of 19 million parameters and a small batch: at 1 Gbit/s, plain DDP spends more than 80 % of a step on its exchange."""
_ROUND_STEPS = 100


@dataclass(frozen=True)
class _Method:
    """A way of training. `steps`: measured steps. `goals`: least ratio of steps per second to plain DDP at each rate."""

    name: str
    options: Sequence[str]
    steps: int
    warmup_steps: int = 2
    goals: Sequence[float | None] = (None, None)
    byte_goals: Sequence[float | None] = (None, None)
    """Instead of `goals`: the ratio, as a fraction of the one that plain DDP would have if its links had to carry only these bytes."""


_DDP = _Method("ddp", [], 4)
_COMPRESSIONS = (
    _Method("bf16", ["topology.gradient_compression=bf16"], 6, byte_goals=(0.9, None)),
    _Method("powersgd", ["topology.gradient_compression=powersgd", "topology.powersgd.start_step=0"], 16, goals=(2.0, 6.0)),
)
_LEARNER_STEPS, _LEARNER_WARMUP_STEPS = 2 * _ROUND_STEPS, _ROUND_STEPS // 2
"""The measured steps contain two exchanges, also with an overlap."""


def _build_learner_method(name: str, *options: str, goals: Sequence[float | None] = (None, None)) -> _Method:
    options = ("topology.learners=2", "diloco.quantization=int8", *options)
    return _Method(name, options, _LEARNER_STEPS, _LEARNER_WARMUP_STEPS, goals)


_LEARNER_METHODS = (
    _build_learner_method("diloco", f"diloco.inner_steps={_ROUND_STEPS}", goals=(4.0, 10.0)),
    _build_learner_method("diloco-overlap", f"diloco.inner_steps={_ROUND_STEPS}", "diloco.overlap=20", goals=(4.0, 10.0)),
)
_WITHOUT_EXCHANGE = _build_learner_method("diloco without an exchange", "diloco.inner_steps=1000")
_REPEATS, _LEARNER_REPEATS = 3, 5
"""DiLoCo is compared with its own computation, which is nearly as fast: that needs more repeats and longer runs."""
_COMPUTE_GOAL = 0.95


def measure_slow_network() -> Iterator[BenchmarkRow]:
    """Measure steps per second of each way of training at each rate, in turns. DiLoCo also without its exchanges."""
    with run_lab(2) as lab:
        provide_image(lab)
        unlimited = _measure_in_turns(lab, [_DDP], _REPEATS)[0]
        for index, rate in enumerate(_RATES):
            for node in ("node0", "node1"):
                lab.limit_node_bandwidth(node, rate, report_progress=print_progress)
            ddp, *compressions = _measure_in_turns(lab, [_DDP, *_COMPRESSIONS], _REPEATS)
            *learners, without_exchange = _measure_in_turns(lab, [*_LEARNER_METHODS, _WITHOUT_EXCHANGE], _LEARNER_REPEATS)
            link_share, exchange_share = (1 - other.seconds / ddp.seconds for other in (unlimited, without_exchange))
            seconds_text = f"{unlimited.seconds:.3g} s without a limit of the link, {without_exchange.seconds:.3g} s without an exchange"
            ddp_note = (
                f"plain DDP: {ddp.seconds:.3g} s and {_format_megabytes(ddp.sent_bytes)} per step; {seconds_text}, "
                f"so {link_share:.0%} and {exchange_share:.0%} of it"
            )
            for method, costs in zip((*_COMPRESSIONS, *_LEARNER_METHODS), (*compressions, *learners), strict=True):
                byte_ratio = costs.sent_bytes / ddp.sent_bytes
                allowed = ddp.seconds / (unlimited.seconds + (ddp.seconds - unlimited.seconds) * byte_ratio)
                byte_goal = method.byte_goals[index]
                yield BenchmarkRow(
                    f"slow/{method.name}/{rate}",
                    f"steps per second on two nodes at {rate}, {method.name}",
                    "steps/s",
                    Sample.from_values(costs.steps_per_second.values[:_REPEATS]),
                    ddp.steps_per_second,
                    "the same run with plain DDP",
                    goal=round(byte_goal * allowed, 2) if byte_goal else method.goals[index],
                    note=f"{_format_megabytes(costs.sent_bytes)} per step of each node, {byte_ratio:.2%} of plain DDP's; {ddp_note}",
                )
            for method, costs in zip(_LEARNER_METHODS, learners, strict=True):
                yield BenchmarkRow(
                    f"slow/{method.name}/{rate}/computation",
                    f"steps per second on two nodes at {rate}, {method.name}",
                    "steps/s",
                    costs.steps_per_second,
                    without_exchange.steps_per_second,
                    "the same run without an exchange between the nodes",
                    goal=_COMPUTE_GOAL,
                    note=f"rounds of {_ROUND_STEPS} steps, {method.steps} steps of each run",
                )


class _Costs:
    """The costs of a step in repeated runs of one method."""

    def __init__(self, costs: Sequence[StepCost]) -> None:
        self.steps_per_second = Sample.from_values([1 / cost.seconds for cost in costs])
        self.seconds = 1 / self.steps_per_second.median
        self.sent_bytes = Sample.from_values([cost.sent_bytes for cost in costs]).median


def _measure_in_turns(lab: Lab, methods: Sequence[_Method], repeats: int) -> list[_Costs]:
    rounds = [[_measure_step_cost(lab, method) for method in methods] for _ in range(repeats)]
    return [_Costs(costs) for costs in zip(*rounds, strict=True)]


def _measure_step_cost(lab: Lab, method: _Method) -> StepCost:
    cost = measure_step_cost(
        lab,
        _RUN,
        [*_OPTIONS, *method.options],
        tokens_per_step=_GLOBAL_BATCH * _SEQUENCE_LENGTH,
        steps=method.steps,
        warmup_steps=method.warmup_steps,
    )
    print_progress(f"{method.name}: {cost.seconds:.3g} s and {_format_megabytes(cost.sent_bytes)} per step")
    return cost


def _format_megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB"
