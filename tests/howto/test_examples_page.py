"""The examples page, which needs torch and no lab. The results must be at least as good as the page says."""

from __future__ import annotations

import json
import re
import shutil
from itertools import groupby
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from page_runner import PageRunner

_LOSS_PATTERN = re.compile(r"validation loss (?:[\d.]+ → )?([\d.]+) nats per byte; byte-bigram baseline ([\d.]+)")


def test_examples(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    shutil.copytree(page.ROOT / "examples", here / "examples")
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(page.ROOT / name, here / name)
    reader = PageRunner([open_shell(here, installed_environment)])
    printed = {}
    for heading, steps in groupby(page.read_page("docs/how-to/examples.md"), lambda step: step.heading):
        begun = len(reader.output)
        reader.run_steps(list(steps))
        printed[heading] = reader.output[begun:]
    right = _read_accuracies(printed["Handwritten digits"])
    assert len(right) == 2
    assert min(right) >= 97
    assert min(_read_accuracies(printed["A folder of images"])) >= 97
    assert min(_read_accuracies(printed["Images and captions"])) >= 93
    assert _find_best_step(here / "runs/images") in _list_saved_steps(here / "runs/images")
    assert _beats_bigram_baseline(printed["A language model from scratch"], times=1)
    learned = re.search(r"validation loss ([\d.]+) → ([\d.]+) nats per byte", printed["LoRA on the trained model"])
    assert learned
    assert float(learned[2]) < float(learned[1]) - 0.1
    assert _compute_folder_size(here / "runs/lora/step-00000060") < _compute_folder_size(here / "runs/quickstart/step-00000125") / 8
    assert _beats_bigram_baseline(printed["A Hugging Face model from its config"], times=2)
    # The text may have line breaks. transformers and `swarmtrain sample` generate the same.
    assert re.search(r"LlamaForCausalLM completion: (.+)\n\1\n", printed["A Hugging Face model from its config"], re.DOTALL)
    right = _read_accuracies(printed["A script from outside"])
    assert len(right) == 6
    assert min(right[3:]) > 99


def _read_accuracies(printed: str) -> list[float]:
    return [float(percent) for percent in re.findall(r"validation accuracy ([\d.]+) %", printed)]


def _beats_bigram_baseline(printed: str, *, times: int) -> bool:
    losses = [(float(loss), float(table)) for loss, table in _LOSS_PATTERN.findall(printed)]
    return len(losses) == times and all(loss < table for loss, table in losses)


def _list_saved_steps(folder: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}


def _find_best_step(folder: Path) -> int:
    """Return the step with the highest validation accuracy, the latest of several."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max((line["validation_accuracy"], line["step"]) for line in read if "validation_accuracy" in line)[1]


def _compute_folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
