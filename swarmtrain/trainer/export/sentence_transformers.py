"""Export of an embedding model for sentence-transformers: write the modules that follow the transformer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from swarmtrain.config.schema.transformer_architecture import EmbeddingHeadConfig, Pooling
from swarmtrain.trainer.checkpoint.consolidated import ConsolidatedCheckpoint
from swarmtrain.trainer.huggingface import safetensors

_POOLING_MODES = {Pooling.mean: "mean_tokens", Pooling.weighted_mean: "weightedmean_tokens", Pooling.last_token: "lasttoken"}
_DENSE_NAMES = {"weight": "linear.weight", "bias": "linear.bias"}


def write_modules(folder: Path, checkpoint: ConsolidatedCheckpoint, head: EmbeddingHeadConfig) -> None:
    """Write to `folder` the modules that compute embeddings from the transformer's output: pooling, projections, normalization.

    Raises OSError if a file cannot be written.
    """
    architecture = checkpoint.config.transformer_architecture
    widths = (architecture.hidden_size, *head.proj_layers)
    module_kinds = ["Transformer", "Pooling", *["Dense"] * len(head.proj_layers), "Normalize"]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(module_kinds) if number)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(module_kinds, paths, strict=True))
    ]
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": architecture.sequence_length, "do_lower_case": False})
    _write_json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})
    for path in paths[1:]:
        (folder / path).mkdir()
    modes = {f"pooling_mode_{name}": head.pooling is mode for mode, name in _POOLING_MODES.items()}
    # The tokens of an instruction (prompt) are part of the input, but are excluded from pooling.
    _write_json(folder / paths[1] / "config.json", {"word_embedding_dimension": architecture.hidden_size, **modes, "include_prompt": False})
    for number, (path, (inputs, outputs)) in enumerate(zip(paths[2:-1], pairwise(widths), strict=True)):
        is_last = number == len(head.proj_layers) - 1
        activation = "torch.nn.modules.linear.Identity" if is_last else "torch.nn.modules.activation.GELU"
        _write_json(
            folder / path / "config.json", {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
        )
        tensors = {
            huggingface_name: checkpoint.load_parameter(
                f"head.projections.{number}.{our_name}", (outputs, inputs) if our_name == "weight" else (outputs,)
            )
            for our_name, huggingface_name in _DENSE_NAMES.items()
        }
        specs = {name: safetensors.TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        safetensors.write_tensors(folder / path / "model.safetensors", specs, tensors.__getitem__)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
