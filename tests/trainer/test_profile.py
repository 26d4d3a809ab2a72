"""Profiling: a trace and a table of operations."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from worlds import LocalWorld, merge_config, run_training


@pytest.mark.test_all_only("writes a whole trace")
def test_trace_of_chosen_ranks_and_steps(tmp_path: Path, config: dict[str, Any]) -> None:
    options = {"profile_steps": 2, "profile_start_at_step": 3, "profile_ranks": [1], "record_shapes": True, "memory_snapshot": True}
    world = LocalWorld(tmp_path, merge_config(config, profiler=options), 2)
    assert world.wait() == [0, 0], world.read_log()
    assert sorted(path.name for path in (tmp_path / "run").glob("profile*")) == ["profile-rank-1.json", "profile-rank-1.txt"]
    events = json.loads((tmp_path / "run" / "profile-rank-1.json").read_text())["traceEvents"]
    attention = [event for event in events if "scaled_dot_product" in event.get("name", "") and "backward" not in event["name"]]
    assert attention
    assert "Input Dims" in attention[0]["args"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}
    assert len(steps) == 2, "one to warm up is not in it"
    table = (tmp_path / "run" / "profile-rank-1.txt").read_text()
    assert "aten::addmm" in table or "aten::mm" in table
    assert "profiler.memory_snapshot: this rank has no GPU" in (tmp_path / "rank-1.log").read_text()


def test_a_run_that_ends_too_early_writes_what_was_traced(tmp_path: Path, config: dict[str, Any]) -> None:
    short = merge_config(config, trainer={"train_iterations": 4}, profiler={"profile_steps": 20, "profile_start_at_step": 2})
    run_training(tmp_path, short)
    events = json.loads((tmp_path / "run" / "profile.json").read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)


def test_one_timeline_of_all_ranks(tmp_path: Path, config: dict[str, Any]) -> None:
    """A pipeline of two ranks with two stages each, and a run that ends with the last step that is shown."""
    piped = merge_config(
        config,
        topology={"pipe_parallel_size": 2, "pipe_stages_per_rank": 2, "micro_batch_size": 3},
        transformer_architecture={"num_layers": 4},
        profiler={"timeline_steps": 2, "timeline_start_at_step": 10},
    )
    world = LocalWorld(tmp_path, piped, 2)
    assert world.wait() == [0, 0], world.read_log()
    whole = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert 0 < whole["otherData"]["accuracy_microseconds"] < 5000
    spans = [event for event in whole["traceEvents"] if event["ph"] == "X"]
    for rank in (0, 1):
        mine = [event for event in spans if event["tid"] == rank]
        assert {event["name"] for event in mine if event["cat"] == "step"} == {"step 11", "step 12"}
        for part in ("forward", "backward"):
            passes = [
                (event["args"]["micro_batch"], event["args"]["stage"])
                for event in mine
                if event["cat"] == part and "stage" in event["args"]
            ]
            assert sorted(passes) == sorted(2 * [(micro, stage) for micro in range(4) for stage in (rank, rank + 2)])
        parts = [event for event in mine if event["cat"] != "step"]
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in pairwise(parts)), "one after the other"
    for step in (11, 12):
        before, after = (
            next(
                event for event in spans if event["cat"] == "forward" and event["args"] == {"step": step, "micro_batch": 0, "stage": stage}
            )
            for stage in (0, 1)
        )
        assert after["ts"] + after["dur"] > before["ts"] + before["dur"], "nothing is passed on before it is there"
