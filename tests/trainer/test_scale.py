"""Loss scaling: the scale as a table of values, and float16 runs in which steps are skipped by all ranks alike."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from worlds import World, audit, changed, held_out, losses, manifest, train

from swarmtrain.config import Config
from swarmtrain.config.optimizer import LossScalerConfig
from swarmtrain.trainer.optim import scale
from swarmtrain.trainer.optim.scale import Scale

FINE, LOST = False, True


def follow(steps: list[bool], **options: object) -> list[float]:
    """The scale after each of `steps`."""
    config = LossScalerConfig.model_validate_json(json.dumps({"initial_scale": 64.0, "window": 3, "hysteresis": 1, **options}))
    now, seen = scale.first(config), []
    for overflow in steps:
        now = scale.after(now, config, overflow=overflow)
        seen.append(now.factor)
    return seen


@pytest.mark.parametrize(
    ("steps", "options", "scales"),
    [
        ([LOST, LOST, FINE], {}, [32, 16, 16]),
        ([LOST, LOST], {"factor": 4.0}, [16, 4]),
        ([LOST, LOST, LOST], {"min_scale": 32.0}, [32, 32, 32]),
        ([FINE] * 7, {}, [64, 64, 128, 128, 128, 256, 256]),
        ([FINE, FINE, LOST, FINE, FINE, FINE], {}, [64, 64, 32, 32, 32, 64]),
        ([LOST, LOST, LOST], {"hysteresis": 2}, [64, 32, 16]),
        ([LOST, FINE, LOST], {"hysteresis": 2}, [64, 64, 32]),
        ([LOST, FINE, LOST], {"hysteresis": 2, "consecutive_hysteresis": True}, [64, 64, 64]),
        ([LOST, FINE, FINE, FINE, LOST], {"hysteresis": 2}, [64, 64, 64, 128, 128]),
    ],
)
def test_scale(steps: list[bool], options: dict[str, Any], scales: list[float]) -> None:
    assert follow(steps, **options) == scales


@pytest.mark.parametrize(
    ("precision", "enable", "scaled"),
    [("float16", None, True), ("float16", False, False), ("bfloat16", None, False), ("float32", True, True)],
)
def test_who_scales(precision: str, enable: bool | None, scaled: bool) -> None:
    sections = {"transformer_architecture": {"precision": precision}, "optimizer": {"loss_scaler": {"enable": enable}}}
    made = scale.wanted(Config.model_validate_json(json.dumps(sections)))
    assert (made.now if made else None) == (Scale(65536, 0, 2) if scaled else None)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in ("step", "loss_scale", "skipped")} for line in lines if "loss_scale" in line]


def test_float16_skips_on_all_ranks_and_goes_on_where_it_stopped(tmp_path: Path, config: dict[str, Any]) -> None:
    scaler = {"initial_scale": 2.0**22, "hysteresis": 1, "window": 4}
    small = changed(config, topology={"model_parallel_size": 2, "global_batch_size": 4}, trainer={"save_interval": 6, "eval_iterations": 1})
    half = changed(small, optimizer={"loss_scaler": scaler}, transformer_architecture={"precision": "float16", "sequence_length": 16})
    whole = train(tmp_path / "whole", half, 2)
    steps = metrics(tmp_path / "whole")
    skipped = {line["step"] for line in steps if line["skipped"]}
    assert 1 in skipped
    assert len(skipped) < 9
    assert max(skipped) > 6, "the scale has risen again, after the checkpoint"
    for before, line in itertools.pairwise(steps):
        assert line["loss_scale"] == before["loss_scale"] / 2 or not before["skipped"]
    by_rank = [{line["step"] for line in audit(tmp_path / "whole") if line["rank"] == rank and line.get("skipped")} for rank in range(2)]
    assert by_rank == [skipped, skipped]
    assert f"skipped: gradients overflow at loss scale {2**22:g}" in (tmp_path / "whole" / "rank-0.log").read_text()

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "run" / "step-00000012")
    assert train(tmp_path / "resumed", half, 2) == whole
    assert metrics(tmp_path / "resumed") == steps
    assert manifest(tmp_path / "resumed", 12)["files"] == manifest(tmp_path / "whole", 12)["files"]


def test_an_overflow_changes_nothing_and_the_lowest_scale_ends_the_run(tmp_path: Path, config: dict[str, Any]) -> None:
    scaler = {"initial_scale": 2.0**40, "min_scale": 2.0**38, "hysteresis": 1}
    sections = {"optimizer": {"loss_scaler": scaler}, "transformer_architecture": {"precision": "float16"}, "trainer": {"eval_interval": 1}}
    world = World(tmp_path, changed(config, **sections), 2)
    assert world.wait() == [1, 1]
    assert f"step 3: at the lowest loss scale {2**38:g}, " in world.log()
    assert "values of rank 0's gradients are not finite, in embedding.weight" in world.log()
    assert len(losses(tmp_path)) == 2
    seen = held_out(tmp_path)
    assert list(seen) == [0, 1, 2]
    assert len(set(seen.values())) == 1


def test_a_scale_that_is_a_power_of_two_leaves_no_trace_in_float32(tmp_path: Path, config: dict[str, Any]) -> None:
    plain = train(tmp_path / "plain", changed(config, optimizer={"method": "sgd", "momentum": 0.9}))
    scaled = changed(config, optimizer={"method": "sgd", "momentum": 0.9, "loss_scaler": {"enable": True}})
    assert train(tmp_path / "scaled", scaled, 2) == plain
    assert plain[12] < plain[1]
