"""A model that makes vectors, as sentence-transformers have it: beside the model's own files what is made of its tokens, step by step."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from swarmtrain.config.transformer_architecture import EmbeddingHeadConfig, Pooling
from swarmtrain.trainer.checkpoint.whole import Whole
from swarmtrain.trainer.huggingface import safetensors

_MODES = {Pooling.mean: "mean_tokens", Pooling.weighted_mean: "weightedmean_tokens", Pooling.last_token: "lasttoken"}
_NAMES = {"weight": "linear.weight", "bias": "linear.bias"}


def write(folder: Path, checkpoint: Whole, head: EmbeddingHeadConfig) -> None:
    """Write into `folder` what makes vectors of what the model there makes of tokens. Raises OSError."""
    shape = checkpoint.config.transformer_architecture
    widths = (shape.hidden_size, *head.proj_layers)
    steps = ["Transformer", "Pooling", *["Dense"] * len(head.proj_layers), "Normalize"]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(steps) if number)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(steps, paths, strict=True))
    ]
    _json(folder / "modules.json", modules)
    _json(folder / "sentence_bert_config.json", {"max_seq_length": shape.sequence_length, "do_lower_case": False})
    _json(folder / "config_sentence_transformers.json", {"similarity_fn_name": "cosine"})
    for path in paths[1:]:
        (folder / path).mkdir()
    modes = {f"pooling_mode_{name}": head.pooling is mode for mode, name in _MODES.items()}
    # An instruction is read, and is no part of what the vector is of.
    _json(folder / paths[1] / "config.json", {"word_embedding_dimension": shape.hidden_size, **modes, "include_prompt": False})
    for number, (path, (inputs, outputs)) in enumerate(zip(paths[2:-1], pairwise(widths), strict=True)):
        last = number == len(head.proj_layers) - 1
        after = "torch.nn.modules.linear.Identity" if last else "torch.nn.modules.activation.GELU"
        _json(folder / path / "config.json", {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": after})
        tensors = {
            theirs: checkpoint.parameter(f"head.projections.{number}.{ours}", (outputs, inputs) if ours == "weight" else (outputs,))
            for ours, theirs in _NAMES.items()
        }
        kinds = {name: safetensors.Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        safetensors.write(folder / path / "model.safetensors", kinds, tensors.__getitem__)


def _json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
