"""The table that `swarmtrain queue status` prints."""

from __future__ import annotations

from test_scheduler import Cluster

from swarmtrain.queueing.queue_service import SchedulerStatus
from swarmtrain.queueing.queue_state import QueueReader
from swarmtrain.view.queue_table import build_queue_table, estimate_queue_starts

STATUS = SchedulerStatus("running", "gpu-0", "registry/queue:1", "0.1.0")


def test_running_and_waiting_runs_in_order_with_reasons_and_estimates() -> None:
    cluster = Cluster()
    cluster.submit("first", nodes=4, time_limit="1h", stop_grace=60)
    cluster.settle()
    cluster.submit("second", nodes=4, time_limit="30m")
    cluster.submit("third", nodes=2)
    cluster.submit("urgent", nodes=3, min_nodes=1, priority="high", preemptible=False)
    cluster.settle(seconds=600)
    state = QueueReader(cluster.swarm).read_state(cluster.now)
    table = build_queue_table(state, STATUS, estimate_queue_starts(state, [], cluster.now), cluster.now)
    assert [(row.run, row.state, row.nodes) for row in table.runs] == [
        ("urgent", "running", 3),
        ("first", "waiting", 0),
        ("second", "waiting", 0),
        ("third", "waiting", 0),
    ]
    lines = [" ".join(line.split()) for line in str(table).splitlines()]
    assert lines[0] == "RUN OWNER CLASS NODES STATE SINCE STARTS IN"
    assert lines[1] == "urgent anna high 3/3 running 0 s gpu-0, gpu-1, gpu-2"
    assert lines[2].startswith("first anna normal 0/4 waiting 0 s unknown 1 of 4 nodes free; allocated to urgent")


def test_without_a_scheduler_nothing_starts() -> None:
    cluster = Cluster()
    cluster.submit("demo")
    state = QueueReader(cluster.swarm).read_state(cluster.now)
    table = build_queue_table(state, None, estimate_queue_starts(state, [], cluster.now), cluster.now)
    lines = [" ".join(line.split()) for line in str(table).splitlines()]
    assert lines[1] == "demo anna normal 0/1 waiting 0 s unknown"
    assert lines[2] == "there is no scheduler: runs that wait stay waiting; start one with: swarmtrain queue up"
    assert table.to_dict()["scheduler"] is None


def test_a_run_whose_predecessor_is_late_starts_soon() -> None:
    cluster = Cluster()
    cluster.submit("first", nodes=4, time_limit="1h", stop_grace=60)
    cluster.settle()
    cluster.submit("second", nodes=4)
    cluster.now += 4000
    state = QueueReader(cluster.swarm).read_state(cluster.now)
    table = build_queue_table(state, STATUS, estimate_queue_starts(state, [], cluster.now), cluster.now)
    assert " ".join(str(table).splitlines()[2].split()).startswith("second anna normal 0/4 waiting 0 s soon")


def test_an_empty_queue() -> None:
    cluster = Cluster()
    state = QueueReader(cluster.swarm).read_state(cluster.now)
    table = build_queue_table(state, STATUS, estimate_queue_starts(state, [], cluster.now), cluster.now)
    assert str(table) == "the scheduler is running on gpu-0 (swarmtrain 0.1.0, registry/queue:1)\nthe queue is empty"
