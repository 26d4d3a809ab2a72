"""Benchmark of nodes of different speed: tokens per second of three nodes, one of which has half the speed, against their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.lab_runs import measure_step_cost
from benchmarks.lab_startup import run_lab
from benchmarks.measurement import BenchmarkRow, Sample, print_progress, wait_until
from benchmarks.run_startup import provide_image
from swarmtrain import process
from swarmtrain.lab import Lab

_REPEATS, _RUN = 3, "unequal"
_CORES, _SLOW_CORES = 0.5, 0.25
_SEQUENCE_LENGTH, _MICRO_BATCH = 128, 4
_MICRO_BATCHES, _MICRO_BATCHES_ALONE = 150, 12
"""A step takes some seconds. Linux stops a process that has used its CPU quota until the next tenth of a second, and others wait for it."""
_STEPS, _STEPS_ALONE = 12, 6
_WARMUP_STEPS_ALONE = 2


@dataclass(frozen=True)
class _Assignment:
    """A way of assigning micro batches. `goal`: least ratio of its tokens per second to the sum of the nodes."""

    options: Sequence[str]
    warmup_steps: int
    goal: float | None


_ASSIGNMENTS = {
    "equal": _Assignment([], 2, None),
    # Ranks compare their speed after eight steps for the first time.
    "by-speed": _Assignment(["topology.micro_batch_assignment=by_speed"], 10, 0.93),
}


def measure_unequal_nodes() -> Iterator[BenchmarkRow]:
    """Measure tokens per second of each assignment of micro batches. The speed of a node is that of a run on it alone."""
    with run_lab(3) as lab:
        provide_image(lab)
        rounds = []
        for _ in range(_REPEATS):
            fast, slow = (_measure_node_alone(lab, cores) for cores in (_CORES, _SLOW_CORES))
            rounds.append([2 * fast + slow, *(_measure_three_nodes(lab, assignment) for assignment in _ASSIGNMENTS.values())])
        total, *samples = [Sample.from_values(values) for values in zip(*rounds, strict=True)]
        for (name, assignment), sample in zip(_ASSIGNMENTS.items(), samples, strict=True):
            yield BenchmarkRow(
                f"unequal/{name}",
                f"three nodes, one of which has half the speed, micro_batch_assignment: {name.replace('-', '_')}",
                "tokens/s",
                sample,
                total,
                "the sum of the three nodes' own speeds",
                goal=assignment.goal,
                note=f"{_MICRO_BATCHES} micro batches per step",
            )


def _measure_node_alone(lab: Lab, cores: float) -> float:
    """Return the tokens per second of a node with `cores` cores that trains alone."""
    options = ["runner.nodes=1", "runner.min_nodes=1", f"runner.docker_config.cpus={cores}"]
    return _measure_tokens_per_second(lab, options, micro_batches=_MICRO_BATCHES_ALONE, steps=_STEPS_ALONE, warmup=_WARMUP_STEPS_ALONE)


def _measure_three_nodes(lab: Lab, assignment: _Assignment) -> float:
    """Return the tokens per second of all nodes, after the container of the last one has lost half of its cores."""
    options = ["runner.nodes=3", "runner.min_nodes=3", f"runner.docker_config.cpus={_CORES}", *assignment.options]
    return _measure_tokens_per_second(
        lab, options, micro_batches=_MICRO_BATCHES, steps=_STEPS, warmup=assignment.warmup_steps, slows_node=True
    )


def _measure_tokens_per_second(
    lab: Lab, options: Sequence[str], *, micro_batches: int, steps: int, warmup: int, slows_node: bool = False
) -> float:
    tokens_per_step = micro_batches * _MICRO_BATCH * _SEQUENCE_LENGTH
    sizes = [f"topology.micro_batch_size={_MICRO_BATCH}", f"topology.global_batch_size={micro_batches * _MICRO_BATCH}"]
    seconds = measure_step_cost(
        lab,
        _RUN,
        [*options, *sizes, f"transformer_architecture.sequence_length={_SEQUENCE_LENGTH}"],
        tokens_per_step=tokens_per_step,
        steps=steps,
        warmup_steps=warmup,
        while_training=(lambda: _limit_cores(lab, "node2", _SLOW_CORES)) if slows_node else None,
    ).seconds
    print_progress(f"{' '.join(options)}: {tokens_per_step / seconds:,.0f} tokens/s")
    return tokens_per_step / seconds


def _limit_cores(lab: Lab, node: str, cores: float) -> None:
    """Limit the run's container on `node` to `cores` cores, as soon as it has started."""
    docker = ["docker", "-H", lab.get_docker_host(node)]

    def find_containers() -> list[str]:
        return process.run_command([*docker, "ps", "--quiet", "--filter", f"name={_RUN}_"]).split()

    wait_until(lambda: bool(find_containers()), f"the run has no container on {node}")
    process.run_command([*docker, "update", "--cpus", str(cores), *find_containers()])
