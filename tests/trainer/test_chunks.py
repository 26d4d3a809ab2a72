"""A loss made in chunks is the loss made at once, however the run is divided, and takes less memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import changed, deviation, held_out, train

from swarmtrain.config import Config
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig, UmupConfig
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.memory import Kind
from swarmtrain.trainer.memory.rehearsal import rehearse
from swarmtrain.trainer.model.targets import IGNORE


@pytest.mark.parametrize(("tied", "umup"), [(True, False), (False, True)])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_loss_and_gradients_are_those_of_all_at_once(kind: torch.dtype, tolerance: float, *, tied: bool, umup: bool) -> None:
    shape = TransformerArchitectureConfig(hidden_size=32, num_layers=1, sequence_length=16, weight_tying=tied, umup=UmupConfig(enable=umup))
    model = Transformer(shape, 1).fill().to(kind)
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[0, 5:] = IGNORE

    def made(chunk: int | None) -> list[Tensor]:
        model.loss_chunk = chunk
        model.zero_grad()
        loss = model(tokens, targets)
        (loss / 7).backward()
        with torch.no_grad():
            assert torch.allclose(model(tokens, targets), loss, rtol=tolerance, atol=0)
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

    whole = made(None)
    for chunk in (1, 10, 47):
        for one, other in zip(made(chunk), whole, strict=True):
            assert float((one - other).norm() / other.norm()) < tolerance


@pytest.mark.test_all_only("training runs; the gate compares loss and gradients")
def test_divided_it_is_the_same_run(tmp_path: Path, config: dict[str, Any]) -> None:
    """In fp64, where what is left is no rounding: chunks of 64 tokens have 24 and 16 over."""
    base = changed(config, transformer_architecture={"precision": "float64"}, trainer={"train_iterations": 4, "eval_iterations": 1})
    chunked = changed(base, trainer={"loss_chunk_size": 24})
    one = train(tmp_path / "one", base)
    layers = changed(chunked, topology={"model_parallel_size": 2, "sequence_parallel": True, "pipe_parallel_size": 2})
    assert deviation(one, train(tmp_path / "layers", layers, 4)) < 1e-12
    assert deviation(one, train(tmp_path / "fsdp", changed(chunked, topology={"data_parallel_type": "fsdp"}), 2)) < 1e-12
    assert deviation(held_out(tmp_path / "one"), held_out(tmp_path / "layers")) < 1e-12


def test_a_rehearsal_tells_the_gain(config: dict[str, Any]) -> None:
    def logits(size: int) -> int:
        sections = {"trainer": {"loss_chunk_size": size}, "topology": {"micro_batch_size": 12}}
        wanted = changed(config, transformer_architecture={"vocab_size": 4096, "sequence_length": 128}, **sections)
        return rehearse(Config.model_validate_json(json.dumps(wanted)), 1, 0)[1].parts.get(Kind.logits, 0)

    assert logits(10**6) == 12 * 128 * 4096 * 4
    assert logits(128) <= 2 * 128 * 4096 * 4
