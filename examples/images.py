"""Image classification from a folder per class, with images read on demand: a small network, its best checkpoint, a scaled learning
rate.

The folder is written first, once on each node, from the handwritten digits that come with scikit-learn. Options are below `script` in
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
from datautils import ImageFolderDataset
from swarmtrain.trainer import build_linear_scaling_warmup, read_options


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    folder: Path
    epochs: int


def write_dataset(folder: Path) -> None:
    """Write train/CLASS/NUMBER.png and, for every fifth image, validation/CLASS/NUMBER.png, unless they exist."""
    digits = load_digits()
    for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / ("train" if number % 5 else "validation") / str(digit) / f"{number:04}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).astype("uint8")).save(path)


def build_network() -> nn.Module:
    """Return a network from 8 × 8 pixels to the logits of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip


@torch.no_grad()
def compute_accuracy(model: nn.Module, images: ImageFolderDataset, device: torch.device) -> float:
    """Return the percentage of `images` that are classified correctly. The same on all ranks, which have the same model."""
    model.eval()
    is_correct = [model(inputs.to(device)).argmax(dim=1).cpu() == labels for inputs, labels in DataLoader(images, batch_size=256)]
    model.train()
    return 100 * float(torch.cat(is_correct).double().mean())


def main() -> None:
    with swarmtrain.trainer.run() as run:
        options = read_options(Options, run.runtime.config)
        with run.runtime.local_rank_zero_first():
            write_dataset(options.folder)
        train, validation = (ImageFolderDataset(options.folder / split, (8, 8), "L") for split in ("train", "validation"))
        torch.manual_seed(run.runtime.config.trainer.seed)
        model = DistributedDataParallel(build_network().to(run.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        schedule = build_linear_scaling_warmup(optimizer, 4, steps=40)  # tuned for 32 images per step, and there are 128
        run.register_for_checkpointing(model=model, optimizer=optimizer, schedule=schedule)
        for inputs, targets in run.steps(DataLoader(train, 32, shuffle=True), epochs=options.epochs, global_batch_size=128):
            loss = nn.functional.cross_entropy(model(inputs.to(run.device)), targets.to(run.device)) * run.loss_weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            validation_accuracy = compute_accuracy(model.module, validation, run.device) if run.step % 20 == 0 else None
            run.log(
                loss=loss,
                rate=schedule.get_last_lr()[0],
                **({} if validation_accuracy is None else {"validation_accuracy": validation_accuracy}),
            )
            run.save_if_due(metric=validation_accuracy)
            if run.stop_requested:
                run.save_and_exit()
        if run.rank == 0:
            sys.stdout.write(f"validation accuracy {compute_accuracy(model.module, validation, run.device):.1f} % of {len(validation)}\n")


if __name__ == "__main__":
    main()
