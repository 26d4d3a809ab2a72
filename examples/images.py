"""Images in a folder for each kind, read as they are needed: a small network, the best of its checkpoints, rates for a larger batch.

The folder is written first, once on each node, of the handwritten digits that come with scikit-learn. Options stand below `script` in
images.yml.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from PIL import Image
from pydantic import BaseModel
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import swarmtrain.trainer
from datautils import Images
from swarmtrain.trainer import ramp, runtime


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    folder: Path
    epochs: int


def write(folder: Path) -> None:
    """Write train/KIND/NUMBER.png and held-out/KIND/NUMBER.png, every fifth image there, unless they are there already."""
    digits = load_digits()
    for number, (image, kind) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / ("train" if number % 5 else "held-out") / str(kind) / f"{number:04}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype("uint8")).save(path)


def network() -> nn.Module:
    """Return a network from 8 × 8 pixels to the likelihoods of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, device: torch.device) -> float:
    """Return how many of `images` are told right, in percent. The same on all ranks, which have the same model."""
    model.eval()
    right = [model(inputs.to(device)).argmax(dim=1).cpu() == labels for inputs, labels in DataLoader(images, batch_size=256)]
    model.train()
    return 100 * float(torch.cat(right).double().mean())


def main() -> None:
    with swarmtrain.trainer.run() as run:
        options = runtime.read_options(Options, run.here.config)
        with run.here.local_first():
            write(options.folder)
        train, held_out = (Images(options.folder / part, (8, 8), "L") for part in ("train", "held-out"))
        torch.manual_seed(run.here.config.trainer.seed)
        model = DistributedDataParallel(network().to(run.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        schedule = ramp(optimizer, 4, steps=40)  # found for 32 images a step, and there are 128
        run.keep(model=model, optimizer=optimizer, schedule=schedule)
        for inputs, wanted in run.steps(DataLoader(train, 32, shuffle=True), epochs=options.epochs, batch=128):
            loss = nn.functional.cross_entropy(model(inputs.to(run.device)), wanted.to(run.device)) * run.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            told = accuracy(model.module, held_out, run.device) if run.step % 20 == 0 else None
            run.log(loss=loss, rate=schedule.get_last_lr()[0], **({} if told is None else {"held_out_accuracy": told}))
            run.save_if_due(measured=told)
            if run.asked_to_leave:
                run.leave()
        if run.rank == 0:
            sys.stdout.write(f"held-out accuracy {accuracy(model.module, held_out, run.device):.1f} % of {len(held_out)}\n")


if __name__ == "__main__":
    main()
