"""The values of a model and its optimizer after a checkpoint was loaded, was not loaded, or turned out to be damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Runtime, Transformer, parallelize, start_runtime
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.restore import restore_training_state
from swarmtrain.trainer.checkpoint.training_state import TrainingState

_ARCHITECTURE = {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "sequence_length": 8}


@pytest.mark.parametrize("initialize", [True, False])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_damaged_checkpoint_leaves_no_trace(tmp_path: Path, precision: str, *, initialize: bool) -> None:
    """The values that a script has set stay; a model without values gets its initial ones. The optimizer is as new."""
    config = _build_config({"save_dir": str(tmp_path)}, precision)
    warnings: list[str] = []
    with start_runtime(config) as runtime:
        initial = _save_checkpoint(runtime, steps=[1])
        _damage(tmp_path / "step-00000001")
        state, manager = _build_state(runtime, warnings, initialize=initialize)
        if initialize:
            for parameter in state.model.parameters.values():
                parameter.detach().fill_(7)
        assert restore_training_state(runtime, manager, state, "", warnings.append) == (Progress(), None)
        assert any("part-00000.bin is corrupt" in line for line in warnings)
        for name, tensor in state.collect_all_tensors().items():
            is_set_by_script = initialize and name.startswith("model/")
            assert torch.equal(tensor, torch.full_like(tensor, 7) if is_set_by_script else initial[name]), name


@pytest.mark.parametrize("initialize", [True, False])
def test_another_run_is_loaded_from_its_newest_checkpoint_without_damage(tmp_path: Path, *, initialize: bool) -> None:
    warnings: list[str] = []
    with start_runtime(_build_config({"save_dir": str(tmp_path)})) as runtime:
        _save_checkpoint(runtime, steps=[1, 2])
    _damage(tmp_path / "step-00000002")
    with start_runtime(_build_config({"load_dir": str(tmp_path)})) as runtime:
        state, manager = _build_state(runtime, warnings, initialize=initialize)
        _, path = restore_training_state(runtime, manager, state, "", warnings.append)
        assert path == tmp_path / "step-00000001"
        assert any("part-00000.bin is corrupt" in line for line in warnings)
        assert all(torch.equal(tensor, torch.full_like(tensor, 1)) for tensor in state.collect_all_tensors().values())


@pytest.mark.parametrize("source", ["nothing", "save_dir", "load_dir", "load_dir without optimizer"])
@pytest.mark.parametrize(("precision", "method"), [("float32", "adamw"), ("float32", "muon"), ("float16", "sgd")])
def test_no_value_stays_uninitialized(tmp_path: Path, precision: str, method: str, source: str) -> None:
    folder_key = source.partition(" ")[0]
    loaded = {} if source == "nothing" else {folder_key: str(tmp_path), "load_optimizer_states": "without" not in source}
    with start_runtime(_build_config({"save_dir": str(tmp_path)}, precision, method)) as runtime:
        initial = _save_checkpoint(runtime, steps=[1])
    with start_runtime(_build_config(loaded, precision, method)) as runtime, _fill_uninitialized_memory():
        state, manager = _build_state(runtime, [], initialize=False)
        assert any(tensor.isnan().any() for tensor in state.collect_all_tensors().values())
        restore_training_state(runtime, manager, state, "", lambda message: None)
        for name, tensor in state.collect_all_tensors().items():
            is_loaded = source != "nothing" and ("without" not in source or name.startswith("model/"))
            assert torch.equal(tensor, torch.full_like(tensor, 1) if is_loaded else initial[name]), name


def _build_config(trainer: dict[str, Any], precision: str = "float32", method: str = "adamw") -> Config:
    sections = {
        "transformer_architecture": {**_ARCHITECTURE, "precision": precision},
        "trainer": trainer,
        "optimizer": {"method": method},
    }
    return Config.model_validate_json(json.dumps(sections))


def _build_state(runtime: Runtime, warnings: list[str], *, initialize: bool) -> tuple[TrainingState, CheckpointManager]:
    model = parallelize(Transformer(runtime.config.transformer_architecture, 1), runtime, initialize=initialize)
    state = TrainingState(model, Optimizer(model, runtime.config))
    return state, CheckpointManager(runtime, state, "", warnings.append)


def _save_checkpoint(runtime: Runtime, steps: list[int]) -> dict[str, torch.Tensor]:
    """Save a checkpoint after each of `steps`, all of whose values are the step's number. Return the values of a new model."""
    state, manager = _build_state(runtime, [], initialize=True)
    initial = {name: tensor.clone() for name, tensor in state.collect_all_tensors().items()}
    for step in steps:
        for tensor in state.collect_all_tensors().values():
            tensor.fill_(step)
        manager.save_and_wait(Progress(step=step))
    return initial


def _damage(checkpoint: Path) -> None:
    path = checkpoint / "part-00000.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@contextmanager
def _fill_uninitialized_memory() -> Iterator[None]:
    """Let torch fill memory that it allocates without initializing it: with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # missing in torch's stub
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)
