"""Seconds to draw the parameters of a large model, to save a checkpoint twice, and to load it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from conftest import Machine, Row
from models import MODEL_1B, TINY, Sections, build_config, merge_sections
from workers import Worker

from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.restore import restore_training_state
from swarmtrain.trainer.checkpoint.training_state import TrainingState
from swarmtrain.trainer.parallel import EMBEDDING_WEIGHT
from swarmtrain.trainer.speed.session import TrainingSession, open_session

_FEW_LAYERS: Sections = {"transformer_architecture": {"num_layers": 2}}
"""With all layers, two checkpoints would take minutes: 15 GB each, of which every byte is hashed."""
_STALL_GOAL_GIGABYTES_PER_SECOND = 20.0
_COMPARED_ROWS = 256


_LIMIT_SECONDS = 80.0


@pytest.fixture(scope="module")
def sections(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trainer = {"save_dir": str(tmp_path_factory.mktemp("run") / "checkpoints"), "save_in_background": True}
    return merge_sections(MODEL_1B if machine.is_cuda else TINY, _FEW_LAYERS, {"trainer": trainer})


@pytest.fixture(scope="module")
def saved(machine: Machine, worker: Worker, sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The measurements of a process that draws a model, and saves it after each of two steps."""
    measurements: dict[str, dict[str, Any]] = worker.call(save, sections=sections, timeout=machine.scale_limit(_LIMIT_SECONDS))
    worker.close()
    return measurements


def test_draw(row: Row, saved: dict[str, dict[str, Any]]) -> None:
    row.values |= saved["draw"]
    assert row.values.pop("has_values_of_cpu")


@pytest.mark.parametrize("name", ["save 1", "save 2"])
def test_save(row: Row, machine: Machine, saved: dict[str, dict[str, Any]], name: str) -> None:
    row.values |= saved[name]
    goal = row.values["gigabytes"] / _STALL_GOAL_GIGABYTES_PER_SECOND
    if machine.is_cuda and name == "save 2":
        row.check_goal(row.values["stall_seconds"] <= goal, f"stalls for at most gigabytes / {_STALL_GOAL_GIGABYTES_PER_SECOND:g}")
    assert row.values["seconds"] >= row.values["stall_seconds"]


@pytest.mark.usefixtures("saved")
def test_load(row: Row, machine: Machine, worker: Worker, sections: dict[str, Any]) -> None:
    row.values |= worker.call(load, sections=sections, timeout=machine.scale_limit(_LIMIT_SECONDS))
    assert row.values["step"] == 2


def save(sections: Sections) -> dict[str, dict[str, Any]]:
    """Measure the seconds to draw a model, then to save it after each of two steps."""
    start_time = time.perf_counter()
    with open_session(build_config(sections)) as session:
        _synchronize(session)
        values: dict[str, Any] = {"seconds": time.perf_counter() - start_time, "parameters": session.model.parameter_count}
        measurements = {"draw": {**values, "has_values_of_cpu": _has_values_of_cpu(session)}}
        state = TrainingState(session.model, session.optimizer)
        manager = CheckpointManager(session.runtime, state, "gpu-table", _do_not_report)
        session.run_step(1)
        gigabytes = sum(tensor.numel() * tensor.element_size() for tensor in state.collect_tensors().values()) / 1e9
        for step in (1, 2):
            _synchronize(session)
            start_time = time.perf_counter()
            manager.save(Progress(step=step))
            stall_seconds = time.perf_counter() - start_time
            manager.wait_for_pending_save()
            while not manager.take_completed_saves():
                time.sleep(0.01)
            seconds = time.perf_counter() - start_time
            measurements[f"save {step}"] = {"gigabytes": gigabytes, "stall_seconds": stall_seconds, "seconds": seconds}
    return measurements


def load(sections: Sections) -> dict[str, Any]:
    """Measure the seconds to create the model and to load the newest checkpoint into it."""
    start_time = time.perf_counter()
    with open_session(build_config(sections), initialize=False) as session:
        created_time = time.perf_counter()
        state = TrainingState(session.model, session.optimizer)
        manager = CheckpointManager(session.runtime, state, "gpu-table", _do_not_report)
        progress, _ = restore_training_state(session.runtime, manager, state, "gpu-table", _do_not_report)
        _synchronize(session)
        return {"create_seconds": created_time - start_time, "load_seconds": time.perf_counter() - created_time, "step": progress.step}


def _has_values_of_cpu(session: TrainingSession) -> bool:
    """Return whether the first rows of the embedding, which the device has drawn, have the bits that the CPU draws."""
    size, drawn = session.model.shard_layout.shapes[EMBEDDING_WEIGHT], session.model.parameters[EMBEDDING_WEIGHT].detach()[:_COMPARED_ROWS]
    expected = torch.empty(drawn.shape)
    region = slice(0, len(drawn)), slice(0, size[1])
    session.model.local_model.initial_values.write_region(EMBEDDING_WEIGHT, size, region, expected)
    return torch.equal(drawn.cpu(), expected)


def _synchronize(session: TrainingSession) -> None:
    if session.runtime.device.type == "cuda":
        torch.cuda.synchronize()


def _do_not_report(_message: str) -> None:
    pass
