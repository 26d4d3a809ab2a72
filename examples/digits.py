"""Handwritten digit classification: a plain DistributedDataParallel script, with the five lines that make it resumable.

It reads scikit-learn's own dataset, 1,797 images of 8 × 8 pixels; every fifth is for validation. Options are below `script` in
digits.yml.
"""

from __future__ import annotations

import sys

import torch
from pydantic import BaseModel
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import swarmtrain.trainer
from swarmtrain.trainer import instantiate, read_options


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    optimizer: dict[str, object]
    batch_size: int
    """Images per rank and batch."""
    epochs: int


def build_network() -> nn.Module:
    """Return a network from 8 × 8 pixels to the logits of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    is_validation = torch.arange(len(labels)) % 5 == 0
    with swarmtrain.trainer.run() as run:
        options = read_options(Options, run.runtime.config)
        torch.manual_seed(run.runtime.config.trainer.seed)
        model = DistributedDataParallel(build_network().to(run.device))
        optimizer = instantiate(options.optimizer, model.parameters())
        loader = DataLoader(TensorDataset(images[~is_validation], labels[~is_validation]), options.batch_size, shuffle=True)
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        for inputs, targets in run.steps(loader, epochs=options.epochs):
            loss = nn.functional.cross_entropy(model(inputs.to(run.device)), targets.to(run.device)) * run.loss_weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            run.save_if_due()
            if run.stop_requested:
                run.save_and_exit()
        model.eval()
        with torch.no_grad():
            is_correct = model(images[is_validation].to(run.device)).argmax(dim=1).cpu() == labels[is_validation]
        if run.rank == 0:
            sys.stdout.write(f"validation accuracy {100 * is_correct.double().mean():.1f} %\n")


if __name__ == "__main__":
    main()
