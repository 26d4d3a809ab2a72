"""Measured step times: one rank trains the config's model alone, whatever the config's topology is."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from worlds import merge_config

from swarmtrain.config import Config
from swarmtrain.entrypoint.probe.step_time_probe import measure_step_times
from swarmtrain.protocol import NodeEnv
from swarmtrain.trainer.speed import bench

SHARDED = {"topology": {"data_parallel_type": "fsdp"}}
ZERO = {
    "topology": {"world_size": 2, "gradient_accumulation_steps": 3, "micro_batch_size": 2, "global_batch_size": None},
    "optimizer": {"zero": True},
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(Config.from_json(json.dumps(config)).to_json())
    return path


def build_node_env(config: Path, slots: int) -> NodeEnv:
    values = {field.name: "" for field in dataclasses.fields(NodeEnv)} | {"config": str(config), "slots": slots}
    return NodeEnv(**values)  # type: ignore[arg-type]  # the other fields are not used


@pytest.mark.parametrize("sections", [{}, SHARDED, ZERO], ids=["ddp", "fsdp", "zero"])
def test_a_rank_of_any_topology_is_measured_alone(config: dict[str, Any], sections: dict[str, Any]) -> None:
    single = bench.build_single_rank_config(Config.from_json(json.dumps(merge_config(config, **sections))))
    assert single.topology.micro_batches_per_step == 2
    assert single.topology.compute_data_parallel_size(1) == 1
    assert not single.optimizer.zero
    assert single.topology.data_parallel_type == "ddp"


def test_all_ranks_of_a_node_are_measured_at_the_same_time(tmp_path: Path, config: dict[str, Any]) -> None:
    started_at = time.monotonic()
    result = measure_step_times(build_node_env(write_config(tmp_path, config), slots=2), 0.2)
    elapsed = time.monotonic() - started_at
    assert result["parameters"] == result["trainable_parameters"] > 1000
    assert 0 < result["micro_batch_seconds"] < elapsed
    assert 0 <= result["step_seconds"] < elapsed


@pytest.mark.test_all_only("waits for a rank that fails")
def test_a_rank_that_cannot_train_is_an_error(tmp_path: Path) -> None:
    result = measure_step_times(build_node_env(tmp_path / "missing.json", slots=2), 0.2)
    assert "No such file" in result["error"]
