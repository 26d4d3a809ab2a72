"""The page of examples, which needs torch and no lab; their results are as good as it says."""

from __future__ import annotations

import json
import re
import shutil
from itertools import groupby
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from reader import Reader

_LOSS = re.compile(r"held-out loss (?:[\d.]+ → )?([\d.]+) nats per byte; a byte-bigram table: ([\d.]+)")


def test_examples(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    shutil.copytree(page.ROOT / "examples", here / "examples")
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(page.ROOT / name, here / name)
    reader = Reader([open_shell(here, installed)])
    printed = {}
    for heading, steps in groupby(page.read("docs/how-to/examples.md"), lambda step: step.heading):
        begun = len(reader.printed)
        reader.follow(list(steps))
        printed[heading] = reader.printed[begun:]
    right = _right(printed["Handwritten digits"])
    assert len(right) == 2
    assert min(right) >= 97
    assert min(_right(printed["A folder of images"])) >= 97
    assert min(_right(printed["Images and captions"])) >= 93
    assert _best(here / "runs/images") in _steps(here / "runs/images")
    assert _beats_the_table(printed["A language model from scratch"], times=1)
    learned = re.search(r"held-out loss ([\d.]+) → ([\d.]+) nats per byte", printed["LoRA on what was trained"])
    assert learned
    assert float(learned[2]) < float(learned[1]) - 0.1
    assert _size(here / "runs/lora/step-00000060") < _size(here / "runs/quickstart/step-00000125") / 8
    assert _beats_the_table(printed["A model of Hugging Face's, from its config"], times=2)
    said = re.search(r"LlamaForCausalLM says: (.+?)\n(.+?)\n", printed["A model of Hugging Face's, from its config"])
    assert said
    assert said[1] == said[2]
    right = _right(printed["A script from outside"])
    assert len(right) == 6
    assert min(right[3:]) > 99


def _right(printed: str) -> list[float]:
    return [float(percent) for percent in re.findall(r"held-out accuracy ([\d.]+) %", printed)]


def _beats_the_table(printed: str, *, times: int) -> bool:
    losses = [(float(loss), float(table)) for loss, table in _LOSS.findall(printed)]
    return len(losses) == times and all(loss < table for loss, table in losses)


def _steps(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}


def _best(folder: Path) -> int:
    """Return the step of the highest accuracy, the latest of these."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max((line["held_out_accuracy"], line["step"]) for line in read if "held_out_accuracy" in line)[1]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
