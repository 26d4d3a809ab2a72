"""What LoRA has learned, without the model: a folder as Hugging Face's PEFT has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from swarmtrain.config.huggingface import family
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import whole
from swarmtrain.trainer.huggingface import safetensors
from swarmtrain.trainer.huggingface.export import written
from swarmtrain.trainer.huggingface.names import Tensors
from swarmtrain.trainer.model.beside import LORA
from swarmtrain.trainer.model.transformer import Transformer

_AROUND = "base_model.model"


def export_adapter(source: Path, output: Path, *, dtype: str | None) -> dict[str, Any]:
    """Write what LoRA has learned in a checkpoint, or the newest of a run's folder, as the folder `output`.

    Return what `export` does. Raises CheckpointError as that does, and if there is no LoRA, or it stands beside layers that are one in
    the files of this family.
    """
    checkpoint = whole.find(source)
    shape = checkpoint.config.transformer_architecture
    if shape.lora_config is None:
        raise CheckpointError("has no LoRA", place=str(checkpoint.path), hint="without --adapter all of the model is written")
    trainer = checkpoint.config.trainer
    beyond = {
        "trainer.finetunable_parameters": trainer.finetunable_parameters is not None,
        "trainer.finetunable_token_ids": bool(trainer.finetunable_token_ids),
        "transformer_architecture.embedding_head_config": shape.embedding_head_config is not None,
    }
    if said := [name for name, there in beyond.items() if there]:
        reason = f"has more than LoRA that was trained, or may have: {said[0]} is set"
        raise CheckpointError(reason, place=str(checkpoint.path), hint="without --adapter all of the model is written")
    kind = family(shape)
    sizes = {name: parameter.shape for name, parameter in Transformer(shape, 0).named_parameters()}
    tensors = Tensors(kind, shape, {name: size for name, size in sizes.items() if LORA not in name})
    ours: dict[str, str] = {}
    for name in (name for name in sizes if LORA in name):
        layer, _, matrix = name.removesuffix(".weight").replace(LORA, ".").rpartition(".")
        theirs = tensors.alone(f"{layer}.weight")
        if theirs is None:
            raise CheckpointError(
                f"has LoRA beside {layer}, which is a part of another tensor in files of {kind.name}",
                place=str(checkpoint.path),
                hint="export without --adapter: it is merged then",
            )
        ours[f"{_AROUND}.{theirs.removesuffix('.weight')}.lora_{matrix.upper()}.weight"] = name
    kept = safetensors.dtype(dtype) or torch.float32
    kinds = {theirs: safetensors.Kind(kept, tuple(sizes[name])) for theirs, name in ours.items()}
    base = checkpoint.config.trainer.init_from or next(iter(checkpoint.config.trainer.load_dir), None)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": shape.lora_config.rank,
        "lora_alpha": shape.lora_config.alpha,
        "lora_dropout": shape.lora_config.dropout,
        "bias": "none",
        "target_modules": sorted({theirs.split(".lora_")[0].rpartition(".")[2] for theirs in ours}),
        "inference_mode": True,
    }
    with written(output) as aside:
        (aside / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        file = "adapter_model.safetensors"
        safetensors.write(aside / file, kinds, lambda theirs: checkpoint.parameter(ours[theirs], sizes[ours[theirs]]))
    parameters = sum(sizes[name].numel() for name in ours.values())
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.content.step,
        "family": kind.name,
        "parameters": parameters,
        "files": [file],
    }
