"""Stragglers, for which the other ranks wait: found if there is one, and not reported if there is none."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coordinator_thread import serve_coordinator
from worlds import CONTEXT, LocalWorld, merge_config, read_metric

from swarmtrain import protocol
from swarmtrain.protocol import Event
from swarmtrain.trainer.health.rank_timing import RankTiming
from swarmtrain.trainer.health.stragglers import CONSECUTIVE_COMPARISONS, Straggler, StragglerDetector, StragglerReport, find_slow_ranks

EVEN_RANKS = [
    RankTiming(f"node{rank // 2}", stage=0, step_seconds=1.0, micro_batch_count=2, block_count=10, block_seconds=0.015, data_seconds=0.001)
    for rank in range(8)
]
SLOWEST_RANK = Straggler(3, "node1", 0.3, "compute")


def change_rank(rank: int, **values: Any) -> list[RankTiming]:
    return [replace(work, **values) if each == rank else work for each, work in enumerate(EVEN_RANKS)]


def test_of_ranks_that_are_alike_none_is_the_slowest() -> None:
    assert not find_slow_ranks(EVEN_RANKS)
    assert not find_slow_ranks(EVEN_RANKS[:1])


def test_a_step_is_longer_by_what_one_rank_does_beyond_the_median() -> None:
    (found,) = find_slow_ranks(change_rank(3, block_seconds=0.018))  # 2 micro batches x 10 blocks x 3 x 3 ms = 180 ms of a second
    assert found == Straggler(3, "node1", pytest.approx(0.18 / max(0.82, 0.902)), "compute")
    (found,) = find_slow_ranks(change_rank(6, data_seconds=0.101))
    assert found == Straggler(6, "node3", pytest.approx(0.2 / 0.902), "data")


def test_a_rank_that_was_assigned_less_makes_no_other_wait() -> None:
    assert not find_slow_ranks(change_rank(3, block_seconds=0.025, micro_batch_count=1))
    assert not find_slow_ranks(change_rank(3, micro_batch_count=0, block_seconds=0.0))


def test_of_two_ranks_the_slower_one_is_slow_by_all_of_the_difference() -> None:
    (found,) = find_slow_ranks([EVEN_RANKS[0], replace(EVEN_RANKS[2], data_seconds=0.201)])
    assert (found.rank, found.slowdown) == (1, pytest.approx(0.4 / 0.902))


def test_the_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    staged = [replace(work, stage=rank // 4, block_seconds=0.015 * (1 + rank // 4)) for rank, work in enumerate(EVEN_RANKS)]
    assert not find_slow_ranks(staged)
    assert [each.rank for each in find_slow_ranks([*staged[:5], replace(staged[5], block_seconds=0.04), *staged[6:]])] == [5]
    assert not find_slow_ranks([EVEN_RANKS[0], replace(EVEN_RANKS[1], stage=1, block_seconds=0.1)])


def judge_all(*measurements: tuple[Straggler, ...]) -> list[StragglerReport]:
    judge = StragglerDetector()
    return [report for each in measurements if (report := judge.add_comparison(each))]


def test_it_is_reported_once_and_again_when_it_changes() -> None:
    slow, other = (SLOWEST_RANK,), (replace(SLOWEST_RANK, phase="data", slowdown=0.5),)
    assert not judge_all(*[slow] * (CONSECUTIVE_COMPARISONS - 1), (), *[slow] * (CONSECUTIVE_COMPARISONS - 1))
    assert not judge_all(*[(replace(SLOWEST_RANK, slowdown=0.19),)] * 50)
    assert not judge_all(*[slow, (replace(SLOWEST_RANK, rank=2),)] * 50), "by turns, so that it is chance"
    judgements = judge_all(*[slow] * 50, *[other] * 50, *[()] * 50, *[slow] * 50)
    assert [(each.straggler, each.message) for each in judgements] == [
        (SLOWEST_RANK, "rank 3 on node1: other ranks wait, a step takes 30% longer, since computation is slower there"),
        (*other, "rank 3 on node1: other ranks wait, a step takes 50% longer, since data loading is slower there"),
        (None, "node1 is no longer a straggler"),
        (SLOWEST_RANK, "rank 3 on node1: other ranks wait, a step takes 30% longer, since computation is slower there"),
    ]
    (node,) = judge_all(*[(SLOWEST_RANK, replace(SLOWEST_RANK, rank=2), replace(SLOWEST_RANK, rank=4, node="node2", slowdown=0.25))] * 50)
    assert node.message.startswith("ranks 2, 3 on node1: "), "once, and not of both nodes by turns"


def test_ranks_that_are_slow_by_chance_are_not_stragglers() -> None:
    """One day of comparisons of eight ranks, each of which is 30 % slower now and then."""
    judge, chance = StragglerDetector(), np.random.default_rng(1).choice([1.0, 1.0, 1.0, 1.3], (24 * 360, len(EVEN_RANKS)))
    for factors in chance.tolist():
        works = [replace(work, block_seconds=work.block_seconds * factor) for work, factor in zip(EVEN_RANKS, factors, strict=True)]
        assert judge.add_comparison(find_slow_ranks(works)) is None


def _burn_cpu() -> None:
    while True:
        pass


@contextmanager
def cpu_load() -> Iterator[None]:
    """Load every core of a small machine with other work during the body."""
    processes = [CONTEXT.Process(target=_burn_cpu, daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def published_events() -> list[Event]:
    return []


@pytest.fixture
def coordinator_address(published_events: list[Event]) -> Iterator[str]:
    with serve_coordinator(events=published_events) as served:
        yield served.address


@pytest.mark.test_all_only("measures for 10 s and more which rank is slow")
def test_ranks_that_load_or_compute_more_slowly_are_named_and_even_ones_under_load_are_not(
    tmp_path: Path, config: dict[str, Any], coordinator_address: str, published_events: list[Event]
) -> None:
    def list_stragglers() -> list[dict[str, Any]]:
        return [event.data for event in published_events if event.kind == protocol.EVENT_STRAGGLER]

    def read_slowdowns() -> dict[int, float]:
        """Return by how much the slowest rank slowed the others down, by the step of each comparison."""
        return read_metric(tmp_path, "slowest_rank_slowdown")

    endless = merge_config(config, trainer={"train_iterations": 1_000_000, "eval_interval": None}, logger={"audit_dir": None})
    world = LocalWorld(
        tmp_path, endless, 3, {"SWARMTRAIN_COORDINATOR": coordinator_address, "SWARMTRAIN_NODE": "node7"}, script="slow_ranks"
    )
    with cpu_load():
        world.wait_until(lambda: len(read_slowdowns()) >= 8)
    assert not list_stragglers(), read_slowdowns()
    (tmp_path / "slow-data").touch()
    world.wait_until(list_stragglers)
    assert {key: list_stragglers()[0][key] for key in ("rank", "node", "phase")} == {"rank": 1, "node": "node7", "phase": "data"}
    last_comparison = max(read_slowdowns())
    assert read_metric(tmp_path, "slowest_rank")[last_comparison] == 1
    (tmp_path / "slow-data").rename(tmp_path / "slow-compute")
    world.wait_until(lambda: len(list_stragglers()) > 1)
    assert {key: list_stragglers()[1][key] for key in ("rank", "phase")} == {"rank": 2, "phase": "compute"}
    world.send_signal(0, signal.SIGTERM)
    world.wait()
    assert "rank 1 on node7: other ranks wait, a step takes " in world.read_log()
    assert len(list_stragglers()) == 2
