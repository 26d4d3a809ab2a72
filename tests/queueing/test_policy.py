"""The policy of a queue: invalid ones are refused with their lines, and requests that it or the machines never allow, at once."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from fake_swarm import FakeSwarm

from swarmtrain import __version__
from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.loader import parse_section
from swarmtrain.config.schema.queue_policy import QueuePolicy
from swarmtrain.errors import ConfigError
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.queue import policy_store
from swarmtrain.planning.plan import build_plan
from swarmtrain.protocol.run_identity import OWNER_VARIABLE
from swarmtrain.queueing import request_checks
from swarmtrain.queueing.queue_changes import load_policy_text


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("classes: {a: 1}\ndefault_class: b\n", 2, "'b' is not in classes; the classes are a"),
        ("classes:\n  a: 1\n  b: high\ndefault_class: a\n", 3, "must be a valid integer"),
        ("classes:\n  a: 1\n  Up: 2\ndefault_class: a\n", 3, "should match pattern"),
        ("clases: {a: 1}\n", 1, "unknown key; did you mean classes?"),
        ("limits:\n  anna:\n    gpu: 3\n", 3, "unknown key"),
        ("limits:\n  anna: {gpus: -1}\n", 2, "must be greater than or equal to 0"),
        ("[]\n", 1, "must be a mapping of keys such as classes and default_class"),
        ("", None, "is empty"),
    ],
)
def test_an_invalid_policy_is_refused_with_its_line(text: str, line: int | None, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_section(text, QueuePolicy, source="policy.yml")
    problem = raised.value.problems[0]
    assert problem.line == line
    assert message in problem.message


def test_the_default_policy_is_printed_as_a_file_that_is_accepted() -> None:
    text = load_policy_text(cast("Any", FakeSwarm(1)))
    assert parse_section(text, QueuePolicy) == policy_store.DEFAULT_POLICY


def test_a_policy_is_stored_with_its_comments_and_replaces_the_earlier_one() -> None:
    swarm: Any = FakeSwarm(1)
    assert policy_store.read_policy(swarm) == policy_store.DEFAULT_POLICY
    for text in ("classes: {a: 1}\ndefault_class: a  # ours\n", "classes: {b: 1}\ndefault_class: b\n"):
        for _ in range(2):
            policy_store.store_policy(swarm, text, source="policy.yml")
        assert policy_store.read_policy_text(swarm) == text
        assert len(swarm.list_objects("/configs")) == 1
    assert policy_store.read_policy(swarm).classes == {"b": 1}


def check(cluster: Any, **runner: Any) -> list[str]:
    """Return the problems of a run in the queue, each with its hint."""
    config = Config.model_validate_json(json.dumps({"runner": runner}))
    plan = build_plan(config, cluster_state.read_inventory(cluster), Cargo(()), run="demo")
    findings = request_checks.collect_findings(cluster, plan)
    return [f"{finding.place}: {finding.message} ({finding.hint})" for finding in findings]


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    assert check(FakeSwarm(1), priority="top") == [
        "config runner.priority: the queue has no class 'top'; its classes: high, normal, low (None)"
    ]


@pytest.mark.parametrize(
    ("runner", "problem"),
    [
        (
            {"hosts": ["gpu-0 slots=3", "gpu-1 slots=3"], "swarm": {"gpu": "reserve"}},
            "config runner.min_nodes: 2 nodes with 3 NVIDIA-GPU, 8 cores each never fit: 0 machines have that "
            "(the largest requests that fit: 2 nodes with 2 NVIDIA-GPU each)",
        ),
        (
            {"hosts": ["gpu-0 slots=3", "gpu-1 slots=2"], "swarm": {"gpu": "reserve"}},
            "config runner.min_nodes: 2 nodes with 3 NVIDIA-GPU, 8 cores each never fit: 1 machine has that "
            "(the largest requests that fit: runner.min_nodes: 1 or 2 nodes with 2 NVIDIA-GPU each)",
        ),
    ],
)
def test_a_request_that_never_fits_is_refused_with_the_largest_that_would(runner: dict[str, Any], problem: str) -> None:
    assert check(FakeSwarm(2), **runner) == [problem]


def test_a_request_beyond_the_owners_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm: Any = FakeSwarm(4)
    monkeypatch.setenv(OWNER_VARIABLE, "anna")
    policy_store.store_policy(swarm, "limits: {anna: {gpus: 4}, '*': {nodes: 1}}\n", source="policy.yml")
    assert check(swarm, nodes=2) == []
    assert check(swarm, nodes=4, min_nodes=2) == []
    assert check(swarm, nodes=3) == [
        "config runner.min_nodes: 6 GPUs never fit: the limit of anna is 4 GPUs "
        "(the largest request that fits: 2 nodes; swarmtrain queue policy prints the limits)"
    ]
    monkeypatch.setenv(OWNER_VARIABLE, "bert")
    assert check(swarm, nodes=2) == [
        "config runner.min_nodes: 2 nodes never fit: the limit of bert is 1 node "
        "(the largest request that fits: 1 node; swarmtrain queue policy prints the limits)"
    ]


def test_a_scheduler_that_does_not_run_or_is_of_another_version_is_reported() -> None:
    swarm: Any = FakeSwarm(1)
    labels = {"swarmtrain.scheduler.version": "0.0.1", "swarmtrain.scheduler.image": "queue:1"}
    template = {"ContainerSpec": {"Image": "queue:1"}, "Placement": {"Constraints": ["node.role==manager"]}}
    mode = {"Replicated": {"Replicas": 1}}
    swarm.post("/services/create", {"Name": "swarmtrain-queue", "Labels": labels, "TaskTemplate": template, "Mode": mode})
    texts = [finding.message for finding in request_checks.find_scheduler_problems(swarm)]
    assert texts == [
        "its scheduler is new; runs wait until it runs again",
        f"its scheduler is swarmtrain 0.0.1, and this is {__version__}",
    ]
    swarm.advance()
    assert [finding.message for finding in request_checks.find_scheduler_problems(swarm)] == texts[1:]
    assert not any(finding.fatal for finding in request_checks.find_scheduler_problems(swarm))
