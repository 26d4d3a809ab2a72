"""Micro batches assigned by measured speed: the losses do not depend on the assignment, and it follows the speeds."""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import strategies as st
from randomized import count_examples, run_examples
from worlds import (
    LocalWorld,
    compute_deviation,
    list_saved_steps,
    merge_config,
    read_audit,
    read_losses,
    read_manifest,
    read_metric,
    read_samples_by_step,
    read_validation_losses,
    run_training,
)

from swarmtrain import protocol
from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.protocol import EXIT_PLANNED, Event
from swarmtrain.trainer.health.micro_batch_assignment import (
    MicroBatchReassigner,
    assign_by_speed,
    estimate_micro_batch_seconds,
    reassign_by_speed,
)
from swarmtrain.trainer.health.rank_timing import RankTiming

EXAMPLES = 300
THRESHOLD = TopologyConfig.model_fields["micro_batch_reassignment_threshold"].default
NOISE = 0.05
SECONDS = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)
BY_SPEED = {"micro_batch_assignment": "by_speed", "micro_batch_reassignment_interval": 1}


def check_property(check: Callable[..., None], *strategies: st.SearchStrategy[Any]) -> None:
    run_examples(check, *strategies, suite="trainer", examples=count_examples(EXAMPLES))


def compute_step_seconds(seconds: Sequence[float], counts: Sequence[int]) -> float:
    return max(each * count for each, count in zip(seconds, counts, strict=True))


def test_each_micro_batch_is_assigned_once_and_each_replica_has_one() -> None:
    def check(seconds: list[float], extra: int) -> None:
        counts = assign_by_speed(seconds, len(seconds) + extra)
        assert sum(counts) == len(seconds) + extra
        assert min(counts) >= 1

    check_property(check, SECONDS, st.integers(0, 60))


def test_no_other_assignment_gives_a_shorter_step() -> None:
    def check(seconds: list[float], extra: int) -> None:
        best = compute_step_seconds(seconds, assign_by_speed(seconds, len(seconds) + extra))
        # In a shorter step, each replica could complete only so many micro batches:
        possible = sum(max(1, int(best * (1 - 1e-9) / each)) for each in seconds)
        is_bound_by_minimum = best == max(seconds)
        assert possible < len(seconds) + extra or is_bound_by_minimum

    check_property(check, SECONDS, st.integers(1, 60))


def test_equal_speeds_give_the_equal_assignment() -> None:
    def check(replicas: int, extra: int, seconds: float) -> None:
        topology = TopologyConfig(global_batch_size=replicas + extra, micro_batch_size=1)
        assert assign_by_speed([seconds] * replicas, replicas + extra) == topology.assign_micro_batches(replicas)

    check_property(check, st.integers(1, 12), st.integers(0, 60), st.floats(0.01, 10))


def test_a_faster_replica_has_at_least_as_many_micro_batches() -> None:
    def check(seconds: list[float], extra: int) -> None:
        counts = assign_by_speed(seconds, len(seconds) + extra)
        by_speed = [count for _, count in sorted(zip(seconds, counts, strict=True), key=lambda pair: (pair[0], -pair[1]))]
        assert by_speed == sorted(counts, reverse=True)

    check_property(check, SECONDS, st.integers(0, 60))


def test_a_replica_that_becomes_slower_gets_no_more_micro_batches() -> None:
    def check(seconds: list[float], extra: int, factor: float) -> None:
        total = len(seconds) + extra
        before, after = assign_by_speed(seconds, total), assign_by_speed([seconds[0] * factor, *seconds[1:]], total)
        assert after[0] <= before[0]
        assert all(new >= old for new, old in zip(after[1:], before[1:], strict=True))

    check_property(check, SECONDS, st.integers(0, 60), st.floats(1, 20))


def test_noise_of_5_percent_causes_no_reassignment() -> None:
    def check(seconds: list[float], extra: int, seed: int) -> None:
        counts = assign_by_speed(seconds, len(seconds) + extra)
        rng = random.Random(seed)  # noqa: S311  # no secret
        extremes = rng.random() < 0.5
        for _ in range(20):
            noise = [rng.choice([-NOISE, NOISE]) if extremes else rng.uniform(-NOISE, NOISE) for _ in seconds]
            measured = [each * (1 + error) for each, error in zip(seconds, noise, strict=True)]
            assert reassign_by_speed(measured, counts, THRESHOLD) == counts

    check_property(check, SECONDS, st.integers(0, 60), st.integers(0, 2**32))


def test_noise_of_12_percent_can_cause_a_reassignment() -> None:
    """The yardstick for the test above."""
    assert reassign_by_speed([0.88, 1.12], (50, 50), THRESHOLD) == (56, 44)


def test_a_replica_that_was_slow_recovers_its_micro_batches() -> None:
    def check(seconds: list[float], per_replica: int, factor: float) -> None:
        before = assign_by_speed(seconds, per_replica * len(seconds))
        slow = reassign_by_speed([seconds[0] * factor, *seconds[1:]], before, 0.0)
        recovered = reassign_by_speed(seconds, slow, 0.0)
        assert compute_step_seconds(seconds, recovered) == compute_step_seconds(seconds, before)

    check_property(check, SECONDS, st.integers(2, 8), st.floats(1, 20))
    slow = reassign_by_speed([0.2, 0.1, 0.1], (4, 4, 4), THRESHOLD)
    assert slow == (2, 5, 5)
    assert reassign_by_speed([0.1, 0.1, 0.1], slow, THRESHOLD) == (4, 4, 4)


@pytest.mark.parametrize(
    ("total", "counts", "efficiency"), [(6, (3, 2, 1), 0.8), (9, (4, 4, 1), 0.9), (12, (5, 5, 2), 0.96), (15, (6, 6, 3), 1)]
)
def test_the_table_for_one_of_three_machines_at_half_the_speed(total: int, counts: tuple[int, ...], efficiency: float) -> None:
    """The table of docs/how-to/unequal-machines.md."""
    seconds = 1.0, 1.0, 2.0
    assert assign_by_speed(seconds, total) == counts
    possible = total / sum(1 / each for each in seconds)
    assert possible / compute_step_seconds(seconds, counts) == pytest.approx(efficiency)
    assert possible / compute_step_seconds(seconds, [total // 3] * 3) == pytest.approx(0.6)


def build_timing(replica: int, forward: float, micro_batch: float | None, data: float = 0.0) -> RankTiming:
    return RankTiming(
        f"node{replica}",
        stage=0,
        step_seconds=1.0,
        micro_batch_count=2,
        block_count=2,
        block_seconds=0.01,
        data_seconds=data,
        replica=replica,
        forward_seconds=forward,
        micro_batch_seconds=micro_batch,
    )


def test_a_replica_is_as_slow_as_its_slowest_rank_and_loading_counts() -> None:
    timings = [build_timing(0, 0.1, 0.3), build_timing(0, 0.2, 0.5, 0.25), build_timing(1, 0.1, 0.4)]
    assert estimate_micro_batch_seconds(timings, 2) == [0.75, 0.4]


def test_the_backward_pass_of_a_single_micro_batch_is_estimated_from_other_ranks() -> None:
    assert estimate_micro_batch_seconds([build_timing(0, 0.1, 0.4), build_timing(1, 0.2, None)], 2) == [0.4, pytest.approx(0.8)]
    assert estimate_micro_batch_seconds([build_timing(0, 0.1, 0.4), build_timing(1, 0.0, None)], 2) is None, "not measured"


def reassign_at(topology: Mapping[str, Any], counts: tuple[int, ...], *steps: int) -> list[tuple[int, ...]]:
    """Return the assignments after comparisons at `steps`; the last replica is slow and fast by turns."""
    values = {"global_batch_size": sum(counts), "micro_batch_size": 1, **BY_SPEED, **topology}
    reassigner = MicroBatchReassigner(TopologyConfig.model_validate_json(json.dumps(values)))
    assignments = []
    for number, step in enumerate(steps):
        slow = [build_timing(replica, 0.1, 0.3 * (1 + (number % 2 == 0 and replica == len(counts) - 1))) for replica in range(len(counts))]
        counts = reassigner.reassign(slow, counts, step)
        assignments.append(counts)
    return assignments


def test_reassignments_are_at_least_the_interval_apart() -> None:
    assert reassign_at({}, (5, 5), 8, 16, 24) == [(7, 3), (5, 5), (7, 3)]
    assert reassign_at({"micro_batch_reassignment_interval": 16}, (5, 5), 8, 16, 24) == [(7, 3), (7, 3), (7, 3)]
    assert reassign_at({"micro_batch_reassignment_interval": 16}, (5, 5), 8, 16, 24, 32) == [(7, 3), (7, 3), (7, 3), (5, 5)]


def test_a_world_with_fewer_than_two_micro_batches_per_replica_keeps_the_equal_assignment() -> None:
    assert reassign_at({}, (2, 2, 1), 8, 16) == [(2, 2, 1)] * 2
    assert reassign_at({}, (2, 2, 2), 8) != [(2, 2, 2)]


def test_without_the_option_nothing_is_reassigned() -> None:
    assert reassign_at({"micro_batch_assignment": "equal"}, (5, 5), 8, 16) == [(5, 5)] * 2


@pytest.fixture(scope="module")
def config(config: dict[str, Any]) -> dict[str, Any]:
    """Six micro batches per step."""
    return merge_config(config, trainer={"train_iterations": 30, "eval_interval": 10})


def run_forced(folder: Path, config: Mapping[str, Any], size: int, *assignments: Sequence[int]) -> dict[int, float]:
    """Train to the end with these numbers of micro batches per replica, in turns, and return the loss of every step."""
    world = LocalWorld(folder, config, size, {"ASSIGNMENTS": json.dumps(assignments)}, script="forced_assignment")
    assert world.wait() == [0] * size, world.read_log()
    return read_losses(folder)


def count_samples(folder: Path) -> set[tuple[int, ...]]:
    """Return the distinct numbers of samples per rank in one step, of all steps."""
    counts: dict[int, list[int]] = defaultdict(list)
    for line in read_audit(folder):
        counts[line["step"]].append(len(line["samples"]))
    return {tuple(each) for each in counts.values()}


ALL_ASSIGNMENTS = [(2, 2, 2), (4, 1, 1), (1, 2, 3), (1, 1, 4)]


def test_unequal_and_changing_assignments_are_equal_ones_bit_for_bit(tmp_path: Path, config: dict[str, Any]) -> None:
    base = merge_config(config, transformer_architecture={"dropout_attention_probs": 0.1, "dropout_after_mlp": 0.1})
    equal = run_training(tmp_path / "equal", base, 3)
    assert run_forced(tmp_path / "changing", base, 3, *ALL_ASSIGNMENTS) == equal
    assert count_samples(tmp_path / "changing") == {tuple(2 * count for count in each) for each in ALL_ASSIGNMENTS}
    assert read_validation_losses(tmp_path / "changing") == read_validation_losses(tmp_path / "equal")
    assert read_samples_by_step(tmp_path / "changing") == read_samples_by_step(tmp_path / "equal")
    # The files hold parameters and optimizer state: equal hashes mean equal bits.
    assert read_manifest(tmp_path / "changing", 30)["files"] == read_manifest(tmp_path / "equal", 30)["files"]
    assert run_training(tmp_path / "one", base) == equal


@pytest.mark.parametrize("parallelism", ["model_parallel_size", "context_parallel_size"])
def test_replicas_of_several_ranks_can_have_unequal_assignments(tmp_path: Path, config: dict[str, Any], parallelism: str) -> None:
    base = merge_config(config, topology={parallelism: 2}, trainer={"train_iterations": 12})
    equal = run_training(tmp_path / "equal", base, 4)
    assert run_forced(tmp_path / "changing", base, 4, (3, 3), (5, 1), (2, 4)) == equal


def test_in_bfloat16_an_unequal_assignment_is_an_equal_one_within_1_percent(tmp_path: Path, config: dict[str, Any]) -> None:
    base = merge_config(config, transformer_architecture={"precision": "bfloat16"})
    equal = run_training(tmp_path / "equal", base, 3)
    assert compute_deviation(equal, run_forced(tmp_path / "changing", base, 3, *ALL_ASSIGNMENTS)) < 0.01


def test_a_run_whose_assignment_changes_resumes_in_a_world_of_another_size(tmp_path: Path, config: dict[str, Any]) -> None:
    long = merge_config(config, trainer={"train_iterations": 60})
    undisturbed = run_training(tmp_path / "undisturbed", long, 2)
    environment = {"ASSIGNMENTS": json.dumps(ALL_ASSIGNMENTS)}
    world = LocalWorld(tmp_path / "resumed", long, 3, environment, script="forced_assignment")
    world.wait_until(lambda: len(read_audit(tmp_path / "resumed")) > 15 * 3)
    world.send_signal(1, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 3, world.read_log()
    assert 15 <= list_saved_steps(tmp_path / "resumed")[-1] < 60
    assert run_forced(tmp_path / "resumed", long, 2, (5, 1), (3, 3), (1, 5)) == undisturbed
    assert read_samples_by_step(tmp_path / "resumed") == read_samples_by_step(tmp_path / "undisturbed")


def set_seconds(folder: Path, *seconds: float) -> None:
    """Let the forward pass of each micro batch on rank N take seconds[N]."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, each in enumerate(seconds):
        (folder / f"seconds-{rank}.new").write_text(str(each))
        (folder / f"seconds-{rank}.new").rename(folder / f"seconds-{rank}")


@pytest.mark.test_all_only("measures speeds; the gate has the assignments and their losses")
def test_the_assignment_follows_a_rank_that_becomes_slow_and_recovers(
    tmp_path: Path, config: dict[str, Any], coordinator_address: str, published_events: list[Event]
) -> None:
    def list_reported_counts() -> list[list[int]]:
        """Return the numbers of micro batches of both replicas that progress events have reported."""
        return [event.data["micro_batches"]["node7"] for event in published_events if event.kind == protocol.EVENT_PROGRESS]

    def is_assigned(least: int, most: int) -> bool:
        """Return whether rank 1 has processed at least `least` and at most `most` micro batches in its last step, and this is reported."""
        samples = [len(line["samples"]) for line in read_audit(tmp_path) if line["rank"] == 1]
        reported = list_reported_counts()
        return bool(samples and reported) and least <= samples[-1] / 2 <= most and least <= reported[-1][1] <= most

    endless = merge_config(config, topology=BY_SPEED, trainer={"train_iterations": 1_000_000, "eval_interval": None})
    endless["topology"] |= {"global_batch_size": 24}
    environment = {"SWARMTRAIN_COORDINATOR": coordinator_address, "SWARMTRAIN_NODE": "node7"}
    set_seconds(tmp_path, 0.03, 0.03)
    world = LocalWorld(tmp_path, endless, 2, environment, script="slow_replicas")
    world.wait_until(lambda: is_assigned(6, 6))
    set_seconds(tmp_path, 0.03, 0.09)
    world.wait_until(lambda: is_assigned(1, 4))
    set_seconds(tmp_path, 0.03, 0.03)
    world.wait_until(lambda: is_assigned(6, 6))
    world.send_signal(0, signal.SIGTERM)
    world.wait()
    assert "micro batches by speed: node7 " in world.read_log()
    ids = [sample for step in read_samples_by_step(tmp_path).values() for sample in step]
    assert len(ids) == 24 * len(read_samples_by_step(tmp_path))
    losses = read_losses(tmp_path)
    equal = merge_config(endless, topology={"micro_batch_assignment": "equal"}, trainer={"train_iterations": len(losses)})
    assert run_training(tmp_path / "equal", equal, 2) == losses


@pytest.mark.test_all_only("measures speeds for half a minute; the gate has the assignments and their losses")
def test_three_ranks_of_which_one_has_half_the_speed_reach_93_percent_of_the_sum_of_their_speeds(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    """The micro batches sleep, so that the speeds hardly depend on the load of this machine. The first four steps have equal numbers."""
    seconds = 0.3, 0.3, 0.6
    topology = {**BY_SPEED, "global_batch_size": 30}
    set_seconds(tmp_path, *seconds)
    short = merge_config(config, topology=topology, trainer={"train_iterations": 9, "eval_interval": None, "eval_iterations": 1})
    world = LocalWorld(tmp_path, short, 3, script="slow_replicas")
    assert world.wait() == [0] * 3, world.read_log()
    counts = {line["step"]: len(line["samples"]) // 2 for line in read_audit(tmp_path) if line["rank"] == 2}
    assert [counts[step] for step in range(1, 10)] == [5] * 4 + [3] * 5
    steps, possible = read_metric(tmp_path, "step_seconds"), 15 / sum(1 / each for each in seconds)
    equal, by_speed = ([possible / steps[step] for step in numbers] for numbers in (range(2, 5), range(6, 10)))
    print(f"of the sum of the speeds, by the median step: by speed {median(by_speed):.3f}, equal {median(equal):.3f}")
    assert max(equal) < 0.61
    assert max(by_speed) > 0.93, "of the fastest step: the load of this machine makes others longer"
