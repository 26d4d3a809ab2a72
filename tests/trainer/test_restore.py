"""A model and its optimizer after a checkpoint that turned out to be damaged while it was loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swarmtrain.config import Config
from swarmtrain.trainer import Optimizer, Transformer, parallelize, start_runtime
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.restore import restore_training_state
from swarmtrain.trainer.checkpoint.training_state import TrainingState


@pytest.mark.parametrize("initialize", [True, False])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_damaged_checkpoint_leaves_no_trace(tmp_path: Path, precision: str, *, initialize: bool) -> None:
    """The values that a script has set stay; a model without values gets its initial ones. The optimizer is as new."""
    sections = {
        "transformer_architecture": {
            "hidden_size": 16,
            "num_layers": 1,
            "num_attention_heads": 2,
            "sequence_length": 8,
            "precision": precision,
        },
        "trainer": {"save_dir": str(tmp_path)},
    }
    config = Config.model_validate_json(json.dumps(sections))
    warnings: list[str] = []
    with start_runtime(config) as runtime:

        def build(*, initialize: bool) -> tuple[TrainingState, CheckpointManager]:
            model = parallelize(Transformer(config.transformer_architecture, 1), runtime, initialize=initialize)
            state = TrainingState(model, Optimizer(model, config))
            return state, CheckpointManager(runtime, state, "", warnings.append)

        state, manager = build(initialize=True)
        initial = {name: tensor.clone() for name, tensor in state.collect_all_tensors().items()}
        for tensor in state.collect_all_tensors().values():
            tensor.fill_(3)
        manager.save_and_wait(Progress(step=1))
        path = tmp_path / "step-00000001" / "part-00000.bin"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

        state, manager = build(initialize=initialize)
        if initialize:
            for parameter in state.model.parameters.values():
                parameter.detach().fill_(7)
        assert restore_training_state(runtime, manager, state, "", warnings.append) == (Progress(), None)
        assert any("part-00000.bin is corrupt" in line for line in warnings)
        for name, tensor in state.collect_all_tensors().items():
            is_set_by_script = initialize and name.startswith("model/")
            assert torch.equal(tensor, torch.full_like(tensor, 7) if is_set_by_script else initial[name]), name
