"""Contrastive image-text training: CLIP (Radford et al. 2021, arXiv 2103.00020), then classification of digits by the nearest of ten
texts.

The model is Hugging Face's CLIP, built from its config. The folder is written first, once on each node, from the handwritten digits
that come with scikit-learn. Options are below `script` in captions.yml.
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
from datautils import CaptionedImageDataset
from swarmtrain.trainer import read_options

DIGIT_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEXT_TEMPLATES = "the digit {}", "a {}", "by hand a {}", "somebody wrote {}", "this is a {}"
_TEXT_LENGTH, _END_TOKEN = 24, 256
"""Tokens of a text (its bytes and the padding), and the token that ends it."""


class Options(BaseModel, extra="forbid"):
    """The config's `script` key."""

    folder: Path
    model: dict[str, dict[str, int]]
    """Arguments of transformers.CLIPConfig."""
    epochs: int


def write_dataset(folder: Path) -> None:
    """Write the splits train and validation, each with images and metadata.jsonl, unless they exist."""
    digits = load_digits()
    for split in ("train", "validation"):
        metadata_path = folder / split / "metadata.jsonl"
        if metadata_path.exists():
            continue
        metadata_path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            if (number % 5 > 0) is (split == "train"):
                Image.fromarray((image * 15).astype("uint8")).save(metadata_path.with_name(f"{number:04}.png"))
                lines.append(
                    {"file_name": f"{number:04}.png", "text": TEXT_TEMPLATES[number % len(TEXT_TEMPLATES)].format(DIGIT_NAMES[digit])}
                )
        metadata_path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def tokenize(texts: Sequence[str]) -> Tensor:
    """Return the tokens of `texts`, of shape (texts, length)."""
    rows = [list(text.encode()[: _TEXT_LENGTH - 1]) for text in texts]
    return torch.tensor([row + [_END_TOKEN] * (_TEXT_LENGTH - len(row)) for row in rows])


@torch.no_grad()
def compute_accuracy(model: CLIPModel, images: CaptionedImageDataset, device: torch.device) -> float:
    """Return the percentage of `images` for which the nearest of ten texts is correct."""
    model.eval()
    texts = tokenize([TEXT_TEMPLATES[0].format(name) for name in DIGIT_NAMES]).to(device)
    is_correct = []
    for pixels, captions in DataLoader(images, batch_size=256):
        nearest = model(input_ids=texts, pixel_values=pixels.to(device)).logits_per_image.argmax(dim=1)
        is_correct += [DIGIT_NAMES[int(digit)] in text.split() for digit, text in zip(nearest, captions, strict=True)]
    model.train()
    return 100 * sum(is_correct) / len(is_correct)


def main() -> None:
    with swarmtrain.trainer.run() as run:
        options = read_options(Options, run.runtime.config)
        with run.runtime.local_rank_zero_first():
            write_dataset(options.folder)
        train, validation = (CaptionedImageDataset(options.folder / split, (8, 8), "L") for split in ("train", "validation"))
        torch.manual_seed(run.runtime.config.trainer.seed)
        model = CLIPModel(CLIPConfig(**options.model)).to(run.device)
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        for pixels, texts in run.steps(DataLoader(train, 64, shuffle=True), epochs=options.epochs, global_batch_size=128):
            images, tokens = pixels.to(run.device), tokenize(texts).to(run.device)
            logits = replica(input_ids=tokens, pixel_values=images).logits_per_image
            # An image matches every text about the same digit.
            same_digit = torch.tensor([[a.split()[-1] == b.split()[-1] for b in texts] for a in texts], device=run.device).float()
            targets = same_digit / same_digit.sum(dim=1, keepdim=True)
            loss = (nn.functional.cross_entropy(logits, targets) + nn.functional.cross_entropy(logits.T, targets)) / 2 * run.loss_weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            run.save_if_due()
            if run.stop_requested:
                run.save_and_exit()
        if run.rank == 0:
            sys.stdout.write(f"validation accuracy {compute_accuracy(model, validation, run.device):.1f} % of {len(validation)}\n")


if __name__ == "__main__":
    main()
