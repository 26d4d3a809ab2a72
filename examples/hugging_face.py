"""A Hugging Face model that is built from its config, and learns the standard library's source text, a byte a token.

A plain DistributedDataParallel script and the five lines that make it go on. Nothing is downloaded. At the end it writes a folder
that transformers loads. Its options stand below `script` in hugging_face.yml.
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
from swarmtrain.trainer import make, runtime
from swarmtrain.trainer.data.memory_map import MemoryMap


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    model: dict[str, object]
    """A config class of transformers, and what it is given."""
    optimizer: dict[str, object]
    length: int
    """Bytes of a sample."""
    batch_size: int
    """Samples of a rank at a time."""
    steps: int
    output: Path
    """Where the model is written at the end."""


class Windows(Dataset[Tensor]):
    """A token file, cut into samples of `length` tokens."""

    def __init__(self, prefix: Path, length: int) -> None:
        self.tokens, self.length = MemoryMap(prefix).tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, number: int) -> Tensor:
        return torch.from_numpy(self.tokens[number * self.length : (number + 1) * self.length].astype(np.int64))


@torch.no_grad()
def loss_over(model: PreTrainedModel, data: Windows, samples: int, device: torch.device) -> float:
    """Return the mean loss of `model`, in nats per token, over `samples` of `data`, from its first part to its last."""
    model.eval()
    chosen = torch.stack([data[number * len(data) // samples] for number in range(samples)]).to(device)
    return float(torch.stack([model(input_ids=part, labels=part).loss for part in chosen.split(32)]).mean())


def main() -> None:
    with swarmtrain.trainer.run() as run:
        config = run.here.config
        options = runtime.read_options(Options, config)
        training, held_out = datautils.only(config.data.data_prefixes), datautils.only(config.data.validation_data_prefixes)
        with run.here.local_first():
            datautils.python_sources(training, held_out)
        torch.manual_seed(config.trainer.seed)
        model = AutoModelForCausalLM.from_config(make(options.model)).to(run.device)
        replica = DistributedDataParallel(model)
        optimizer = make(options.optimizer, model.parameters())
        loader = DataLoader(Windows(training, options.length), options.batch_size, shuffle=True)
        run.keep(model=model, optimizer=optimizer)
        for tokens in run.steps(loader, steps=options.steps):
            given = tokens.to(run.device)
            loss = replica(input_ids=given, labels=given).loss * run.weight
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            run.log(loss=loss)
            run.save_if_due()
            if run.asked_to_leave:
                run.leave()
        if run.rank == 0:
            after, table = loss_over(model, Windows(held_out, options.length), 256, run.device), datautils.bigram_loss(training, held_out)
            sys.stdout.write(f"held-out loss {after:.2f} nats per byte; a byte-bigram table: {table:.2f}\n")
            model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
