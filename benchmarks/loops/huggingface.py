"""Hugging Face's Trainer with the Llama model of transformers and default settings: SDPA attention, fused AdamW, gradient clipping at 1.

This program does not import swarmtrain, so it reads the config as plain JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.loops.step_control import StepControl
from benchmarks.loops.token_data import open_token_windows


class _TokenDataset(torch.utils.data.Dataset[Any]):
    def __init__(self, prefix: str, sequence_length: int) -> None:
        self._windows = open_token_windows(Path(prefix), sequence_length)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # The model shifts the labels itself, so its loss covers one token fewer.
        tokens = torch.from_numpy(self._windows[index][:-1].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class _StepControlCallback(TrainerCallback):
    def __init__(self) -> None:
        self._step_control = StepControl()

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._step_control.step()


def main() -> None:
    config = json.loads(sys.argv[1])
    shape, precision = config["transformer_architecture"], config["transformer_architecture"]["precision"]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape["vocab_size"],
            hidden_size=shape["hidden_size"],
            intermediate_size=int(shape["hidden_size"] * shape["mlp_factor"]),
            num_hidden_layers=shape["num_layers"],
            num_attention_heads=shape["num_attention_heads"],
            max_position_embeddings=shape["sequence_length"],
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=1_000_000,
        per_device_train_batch_size=config["topology"]["global_batch_size"] // int(os.environ.get("WORLD_SIZE", "1")),
        learning_rate=1e-3,
        bf16=precision == "bfloat16",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = _TokenDataset(config["data"]["data_prefixes"][0], shape["sequence_length"])
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[_StepControlCallback()]).train()


if __name__ == "__main__":
    main()
