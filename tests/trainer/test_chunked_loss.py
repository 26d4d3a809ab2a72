"""The chunked loss equals the unchunked one under every parallelism, and takes less memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import compute_deviation, merge_config, read_validation_losses, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig, UmupConfig
from swarmtrain.trainer import Transformer
from swarmtrain.trainer.memory import AllocationKind
from swarmtrain.trainer.memory.simulation import simulate_memory_peaks
from swarmtrain.trainer.model.chunked_loss import compute_default_chunk_size
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX


@pytest.mark.parametrize(("tied", "umup"), [(True, False), (False, True)])
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_loss_and_gradients_are_those_of_all_at_once(kind: torch.dtype, tolerance: float, *, tied: bool, umup: bool) -> None:
    architecture = TransformerArchitectureConfig(
        hidden_size=32, num_layers=1, sequence_length=16, weight_tying=tied, umup=UmupConfig(enable=umup)
    )
    model = Transformer(architecture, 1).init_weights().to(kind)
    tokens = torch.randint(256, (3, 16), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[0, 5:] = IGNORE_INDEX

    def compute_loss_and_gradients(chunk: int | None) -> list[Tensor]:
        model.loss_chunk_size = chunk
        model.zero_grad()
        loss = model(tokens, targets)
        (loss / 7).backward()
        with torch.no_grad():
            assert torch.allclose(model(tokens, targets), loss, rtol=tolerance, atol=0)
        return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

    whole = compute_loss_and_gradients(None)
    for chunk in (1, 10, 47):
        for one, other in zip(compute_loss_and_gradients(chunk), whole, strict=True):
            assert float((one - other).norm() / other.norm()) < tolerance


@pytest.mark.parametrize(("vocabulary_size", "expected"), [(256_000, 2048), (128_256, 2048), (50_304, 4096), (32_000, 8192), (1, 2**28)])
def test_chunks_have_about_the_same_number_of_logits_with_any_vocabulary(vocabulary_size: int, expected: int) -> None:
    assert compute_default_chunk_size(vocabulary_size) == expected


@pytest.mark.test_all_only("training runs; the gate compares loss and gradients")
def test_sharded_it_is_the_same_run(tmp_path: Path, config: dict[str, Any]) -> None:
    """In fp64, where no rounding explains a difference. 64 tokens make chunks of 24, 24 and 16."""
    base = merge_config(config, transformer_architecture={"precision": "float64"}, trainer={"train_iterations": 4, "eval_iterations": 1})
    chunked = merge_config(base, trainer={"loss_chunk_size": 24})
    one = run_training(tmp_path / "one", base)
    layers = merge_config(chunked, topology={"model_parallel_size": 2, "sequence_parallel": True, "pipe_parallel_size": 2})
    assert compute_deviation(one, run_training(tmp_path / "layers", layers, 4)) < 1e-12
    assert (
        compute_deviation(one, run_training(tmp_path / "fsdp", merge_config(chunked, topology={"data_parallel_type": "fsdp"}), 2)) < 1e-12
    )
    assert compute_deviation(read_validation_losses(tmp_path / "one"), read_validation_losses(tmp_path / "layers")) < 1e-12


def test_a_simulation_shows_the_gain(config: dict[str, Any]) -> None:
    def logits(size: int) -> int:
        sections = {"trainer": {"loss_chunk_size": size}, "topology": {"micro_batch_size": 12}}
        wanted = merge_config(config, transformer_architecture={"vocab_size": 4096, "sequence_length": 128}, **sections)
        return simulate_memory_peaks(Config.model_validate_json(json.dumps(wanted)), 1, 0)[1].breakdown.get(AllocationKind.logits, 0)

    assert logits(10**6) == 12 * 128 * 4096 * 4
    assert logits(128) <= 2 * 128 * 4096 * 4
