"""What becomes of a run in which a gradient is no number. Replicas are divided (fsdp), so that one rank's NaN stays its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from worlds import World, audit, changed, manifest, samples_by_step, steps_saved, train

BATCH = 12


def poisoned(folder: Path, config: dict[str, Any], *steps: int) -> World:
    """Train on two ranks; the batches that an undisturbed run has in `steps` are poison."""
    return World(folder, config, 2, {"POISON": json.dumps([(step - 1) * BATCH for step in steps])}, script="poisoned")


@pytest.fixture
def divided(config: dict[str, Any]) -> dict[str, Any]:
    return changed(config, topology={"data_parallel_type": "fsdp"}, trainer={"save_interval": 2})


def test_skipped_steps_change_nothing_and_are_counted(tmp_path: Path, divided: dict[str, Any]) -> None:
    skipping = changed(divided, trainer={"non_finite": "skip", "non_finite_steps": 2, "save_interval": 1, "keep_checkpoints": 99})
    world = poisoned(tmp_path, skipping, 3, 7)
    assert world.wait() == [0, 0], world.log()
    assert re.search(r"skipped: the loss is \d\.", world.log())
    assert "1 value of rank 1's gradients is not finite, in norm.weight" in world.log()
    lines = audit(tmp_path)
    assert sorted({line["step"] for line in lines if line.get("skipped")}) == [3, 7]
    assert sorted(line["step"] for line in lines) == sorted([*range(1, 13)] * 2)
    files = {step: {name: entry["sha256"] for name, entry in manifest(tmp_path, step)["files"].items()} for step in range(1, 13)}
    assert (files[3], files[7]) == (files[2], files[6])
    assert len({json.dumps(found) for found in files.values()}) == 10


def test_too_many_in_a_row_end_the_run_and_leave_the_samples(tmp_path: Path, divided: dict[str, Any]) -> None:
    skipping = changed(divided, trainer={"non_finite": "skip", "non_finite_steps": 2})
    world = poisoned(tmp_path, skipping, 3, 5, 6)
    assert world.wait() == [1, 1]
    assert re.search(r"step 6: the loss is \d\.", world.log())
    assert "so were 2 steps in a row" in world.log()
    left = json.loads((tmp_path / "run" / "non-finite-step-00000006.json").read_text())
    undisturbed = tmp_path / "undisturbed"
    train(undisturbed, divided, 2)
    assert sorted(left["samples"]) == samples_by_step(undisturbed)[6]


def test_the_run_goes_back_and_past_the_batch(tmp_path: Path, divided: dict[str, Any]) -> None:
    back = changed(divided, trainer={"non_finite": "roll_back"})
    world = poisoned(tmp_path, back, 6, 8)
    assert world.wait() == [1, 1]
    assert re.search(r"step 6: the loss is \d\.", world.log())
    assert steps_saved(tmp_path)[-1] == 4
    for failed_at in (7, None):  # the eighth batch is the seventh step's by then
        world = poisoned(tmp_path, back, 6, 8)
        assert world.wait() == ([1, 1] if failed_at else [0, 0]), world.log()
    undisturbed = tmp_path / "undisturbed"
    train(undisturbed, changed(divided, trainer={"train_iterations": 14}), 2)
    batches = samples_by_step(undisturbed)
    wanted = [batches[number] for number in range(1, 15) if number not in (6, 8)]
    last = {(line["step"], line["rank"]): line["samples"] for line in audit(tmp_path)}  # of worlds in their order
    seen = [sorted(sample for (step, _), samples in last.items() if step == number for sample in samples) for number in range(1, 13)]
    assert seen == wanted
    assert manifest(tmp_path, 12)["consumed_samples"] == 14 * BATCH
