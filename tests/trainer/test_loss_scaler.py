"""Loss scaling: the scale as a table of values, and float16 runs in which all ranks skip the same steps."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from worlds import LocalWorld, merge_config, read_audit, read_losses, read_manifest, read_validation_losses, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.optimizer import LossScalerConfig
from swarmtrain.trainer.optim import loss_scaler
from swarmtrain.trainer.optim.loss_scaler import LossScaleState

NO_OVERFLOW, OVERFLOW = False, True


def follow_scale(steps: list[bool], **options: object) -> list[float]:
    """Return the scale after each of `steps`, which is true if the step overflows."""
    config = LossScalerConfig.model_validate_json(json.dumps({"initial_scale": 64.0, "window": 3, "hysteresis": 1, **options}))
    loss_scale, factors = loss_scaler.build_initial_loss_scale_state(config), []
    for overflow in steps:
        loss_scale = loss_scaler.update_loss_scale_state(loss_scale, config, overflow=overflow)
        factors.append(loss_scale.factor)
    return factors


@pytest.mark.parametrize(
    ("steps", "options", "scales"),
    [
        ([OVERFLOW, OVERFLOW, NO_OVERFLOW], {}, [32, 16, 16]),
        ([OVERFLOW, OVERFLOW], {"factor": 4.0}, [16, 4]),
        ([OVERFLOW, OVERFLOW, OVERFLOW], {"min_scale": 32.0}, [32, 32, 32]),
        ([NO_OVERFLOW] * 7, {}, [64, 64, 128, 128, 128, 256, 256]),
        ([NO_OVERFLOW, NO_OVERFLOW, OVERFLOW, NO_OVERFLOW, NO_OVERFLOW, NO_OVERFLOW], {}, [64, 64, 32, 32, 32, 64]),
        ([OVERFLOW, OVERFLOW, OVERFLOW], {"hysteresis": 2}, [64, 32, 16]),
        ([OVERFLOW, NO_OVERFLOW, OVERFLOW], {"hysteresis": 2}, [64, 64, 32]),
        ([OVERFLOW, NO_OVERFLOW, OVERFLOW], {"hysteresis": 2, "consecutive_hysteresis": True}, [64, 64, 64]),
        ([OVERFLOW, NO_OVERFLOW, NO_OVERFLOW, NO_OVERFLOW, OVERFLOW], {"hysteresis": 2}, [64, 64, 64, 128, 128]),
    ],
)
def test_scale(steps: list[bool], options: dict[str, Any], scales: list[float]) -> None:
    assert follow_scale(steps, **options) == scales


@pytest.mark.parametrize(
    ("precision", "enable", "scaled"),
    [("float16", None, True), ("float16", False, False), ("bfloat16", None, False), ("float32", True, True)],
)
def test_which_precisions_scale(precision: str, enable: bool | None, scaled: bool) -> None:
    sections = {"transformer_architecture": {"precision": precision}, "optimizer": {"loss_scaler": {"enable": enable}}}
    made = loss_scaler.build_loss_scaler(Config.model_validate_json(json.dumps(sections)))
    assert (made.current_state if made else None) == (LossScaleState(65536, 0, 2) if scaled else None)


def read_scale_metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss_scale", "skipped")} for line in lines if "loss_scale" in line]


def test_float16_skips_on_all_ranks_and_resumes_where_it_stopped(tmp_path: Path, config: dict[str, Any]) -> None:
    scaler = {"initial_scale": 2.0**22, "hysteresis": 1, "window": 4}
    small = merge_config(
        config, topology={"model_parallel_size": 2, "global_batch_size": 4}, trainer={"save_interval": 6, "eval_iterations": 1}
    )
    half = merge_config(small, optimizer={"loss_scaler": scaler}, transformer_architecture={"precision": "float16", "sequence_length": 16})
    whole = run_training(tmp_path / "whole", half, 2)
    steps = read_scale_metrics(tmp_path / "whole")
    skipped = {line["step"] for line in steps if line["skipped"]}
    assert 1 in skipped
    assert len(skipped) < 9
    assert max(skipped) > 6, "the scale has risen again, after the checkpoint"
    for before, line in itertools.pairwise(steps):
        assert line["loss_scale"] == before["loss_scale"] / 2 or not before["skipped"]
    by_rank = [
        {line["step"] for line in read_audit(tmp_path / "whole") if line["rank"] == rank and line.get("skipped")} for rank in range(2)
    ]
    assert by_rank == [skipped, skipped]
    assert f"skipped: gradients overflow at loss scale {2**22:g}" in (tmp_path / "whole" / "rank-0.log").read_text()

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "run" / "step-00000012")
    assert run_training(tmp_path / "resumed", half, 2) == whole
    assert read_scale_metrics(tmp_path / "resumed") == steps
    assert read_manifest(tmp_path / "resumed", 12)["files"] == read_manifest(tmp_path / "whole", 12)["files"]


def test_an_overflow_changes_nothing_and_the_lowest_scale_ends_the_run(tmp_path: Path, config: dict[str, Any]) -> None:
    scaler = {"initial_scale": 2.0**40, "min_scale": 2.0**38, "hysteresis": 1}
    sections = {"optimizer": {"loss_scaler": scaler}, "transformer_architecture": {"precision": "float16"}, "trainer": {"eval_interval": 1}}
    world = LocalWorld(tmp_path, merge_config(config, **sections), 2)
    assert world.wait() == [1, 1]
    assert f"step 3: at the lowest loss scale {2**38:g}, " in world.read_log()
    assert "NaN/Inf values in rank 0's gradients, in embedding.weight" in world.read_log()
    assert len(read_losses(tmp_path)) == 2
    seen = read_validation_losses(tmp_path)
    assert list(seen) == [0, 1, 2]
    assert len(set(seen.values())) == 1


def test_a_scale_that_is_a_power_of_two_leaves_no_trace_in_float32(tmp_path: Path, config: dict[str, Any]) -> None:
    plain = run_training(tmp_path / "plain", merge_config(config, optimizer={"method": "sgd", "momentum": 0.9}))
    scaled = merge_config(config, optimizer={"method": "sgd", "momentum": 0.9, "loss_scaler": {"enable": True}})
    assert run_training(tmp_path / "scaled", scaled, 2) == plain
    assert plain[12] < plain[1]
