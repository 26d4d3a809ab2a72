"""Handwritten digits, told apart by a small network: a plain DistributedDataParallel script, and the five lines that make it go on.

Reads scikit-learn's own set, 1,797 images of 8 × 8; every fifth is held out. Its options stand below `script` in digits.yml.
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
from swarmtrain.trainer import make, runtime


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    optimizer: dict[str, object]
    batch_size: int
    """Images of a rank at a time."""
    epochs: int


def network() -> nn.Module:
    """Return a network from 8 × 8 pixels to the likelihoods of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    with swarmtrain.trainer.run() as run:
        options = runtime.read_options(Options, run.here.config)
        torch.manual_seed(run.here.config.trainer.seed)
        model = DistributedDataParallel(network().to(run.device))
        optimizer = make(options.optimizer, model.parameters())
        loader = DataLoader(TensorDataset(images[~held_out], labels[~held_out]), options.batch_size, shuffle=True)
        run.keep(model=model, optimizer=optimizer)
        for inputs, wanted in run.steps(loader, epochs=options.epochs):
            loss = nn.functional.cross_entropy(model(inputs.to(run.device)), wanted.to(run.device)) * run.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            run.save_if_due()
            if run.asked_to_leave:
                run.leave()
        model.eval()
        with torch.no_grad():
            right = model(images[held_out].to(run.device)).argmax(dim=1).cpu() == labels[held_out]
        if run.rank == 0:
            sys.stdout.write(f"held-out accuracy {100 * right.double().mean():.1f} %\n")


if __name__ == "__main__":
    main()
