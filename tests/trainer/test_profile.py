"""Where time goes: a trace and a table of operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worlds import World, changed, train


def test_trace_of_chosen_ranks_and_steps(tmp_path: Path, config: dict[str, Any]) -> None:
    options = {"profile_steps": 2, "profile_start_at_step": 3, "profile_ranks": [1], "record_shapes": True, "memory_snapshot": True}
    world = World(tmp_path, changed(config, profiler=options), 2)
    assert world.wait() == [0, 0], world.log()
    assert sorted(path.name for path in (tmp_path / "run").glob("profile*")) == ["profile-rank-1.json", "profile-rank-1.txt"]
    events = json.loads((tmp_path / "run" / "profile-rank-1.json").read_text())["traceEvents"]
    attention = [event for event in events if "scaled_dot_product" in event.get("name", "") and "backward" not in event["name"]]
    assert attention
    assert "Input Dims" in attention[0]["args"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}
    assert len(steps) == 2, "one to warm up is not in it"
    table = (tmp_path / "run" / "profile-rank-1.txt").read_text()
    assert "aten::addmm" in table or "aten::mm" in table
    assert "no snapshot can be had" in (tmp_path / "rank-1.log").read_text()


def test_a_run_that_ends_too_early_leaves_what_was_traced(tmp_path: Path, config: dict[str, Any]) -> None:
    short = changed(config, trainer={"train_iterations": 4}, profiler={"profile_steps": 20, "profile_start_at_step": 2})
    train(tmp_path, short)
    events = json.loads((tmp_path / "run" / "profile.json").read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)
