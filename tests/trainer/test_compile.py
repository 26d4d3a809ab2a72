"""Compiled blocks train like uncompiled ones, and a machine that cannot compile reports it before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import worlds
from torch import Tensor
from worlds import LocalWorld, compute_deviation, merge_config, read_validation_losses, run_training

from swarmtrain.config import Config
from swarmtrain.config.schema.objectives import PreferenceConfig
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer import start_runtime
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.objectives.preference import PreferenceObjective
from swarmtrain.trainer.parallel import compilation
from swarmtrain.trainer.parallel.compilation import compile_model

HYBRID_PIPELINE = {
    **{"pipe_parallel_size": 2, "activation_checkpointing_type": "every_pipe_stage"},
    **{"data_parallel_type": "hsdp", "data_parallel_shard_size": 2},
}


@pytest.mark.test_all_only("compiles with inductor")
@pytest.mark.parametrize(
    ("topology", "ranks"),
    [
        (HYBRID_PIPELINE, 4),
        ({"model_parallel_size": 2, "sequence_parallel": True, "activation_checkpointing_type": "selective"}, 2),
        ({"context_parallel_size": 2}, 2),
    ],
    ids=["pipeline x hsdp", "tensor and sequence parallel", "context parallel"],
)
def test_compiled_replicas_equal_one_process_that_is_not(
    tmp_path: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, topology: dict[str, Any], ranks: int
) -> None:
    """With activation checkpointing, which wraps the compiled blocks; whichever rank holds parameters and optimizer state."""
    monkeypatch.setattr(worlds, "TIMEOUT_SECONDS", 300.0)  # a C++ compiler on a busy machine
    base = merge_config(config, trainer={"train_iterations": 4, "eval_iterations": 1}, topology={"micro_batch_size": 4})
    one = run_training(tmp_path / "one", base)
    # Each rank compiles in its own process, and for a generic processor: that halves the compile time.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    compiled = merge_config(base, trainer={"compile": True}, topology=topology)
    assert compute_deviation(one, run_training(tmp_path / "compiled", compiled, ranks, cache)) < 1e-5
    assert compute_deviation(read_validation_losses(tmp_path / "one"), read_validation_losses(tmp_path / "compiled")) < 1e-5
    assert list((tmp_path / "cache").rglob("*.so")), "nothing was compiled"


def test_the_compiled_loss_equals_the_one_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, the last of which is incomplete, and with targets that do not count."""
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, **options, backend="aot_eager"))
    architecture = TransformerArchitectureConfig(vocab_size=40, hidden_size=32, num_layers=1, num_attention_heads=2, sequence_length=16)
    model = Transformer(architecture, 0).init_weights()
    model.loss_chunk_size = 12
    tokens = torch.arange(64).view(4, 16) % 40
    targets = tokens.roll(1, 1).masked_fill(tokens % 5 == 0, IGNORE_INDEX)
    eager = compute_loss_and_gradients(model, tokens, targets)
    eager_function = model.compute_token_losses
    compile_model(model, torch.device("cpu"))
    assert model.compute_token_losses is not eager_function
    compiled = compute_loss_and_gradients(model, tokens, targets)
    for name, expected in eager.items():
        assert torch.allclose(compiled[name], expected, rtol=1e-5, atol=1e-6), name
    with torch.no_grad():
        assert torch.equal(model(tokens, targets), eager["loss"]), "validation is not compiled"


def test_a_compiled_block_computes_the_reference_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, **options, backend="aot_eager", fullgraph=True))
    values = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "sequence_length": 16,
        "lora_config": {"rank": 4},
    }
    model = Transformer(TransformerArchitectureConfig(**values), 0).init_weights()
    model.objective = PreferenceObjective(PreferenceConfig())
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora." in name)
        if name.endswith(".b.weight"):
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    tokens = torch.arange(64).view(4, 16) % 40
    eager = compute_loss_and_gradients(model, tokens, tokens.roll(1, 1))
    compile_model(model, torch.device("cpu"))
    compiled = compute_loss_and_gradients(model, tokens, tokens.roll(1, 1))
    assert len(eager) > 1
    for name, expected in eager.items():
        assert torch.allclose(compiled[name], expected, rtol=1e-5, atol=1e-6), name


def compute_loss_and_gradients(model: Transformer, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None},
    }


def test_without_a_compiler(tmp_path: Path, config: dict[str, Any]) -> None:
    world = LocalWorld(tmp_path, merge_config(config, trainer={"compile": True}), 1, {"CXX": "no-such-compiler", "PATH": str(tmp_path)})
    assert world.wait() == [1]
    assert "config trainer.compile: needs a C++ compiler" in world.read_log()
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_single_process")
def test_training_is_compiled_on_gpus_unless_the_config_or_the_machine_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with start_runtime(Config()):
        monkeypatch.setattr(compilation, "check_compiler", lambda *_, **__: None)
        expected = {(None, gpu): True, (None, cpu): False, (True, gpu): True, (True, cpu): True, (False, gpu): False, (False, cpu): False}
        assert {key: compilation.should_compile(*key, warnings.append) for key in expected} == expected
        assert not warnings
        monkeypatch.undo()
        assert not compilation.should_compile(None, gpu, warnings.append)  # this machine has no Triton
    (warning,) = warnings
    assert warning.startswith(
        "training is not compiled, and so slower: rank 0 needs Triton, which is not installed; run pip install triton"
    )
