"""A Hugging Face language model, built from its config and trained on the source text of the standard library, one token per byte.

A plain DistributedDataParallel script, with the five lines that make it resumable. Nothing is downloaded. At the end it writes a folder
that transformers loads. Options are below `script` in hugging_face.yml.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

import datautils
import swarmtrain.trainer
from swarmtrain.trainer import instantiate, read_options
from swarmtrain.trainer.data.memory_map import MemoryMap


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    model: dict[str, object]
    """A config class of transformers, and its arguments."""
    optimizer: dict[str, object]
    length: int
    """Bytes per sample."""
    batch_size: int
    """Samples per rank and batch."""
    steps: int
    output: Path
    """Where the model is written at the end."""


class TokenWindows(Dataset[Tensor]):
    """A token file, split into samples of `length` tokens."""

    def __init__(self, prefix: Path, length: int) -> None:
        self.tokens, self.length = MemoryMap(prefix).tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, number: int) -> Tensor:
        return torch.from_numpy(self.tokens[number * self.length : (number + 1) * self.length].astype(np.int64))


@torch.no_grad()
def compute_loss(model: PreTrainedModel, data: TokenWindows, samples: int, device: torch.device) -> float:
    """Return the mean loss of `model`, in nats per token, over `samples` samples spread evenly over `data`."""
    model.eval()
    batch = torch.stack([data[number * len(data) // samples] for number in range(samples)]).to(device)
    return float(torch.stack([model(input_ids=chunk, labels=chunk).loss for chunk in batch.split(32)]).mean())


def main() -> None:
    with swarmtrain.trainer.run() as run:
        config = run.runtime.config
        options = read_options(Options, config)
        training, validation = (
            datautils.require_single_prefix(config.data.data_prefixes),
            datautils.require_single_prefix(config.data.validation_data_prefixes),
        )
        with run.runtime.local_rank_zero_first():
            datautils.write_python_sources(training, validation)
        torch.manual_seed(config.trainer.seed)
        model = AutoModelForCausalLM.from_config(instantiate(options.model)).to(run.device)
        replica = DistributedDataParallel(model)
        optimizer = instantiate(options.optimizer, model.parameters())
        loader = DataLoader(TokenWindows(training, options.length), options.batch_size, shuffle=True)
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        for tokens in run.steps(loader, max_steps=options.steps):
            inputs = tokens.to(run.device)
            loss = replica(input_ids=inputs, labels=inputs).loss * run.loss_weight
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.log(loss=loss)
            run.save_if_due()
            if run.stop_requested:
                run.save_and_exit()
        if run.rank == 0:
            validation_loss, bigram_loss = (
                compute_loss(model, TokenWindows(validation, options.length), 256, run.device),
                datautils.compute_bigram_loss(training, validation),
            )
            sys.stdout.write(f"validation loss {validation_loss:.2f} nats per byte; byte-bigram baseline {bigram_loss:.2f}\n")
            model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
