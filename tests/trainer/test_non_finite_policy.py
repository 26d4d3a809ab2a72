"""Policies for a NaN gradient. Replicas are sharded (fsdp), so that one rank's NaN stays on that rank."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from worlds import LocalWorld, list_saved_steps, merge_config, read_audit, read_manifest, read_samples_by_step, run_training

from swarmtrain.trainer.checkpoint.file_digests import get_digest

BATCH = 12


def start_world_with_nans(folder: Path, config: dict[str, Any], *steps: int) -> LocalWorld:
    """Train on two ranks; the batches that an undisturbed run has at `steps` give a NaN gradient."""
    return LocalWorld(folder, config, 2, {"NAN_POSITIONS": json.dumps([(step - 1) * BATCH for step in steps])}, script="nan_gradients")


@pytest.fixture
def fsdp_config(config: dict[str, Any]) -> dict[str, Any]:
    return merge_config(config, topology={"data_parallel_type": "fsdp"}, trainer={"save_interval": 2})


def test_skipped_steps_change_nothing_and_are_counted(tmp_path: Path, fsdp_config: dict[str, Any]) -> None:
    skipping = merge_config(fsdp_config, trainer={"non_finite": "skip", "non_finite_steps": 2, "save_interval": 1, "keep_checkpoints": 99})
    world = start_world_with_nans(tmp_path, skipping, 3, 7)
    assert world.wait() == [0, 0], world.read_log()
    assert re.search(r"skipped: the loss is \d\.", world.read_log())
    assert "1 NaN/Inf value in rank 1's gradients, in norm.weight" in world.read_log()
    lines = read_audit(tmp_path)
    assert sorted({line["step"] for line in lines if line.get("skipped")}) == [3, 7]
    assert sorted(line["step"] for line in lines) == sorted([*range(1, 13)] * 2)
    files = {step: {name: get_digest(entry) for name, entry in read_manifest(tmp_path, step)["files"].items()} for step in range(1, 13)}
    assert (files[3], files[7]) == (files[2], files[6])
    assert len({json.dumps(found) for found in files.values()}) == 10


def test_too_many_in_a_row_end_the_run_and_record_the_samples(tmp_path: Path, fsdp_config: dict[str, Any]) -> None:
    skipping = merge_config(fsdp_config, trainer={"non_finite": "skip", "non_finite_steps": 2})
    world = start_world_with_nans(tmp_path, skipping, 3, 5, 6)
    assert world.wait() == [1, 1]
    assert re.search(r"step 6: the loss is \d\.", world.read_log())
    assert "non-finite for 2 steps in a row" in world.read_log()
    left = json.loads((tmp_path / "run" / "non-finite-step-00000006.json").read_text())
    undisturbed = tmp_path / "undisturbed"
    run_training(undisturbed, fsdp_config, 2)
    assert sorted(left["samples"]) == read_samples_by_step(undisturbed)[6]


def test_the_run_rolls_back_and_skips_the_batch(tmp_path: Path, fsdp_config: dict[str, Any]) -> None:
    back = merge_config(fsdp_config, trainer={"non_finite": "roll_back"})
    world = start_world_with_nans(tmp_path, back, 6, 8)
    assert world.wait() == [1, 1]
    assert re.search(r"step 6: the loss is \d\.", world.read_log())
    assert list_saved_steps(tmp_path)[-1] == 4
    for failed_at in (7, None):  # by then, the eighth batch is that of step 7
        world = start_world_with_nans(tmp_path, back, 6, 8)
        assert world.wait() == ([1, 1] if failed_at else [0, 0]), world.read_log()
    undisturbed = tmp_path / "undisturbed"
    run_training(undisturbed, merge_config(fsdp_config, trainer={"train_iterations": 14}), 2)
    batches = read_samples_by_step(undisturbed)
    wanted = [batches[number] for number in range(1, 15) if number not in (6, 8)]
    last = {(line["step"], line["rank"]): line["samples"] for line in read_audit(tmp_path)}  # later worlds replace earlier ones
    seen = [sorted(sample for (step, _), samples in last.items() if step == number for sample in samples) for number in range(1, 13)]
    assert seen == wanted
    assert read_manifest(tmp_path, 12)["consumed_samples"] == 14 * BATCH
