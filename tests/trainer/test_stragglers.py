"""Which rank the others wait for: found where there is one, and nothing said where there is none."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import CONTEXT, World, changed

from swarmtrain import wire
from swarmtrain.entrypoint.notices import Notices
from swarmtrain.entrypoint.rendezvous import BoardServer
from swarmtrain.trainer.metrics.pace import Work
from swarmtrain.trainer.metrics.stragglers import IN_A_ROW, Report, Slowest, Stragglers, slower
from swarmtrain.wire import Event

EVEN = [Work(f"node{rank // 2}", stage=0, step=1.0, passes=2, blocks=10, block=0.015, data=0.001) for rank in range(8)]
SLOW = Slowest(3, "node1", 0.3, "compute")


def with_rank(rank: int, **values: Any) -> list[Work]:
    return [replace(work, **values) if each == rank else work for each, work in enumerate(EVEN)]


def test_of_ranks_that_are_alike_none_is_the_slowest() -> None:
    assert not slower(EVEN)
    assert not slower(EVEN[:1])


def test_a_step_is_longer_by_what_one_rank_does_beyond_the_median() -> None:
    (found,) = slower(with_rank(3, block=0.018))  # 2 passes of 10 blocks, three times 3 ms: 180 ms of a second
    assert found == Slowest(3, "node1", pytest.approx(0.18 / max(0.82, 0.902)), "compute")
    (found,) = slower(with_rank(6, data=0.101))
    assert found == Slowest(6, "node3", pytest.approx(0.2 / 0.902), "data")


def test_who_was_dealt_less_makes_nobody_wait() -> None:
    assert not slower(with_rank(3, block=0.025, passes=1))
    assert not slower(with_rank(3, passes=0, block=0.0))


def test_of_two_ranks_the_slower_one_is_slow_by_all_of_the_difference() -> None:
    (found,) = slower([EVEN[0], replace(EVEN[2], data=0.201)])
    assert (found.rank, found.by) == (1, pytest.approx(0.4 / 0.902))


def test_the_stages_of_a_pipeline_are_no_match_for_each_other() -> None:
    staged = [replace(work, stage=rank // 4, block=0.015 * (1 + rank // 4)) for rank, work in enumerate(EVEN)]
    assert not slower(staged)
    assert [each.rank for each in slower([*staged[:5], replace(staged[5], block=0.04), *staged[6:]])] == [5]
    assert not slower([EVEN[0], replace(EVEN[1], stage=1, block=0.1)])


def judged(*found: tuple[Slowest, ...]) -> list[Report]:
    judge = Stragglers()
    return [told for each in found if (told := judge.judge(each))]


def test_it_is_told_once_and_again_when_it_changes() -> None:
    slow, other = (SLOW,), (replace(SLOW, part="data", by=0.5),)
    assert not judged(*[slow] * (IN_A_ROW - 1), (), *[slow] * (IN_A_ROW - 1))
    assert not judged(*[(replace(SLOW, by=0.19),)] * 50)
    assert not judged(*[slow, (replace(SLOW, rank=2),)] * 50), "by turns, so that it is chance"
    told = judged(*[slow] * 50, *[other] * 50, *[()] * 50, *[slow] * 50)
    assert [(each.slowest, each.message) for each in told] == [
        (SLOW, "rank 3 on node1: the others wait, a step takes 30% longer, since computing is slower there"),
        (*other, "rank 3 on node1: the others wait, a step takes 50% longer, since data is slow to come there"),
        (None, "node1 keeps up with the others again"),
        (SLOW, "rank 3 on node1: the others wait, a step takes 30% longer, since computing is slower there"),
    ]
    (node,) = judged(*[(SLOW, replace(SLOW, rank=2), replace(SLOW, rank=4, node="node2", by=0.25))] * 50)
    assert node.message.startswith("ranks 2, 3 on node1: "), "once, and not of both nodes by turns"


def test_ranks_that_are_slow_by_chance_are_no_stragglers() -> None:
    """A day's comparisons of eight ranks, each of which is slower than it should be by 30 % every now and then."""
    judge, chance = Stragglers(), np.random.default_rng(1).choice([1.0, 1.0, 1.0, 1.3], (24 * 360, len(EVEN)))
    for factors in chance.tolist():
        works = [replace(work, block=work.block * factor) for work, factor in zip(EVEN, factors, strict=True)]
        assert judge.judge(slower(works)) is None


def _burn() -> None:
    while True:
        pass


@contextmanager
def load() -> Iterator[None]:
    """Other work for every core of a small machine, in the body."""
    burning = [CONTEXT.Process(target=_burn, daemon=True) for _ in range(2)]
    for process in burning:
        process.start()
    yield
    for process in burning:
        process.kill()
        process.join()


@pytest.fixture
def published() -> list[Event]:
    return []


@pytest.fixture
def board(published: list[Event]) -> Iterator[str]:
    limits = {"max_restarts": 3, "max_restarts_per_hour": 20, "min_nodes": 1}
    notices = Notices(run="test", **limits, boot="b", now=time.monotonic, publish=published.append)
    with BoardServer(("127.0.0.1", 0), notices) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.test_all_only("measures for 10 s and more which rank is slow")
def test_ranks_that_load_or_compute_more_slowly_are_named_and_even_ones_under_load_are_not(
    tmp_path: Path, config: dict[str, Any], board: str, published: list[Event]
) -> None:
    def told() -> list[dict[str, Any]]:
        return [event.data for event in published if event.kind == wire.STRAGGLER]

    def compared() -> list[dict[str, Any]]:
        path = tmp_path / "run" / "metrics.jsonl"
        return [line for line in map(json.loads, path.read_text().splitlines() if path.exists() else []) if "slowest_by" in line]

    endless = changed(config, trainer={"train_iterations": 1_000_000, "eval_interval": None}, logger={"audit_dir": None})
    world = World(tmp_path, endless, 3, {"SWARMTRAIN_BOARD": board, "SWARMTRAIN_NODE": "node7"}, script="uneven")
    with load():
        world.until(lambda: len(compared()) >= 8)
    assert not told(), compared()
    (tmp_path / "slow-data").touch()
    world.until(told)
    assert {key: told()[0][key] for key in ("rank", "node", "part")} == {"rank": 1, "node": "node7", "part": "data"}
    assert compared()[-1]["slowest_rank"] == 1
    (tmp_path / "slow-data").rename(tmp_path / "slow-compute")
    world.until(lambda: len(told()) > 1)
    assert {key: told()[1][key] for key in ("rank", "part")} == {"rank": 2, "part": "compute"}
    world.send(0, signal.SIGTERM)
    world.wait()
    assert "rank 1 on node7: the others wait, a step takes " in world.log()
    assert len(told()) == 2
