"""Seconds to draw the parameters of a large model, to save a checkpoint twice, and to load it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from swarmtrain.trainer.acceptance.models import MODEL_1B, TINY, merge_sections
from swarmtrain.trainer.acceptance.rows import Row
from swarmtrain.trainer.acceptance.session import Sections, TrainingSession, build_config, open_session
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.acceptance.worker import run_worker
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.restore import restore_training_state
from swarmtrain.trainer.checkpoint.training_state import TrainingState
from swarmtrain.trainer.parallel import EMBEDDING_WEIGHT

_FEW_LAYERS: Sections = {"transformer_architecture": {"num_layers": 2}}
"""With all layers, two checkpoints would take minutes: 15 GB each, of which every byte is hashed."""
_STALL_GOAL_GIGABYTES_PER_SECOND = 20.0
_COMPARED_ROWS = 256


def run(context: StageContext) -> Iterator[Row]:
    """Yield a row for drawing, for each of two saves, and for loading in a new process."""
    trainer = {"save_dir": str(Path(context.folder) / "checkpoints"), "save_in_background": True}
    sections = merge_sections(MODEL_1B if context.is_cuda else TINY, _FEW_LAYERS, {"trainer": trainer})
    yield from run_worker(save, {"sections": sections}, timeout=context.scale_limit(80))
    yield from run_worker(load, {"sections": sections}, timeout=context.scale_limit(80))


def save(sections: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the seconds to draw a model, then to save it after each of two steps."""
    start_time = time.perf_counter()
    with open_session(build_config(sections)) as session:
        _synchronize(session)
        values = {"seconds": time.perf_counter() - start_time, "parameters": session.model.parameter_count}
        yield Row.from_check("draw", _has_values_of_cpu(session), values, "the device draws other values than the CPU")
        state = TrainingState(session.model, session.optimizer)
        manager = CheckpointManager(session.runtime, state, "acceptance", _do_not_report)
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
            values = {"gigabytes": gigabytes, "stall_seconds": stall_seconds, "seconds": time.perf_counter() - start_time}
            if step == 1 or session.runtime.device.type == "cpu":
                yield Row(f"save {step}", values=values)
            else:
                goal = f"stalls for at most gigabytes / {_STALL_GOAL_GIGABYTES_PER_SECOND:g}"
                yield Row.from_goal(f"save {step}", stall_seconds <= gigabytes / _STALL_GOAL_GIGABYTES_PER_SECOND, values, goal)


def load(sections: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the seconds to create the model and to load the newest checkpoint into it."""
    start_time = time.perf_counter()
    with open_session(build_config(sections), initialize=False) as session:
        created_time = time.perf_counter()
        state = TrainingState(session.model, session.optimizer)
        manager = CheckpointManager(session.runtime, state, "acceptance", _do_not_report)
        progress, _ = restore_training_state(session.runtime, manager, state, "acceptance", _do_not_report)
        _synchronize(session)
        values = {"create_seconds": created_time - start_time, "load_seconds": time.perf_counter() - created_time, "step": progress.step}
        yield Row.from_check("load", progress.step == 2, values, "did not load the newest checkpoint")


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
