"""Export of LoRA weights without the base model, in the format of Hugging Face's PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from swarmtrain.config.huggingface_config import find_model_family
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.export.checkpoint_export import write_folder_atomically
from swarmtrain.trainer.huggingface import safetensors
from swarmtrain.trainer.huggingface.tensor_names import TensorMapping
from swarmtrain.trainer.model.peft import LORA_KEY
from swarmtrain.trainer.model.transformer import Transformer

_PEFT_PREFIX = "base_model.model"


def export_lora_adapter(source: Path, output: Path, *, dtype: str | None) -> dict[str, Any]:
    """Write the LoRA weights of the checkpoint `source`, or of the newest checkpoint in the save_dir `source`, to the folder `output`.

    `dtype`: dtype of the exported weights; None: float32. Return a report with checkpoint, step, model family, number of parameters and
    files.

    Raises CheckpointError if there is no checkpoint, if it has no LoRA weights or has other trained parameters, if a layer with LoRA is
    part of a fused tensor in this model family, or if `output` exists or cannot be written.
    """
    checkpoint = consolidated.find_checkpoint(source)
    architecture = checkpoint.config.transformer_architecture
    if architecture.lora_config is None:
        raise CheckpointError("has no LoRA weights", place=str(checkpoint.path), hint="omit --adapter to export the full model")
    trainer = checkpoint.config.trainer
    also_trained = {
        "trainer.finetunable_parameters": trainer.finetunable_parameters is not None,
        "trainer.finetunable_token_ids": bool(trainer.finetunable_token_ids),
        "transformer_architecture.embedding_head_config": architecture.embedding_head_config is not None,
    }
    if conflicts := [name for name, is_set in also_trained.items() if is_set]:
        reason = f"may have trained parameters other than LoRA weights: {conflicts[0]} is set"
        raise CheckpointError(reason, place=str(checkpoint.path), hint="omit --adapter to export the full model")
    model_family = find_model_family(architecture)
    sizes = {name: parameter.shape for name, parameter in Transformer(architecture, 0).named_parameters()}
    mapping = TensorMapping(model_family, architecture, {name: size for name, size in sizes.items() if LORA_KEY not in name})
    our_names: dict[str, str] = {}
    for name in (name for name in sizes if LORA_KEY in name):
        layer, _, matrix = name.removesuffix(".weight").replace(LORA_KEY, ".").rpartition(".")
        theirs = mapping.find_unfused_tensor_name(f"{layer}.weight")
        if theirs is None:
            raise CheckpointError(
                f"has LoRA on {layer}, which is part of a fused tensor in files of {model_family.model_type}",
                place=str(checkpoint.path),
                hint="export without --adapter to merge it",
            )
        our_names[f"{_PEFT_PREFIX}.{theirs.removesuffix('.weight')}.lora_{matrix.upper()}.weight"] = name
    export_dtype = safetensors.parse_dtype(dtype) or torch.float32
    specs = {theirs: safetensors.TensorSpec(export_dtype, tuple(sizes[name])) for theirs, name in our_names.items()}
    base_model = checkpoint.config.trainer.init_from or next(iter(checkpoint.config.trainer.load_dir), None)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base_model is None else str(base_model),
        "r": architecture.lora_config.rank,
        "lora_alpha": architecture.lora_config.alpha,
        "lora_dropout": architecture.lora_config.dropout,
        "bias": "none",
        "target_modules": sorted({theirs.split(".lora_")[0].rpartition(".")[2] for theirs in our_names}),
        "inference_mode": True,
    }
    with write_folder_atomically(output) as staging:
        (staging / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        file = "adapter_model.safetensors"
        safetensors.write_tensors(
            staging / file, specs, lambda theirs: checkpoint.load_parameter(our_names[theirs], sizes[our_names[theirs]])
        )
    parameters = sum(sizes[name].numel() for name in our_names.values())
    return {
        "checkpoint": str(checkpoint.path),
        "step": checkpoint.manifest.step,
        "family": model_family.model_type,
        "parameters": parameters,
        "files": [file],
    }
