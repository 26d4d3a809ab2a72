"""What launcher and nodes exchange arrives unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from swarmtrain.protocol import EVENT_PROGRESS, PROTOCOL_VERSION, CoordinatorEnv, Event, NodeEnv

NODE = NodeEnv(
    run="demo",
    node="node0",
    slots=2,
    min_nodes=1,
    max_nodes=4,
    coordinator="rendezvous:29501",
    config="/etc/swarmtrain/config.json",
    code_folder="/workspace",
    script="/workspace/training_code.py",
    script_args=("--x", "a b", "$HOME {{}}"),
    secrets={"KEY": "/run/secrets/KEY"},
    stop_grace=90.0,
    log_dir="/tmp/swarmtrain",
    mounts=("/data", "/mnt/a b"),
    interface="10.1.0.0/16",
    numa="node",
)


def test_a_nodes_environment_comes_back_as_it_was() -> None:
    assert NodeEnv.from_env({"PATH": "/bin", **NODE.to_env()}) == NODE
    board = CoordinatorEnv("demo", coordinator_port=1, bind="127.0.0.1", max_restarts=3, max_restarts_per_hour=20, min_nodes=2)
    assert CoordinatorEnv.from_env(board.to_env()) == board


@given(args=some.lists(some.text()).map(tuple), script=some.text())
def test_any_text_survives_the_protocol(args: tuple[str, ...], script: str) -> None:
    sent = replace(NODE, script_args=args, script=script)
    assert NodeEnv.from_env(sent.to_env()) == sent


def test_a_missing_or_malformed_variable_is_named() -> None:
    env = NODE.to_env()
    with pytest.raises(ValueError, match="SWARMTRAIN_SLOTS is malformed"):
        NodeEnv.from_env({**env, "SWARMTRAIN_SLOTS": "two"})
    del env["SWARMTRAIN_COORDINATOR"]
    with pytest.raises(ValueError, match="SWARMTRAIN_COORDINATOR is not set"):
        NodeEnv.from_env(env)


def test_another_protocol_is_refused_with_both_versions() -> None:
    env = {**NODE.to_env(), "SWARMTRAIN_PROTOCOL": "999"}
    del env["SWARMTRAIN_COORDINATOR"]  # another version may call it by another name
    with pytest.raises(
        ValueError, match=f"the launcher uses protocol version 999, but swarmtrain .* on this node uses version {PROTOCOL_VERSION}"
    ):
        NodeEnv.from_env(env)


def test_events_are_lines_and_other_lines_are_not_events() -> None:
    event = Event(EVENT_PROGRESS, {"step": 3, "loss": 2.5}, time=1.25)
    assert Event.from_line(event.to_line()) == event
    assert "\n" not in Event(EVENT_PROGRESS, {"error": "two\nlines"}).to_line()
    for line in ("", "hello", "{}", '{"event": 1', '{"event": "x"}'):
        assert Event.from_line(line) is None
