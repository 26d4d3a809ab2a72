"""Images and what is said of them: a CLIP of Hugging Face's, from its config, learns which text belongs to which image (Radford et al.
2021, arXiv 2103.00020), and then tells digits by the nearest of ten texts.

The folder is written first, once on each node, of the handwritten digits that come with scikit-learn. Options stand below `script` in
captions.yml.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from pydantic import BaseModel
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import CLIPConfig, CLIPModel

import swarmtrain.trainer
from datautils import Captioned
from swarmtrain.trainer import runtime

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TOLD = "the digit {}", "a {}", "by hand a {}", "somebody wrote {}", "this is a {}"
_LENGTH, _END = 24, 256
"""Tokens of a text: bytes, and what ends it."""


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    folder: Path
    model: dict[str, dict[str, int]]
    """What transformers.CLIPConfig is given."""
    epochs: int


def write(folder: Path) -> None:
    """Write train and held-out, each with images and metadata.jsonl, unless they are there already."""
    digits = load_digits()
    for part in ("train", "held-out"):
        told = folder / part / "metadata.jsonl"
        if told.exists():
            continue
        told.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, (image, kind) in enumerate(zip(digits.images, digits.target, strict=True)):
            if (number % 5 > 0) is (part == "train"):
                Image.fromarray((image * 15).astype("uint8")).save(told.with_name(f"{number:04}.png"))
                lines.append({"file_name": f"{number:04}.png", "text": TOLD[number % len(TOLD)].format(NAMES[kind])})
        told.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def tokens(texts: Sequence[str]) -> Tensor:
    """Return the tokens of texts (texts, length)."""
    rows = [list(text.encode()[: _LENGTH - 1]) for text in texts]
    return torch.tensor([row + [_END] * (_LENGTH - len(row)) for row in rows])


@torch.no_grad()
def accuracy(model: CLIPModel, images: Captioned, device: torch.device) -> float:
    """Return of how many of `images` the nearest of ten texts is right, in percent."""
    model.eval()
    texts = tokens([TOLD[0].format(name) for name in NAMES]).to(device)
    right = []
    for pixels, told in DataLoader(images, batch_size=256):
        nearest = model(input_ids=texts, pixel_values=pixels.to(device)).logits_per_image.argmax(dim=1)
        right += [NAMES[int(found)] in text.split() for found, text in zip(nearest, told, strict=True)]
    model.train()
    return 100 * sum(right) / len(right)


def main() -> None:
    with swarmtrain.trainer.run() as run:
        options = runtime.read_options(Options, run.here.config)
        with run.here.local_first():
            write(options.folder)
        train, held_out = (Captioned(options.folder / part, (8, 8), "L") for part in ("train", "held-out"))
        torch.manual_seed(run.here.config.trainer.seed)
        model = CLIPModel(CLIPConfig(**options.model)).to(run.device)
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        run.keep(model=model, optimizer=optimizer)
        for pixels, texts in run.steps(DataLoader(train, 64, shuffle=True), epochs=options.epochs, batch=128):
            given, told = pixels.to(run.device), tokens(texts).to(run.device)
            near = replica(input_ids=told, pixel_values=given).logits_per_image
            # An image belongs to each text that says the same.
            same = torch.tensor([[a.split()[-1] == b.split()[-1] for b in texts] for a in texts], device=run.device).float()
            wanted = same / same.sum(dim=1, keepdim=True)
            loss = (nn.functional.cross_entropy(near, wanted) + nn.functional.cross_entropy(near.T, wanted)) / 2 * run.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            run.save_if_due()
            if run.asked_to_leave:
                run.leave()
        if run.rank == 0:
            sys.stdout.write(f"held-out accuracy {accuracy(model, held_out, run.device):.1f} % of {len(held_out)}\n")


if __name__ == "__main__":
    main()
