"""Garbage in what is read back from an engine concerns only the run that has it: the scheduler, the queue and the list of runs go on."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import strategies as st
from randomized import count_examples, run_examples
from test_scheduler import Cluster

from swarmtrain import protocol
from swarmtrain.errors import EngineError, SwarmtrainError
from swarmtrain.launchers.common import engine_values
from swarmtrain.launchers.swarm import cluster_state, deployed_run, task_states
from swarmtrain.launchers.swarm.queue import queue_entry
from swarmtrain.protocol import LABEL_ROLE, LABEL_RUN, LABEL_STACK
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.queue_labels import LABEL_QUEUE_LOST
from swarmtrain.queueing.queue_state import QueueReader
from swarmtrain.view.queue_table import build_queue_table, estimate_queue_starts
from swarmtrain.view.run_table import build_run_table

_NESTED = "[" * 100_000
GARBAGE = ["", "inf", "-inf", "nan", "-1", "1e400", "x", "0x10", "²", "9" * 5000, "../../x", "\x1b[31m", "null", "true", "5", "[]", "{}"]
GARBAGE += [_NESTED, "[1, null]", '{"a": 1}', '{"node0": null, "node1": {"a": []}}', '{"share": 5, "priority": [], "time_limit": "soon"}']
_NAMED_LABELS = {name.lstrip("_"): value for name, value in {**vars(protocol), **vars(queue_entry)}.items() if isinstance(value, str)}
# Without these three, a service is not one of a run.
LABELS = sorted({value for name, value in _NAMED_LABELS.items() if name.startswith("LABEL_")} - {LABEL_RUN, LABEL_ROLE, LABEL_STACK})
VARIABLES = ["SWARMTRAIN_NODE", "SWARMTRAIN_COORDINATOR_PORT", "NVIDIA_VISIBLE_DEVICES", "SWARMTRAIN_MIN_NODES"]
texts = st.one_of(st.sampled_from(GARBAGE), st.text(max_size=30))
labels = st.dictionaries(st.sampled_from(LABELS), texts, min_size=1, max_size=6)
environment = st.lists(st.one_of(texts, st.tuples(st.sampled_from(VARIABLES), texts).map("=".join)), max_size=4)
contents = st.one_of(st.none(), texts.map(lambda text: text.encode(errors="replace")), st.binary(max_size=30))


def spoil_run(cluster: Cluster, run: str, garbage: dict[str, str], env: list[str], content: bytes | None) -> None:
    """Put garbage into the labels and the environment of all services of `run`, and into its config objects."""
    for service in cluster.swarm.objects["services"].values():
        if service["Spec"]["Name"].startswith(f"{run}_"):
            service["Spec"]["Labels"] |= garbage
            container = service["Spec"]["TaskTemplate"]["ContainerSpec"]
            container["Env"] = [*env, *(container.get("Env") or [])]
            container["Labels"] = {**(container.get("Labels") or {}), **garbage}
    for config in cluster.swarm.objects["configs"].values():
        if config["Spec"]["Name"].startswith(f"{run}_"):
            config["Spec"]["Labels"] |= garbage
            if content is not None:
                config["Spec"]["Data"] = base64.b64encode(content).decode()


class EngineWithoutLogs:
    """The swarm in memory, on whose machines no log can be read."""

    def __init__(self, swarm: Any) -> None:
        self.list_objects, self.get, self.address = swarm.list_objects, swarm.get, swarm.address

    def open_log_stream(self, *_: object) -> Any:
        raise EngineError("no logs", status=500)


def read_everything(cluster: Cluster) -> tuple[str, str]:
    """Return what `queue status` and `ps` print."""
    state = QueueReader(cluster.swarm).read_state(cluster.now)
    queue = build_queue_table(state, None, estimate_queue_starts(state, [], cluster.now), cluster.now)
    engine: Any = EngineWithoutLogs(cluster.swarm)
    runs = build_run_table([("swarm", overview) for overview in task_states.read_overviews(engine)], cluster.now)
    cluster_state.list_runs(engine)
    cluster_state.list_terminating_runs(engine)
    json.dumps([queue.to_dict(), runs.to_dict()])
    return str(queue), str(runs)


def check_garbage_of_one_run(is_running: bool, garbage: dict[str, str], env: list[str], content: bytes | None) -> None:  # drawn
    cluster = Cluster(machines=3)
    cluster.submit("bad", nodes=1)
    if is_running:
        cluster.settle(rounds=4)
    spoil_run(cluster, "bad", garbage, env, content)
    cluster.submit("good", nodes=1)
    for _ in range(6):
        cluster.scheduler.run_round()
        cluster.swarm.advance()
    assert cluster.running.get("good") == 1
    queue, runs = read_everything(cluster)
    assert "good" in queue
    assert "good" in runs
    with contextlib.suppress(SwarmtrainError):
        deployed_run.read_deployment(cluster.swarm, cluster_state.list_run_services(cluster.swarm, "bad"), "bad")


def test_garbage_of_one_run_stops_neither_the_scheduler_nor_the_tables() -> None:
    run_examples(check_garbage_of_one_run, st.booleans(), labels, environment, contents, suite="queueing", examples=count_examples(60, 400))


@pytest.mark.parametrize("text", ["inf", "nan", _NESTED, "x"])
def test_a_malformed_label_is_reported_with_its_run_only(text: str) -> None:
    cluster = Cluster()
    for run in ("bad", "good"):
        cluster.submit(run, nodes=1)
    cluster.settle()
    spoil_run(cluster, "bad", {LABEL_QUEUE_LOST: text, protocol.LABEL_SLOTS: text}, [], None)
    cluster.settle(rounds=2)
    for table in read_everything(cluster):
        lines = [line for line in table.splitlines() if "ignored its malformed label swarmtrain.queue.lost" in line]
        assert len(lines) == 1
        assert "ignored its malformed label swarmtrain.slots" in lines[0]
        assert lines[0].startswith("bad")
    assert cluster.running == {"bad": 1, "good": 1}


@pytest.mark.parametrize(("hosts", "content"), [("5", None), ("null", b"garbage")], ids=["label", "config"])
def test_a_running_run_that_cannot_be_planned_keeps_its_machines_and_blocks_nobody(hosts: str, content: bytes | None) -> None:
    cluster = Cluster(machines=4)
    cluster.submit("bad", nodes=2)
    cluster.settle()
    held = cluster.read_entry("bad").machines
    lost = next(node for node in cluster.swarm.nodes if node["ID"] == held["node0"])
    lost["Spec"]["Availability"] = "drain"  # so the scheduler wants to replace the machine
    spoil_run(cluster, "bad", {protocol.LABEL_HOSTS: hosts}, [], content)
    cluster.submit("good", nodes=1)
    cluster.settle()
    assert cluster.running["good"] == 1
    assert cluster.read_entry("bad").machines == held
    queue, _ = read_everything(cluster)  # without the cache of the scheduler
    assert "its deployment cannot be read" in next(line for line in queue.splitlines() if line.startswith("bad"))


def test_parsers_of_engine_values_accept_any_text() -> None:
    def check(text: str) -> None:
        assert abs(engine_values.parse_number(text)) < float("inf")
        assert engine_values.parse_count(text) >= 0
        assert isinstance(engine_values.parse_mapping(text), dict)
        assert all(isinstance(value, str) for value in engine_values.parse_text_mapping(text).values())
        RunIdentity.from_labels(dict.fromkeys(LABELS, text))
        protocol.Event.from_line(f'{{"event": {text}')
        protocol.Event.from_line(f'{{"event": "x", "time": {text}}}')

    run_examples(check, texts, suite="queueing", examples=count_examples(300, 3000))
