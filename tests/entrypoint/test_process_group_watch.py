"""A process group that does not form: the built-in trainer fails with a reason, other scripts only report which ranks wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coordinator_thread import ServedCoordinator, serve_coordinator

from swarmtrain.entrypoint.coordinator.world_tracker import ConnectingRanks
from swarmtrain.protocol import EVENT_FAILURE, EVENT_RANKS_CONNECTING, ConnectingRank, NodeEnv

ROOT = Path(__file__).parents[2]
# The watch of a rank with short times, and then the body.
RANK = """
import os
from swarmtrain.entrypoint.supervisor.process_group_watch import ProcessGroupWatch
from swarmtrain.protocol import NodeEnv
ProcessGroupWatch(NodeEnv.from_env(os.environ), poll_seconds=0.2, deadline_seconds=2.0).start()
{body}
"""
TRAINER = """
from swarmtrain.trainer import runtime
from types import SimpleNamespace
import torch
rank = int(os.environ["RANK"])
runtime._init_process_group(
    SimpleNamespace(device=torch.device("cpu"), rank=rank, world_size=2, is_rank_zero=rank == 0), monitors_peers=False
)
"""
SCRIPT = "import torch.distributed as dist; dist.init_process_group('gloo')"


@pytest.fixture
def served() -> Iterator[ServedCoordinator]:
    with serve_coordinator() as served:
        yield served


@contextmanager
def start_ranks(served: ServedCoordinator, folder: Path, bodies: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a rank for each of `bodies`. Nobody listens at the address of rank 0 unless a rank does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank, body in enumerate(bodies):
        env = NodeEnv("r", f"node{rank}", 1, 2, 2, served.address, "", "", "", (), {}, 5.0, str(folder), (), "", "")
        ranks = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        world = {"SWARMTRAIN_WORLD": "b-1/1", "SWARMTRAIN_RANK_STORE": f"127.0.0.1:{port}"}
        variables = {**os.environ, **env.to_env(), **{name: str(value) for name, value in ranks.items()}, **world}
        argv = [sys.executable, "-c", RANK.format(body=body)]
        processes.append(subprocess.Popen(argv, env=variables, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_for_ranks(served: ServedCoordinator, ranks: dict[str, list[int]], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not any(event.data["ranks"] == ranks for event in served.list_events(EVENT_RANKS_CONNECTING)):
        assert time.monotonic() < end, served.events
        time.sleep(0.1)


# Both ranks are clients, as if the address of rank 0 were that of another machine: none serves the store.
NO_SERVER = TRAINER.replace("is_rank_zero=rank == 0", "is_rank_zero=False")


def test_trainer_whose_process_group_does_not_form_fails_with_the_address(served: ServedCoordinator, tmp_path: Path) -> None:
    with start_ranks(served, tmp_path, [NO_SERVER, NO_SERVER]) as processes:
        assert [process.wait(60) for process in processes] == [1, 1]
    failure = served.list_events(EVENT_FAILURE)[0].data
    assert failure["error"].startswith(
        "the process group did not form within 2 s after all 2 ranks had started to connect to rank 0 at 127"
    )
    assert failure["world"] == "b-1/1"


def test_trainer_waits_for_a_rank_that_has_not_arrived(served: ServedCoordinator, tmp_path: Path) -> None:
    late = "import time; time.sleep(8)\n" + TRAINER
    with start_ranks(served, tmp_path, [TRAINER, late]) as processes:
        wait_for_ranks(served, {"node0": [0]})
        assert [process.wait(60) for process in processes] == [0, 0]
    assert served.list_events(EVENT_FAILURE) == []


def test_ranks_of_another_script_wait_and_are_named(served: ServedCoordinator, tmp_path: Path) -> None:
    waiting = SCRIPT.replace("'gloo'", "'gloo', init_method='tcp://127.0.0.1:1', rank=1, world_size=2")
    with start_ranks(served, tmp_path, [waiting, waiting]) as processes:
        wait_for_ranks(served, {"node0": [0], "node1": [1]})
        time.sleep(4)
        assert [process.poll() for process in processes] == [None, None]
    assert served.list_events(EVENT_FAILURE) == []


def test_a_world_is_published_when_its_waiting_ranks_change_and_at_most_every_ten_seconds() -> None:
    now = 0.0
    ranks = ConnectingRanks(lambda: now)
    reports = [ConnectingRank("w", 2, rank, f"node{rank}", "a:1", waits=True) for rank in range(2)]
    assert ranks.take_event() is None
    assert ranks.record_rank(reports[0]).waiting_ranks == 1
    event = ranks.take_event()
    assert event
    assert event.data == {"world": "w", "world_size": 2, "address": "a:1", "ranks": {"node0": [0]}}
    now = 5.0
    ranks.record_rank(reports[1])
    assert ranks.take_event() is None
    now = 12.0
    assert ranks.record_rank(reports[0]).seconds_since_last_arrival == 7.0
    event = ranks.take_event()
    assert event
    assert event.data["ranks"] == {"node0": [0], "node1": [1]}
    now = 40.0
    for rank in reports:
        ranks.record_rank(ConnectingRank(rank.world, 2, rank.rank, rank.node, rank.address, waits=False))
    event = ranks.take_event()
    assert event
    assert event.data["ranks"] == {}
    assert ranks.record_rank(ConnectingRank("next", 2, 0, "node0", "a:1", waits=True)).waiting_ranks == 1
