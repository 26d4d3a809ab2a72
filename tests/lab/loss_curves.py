"""The loss curve as each consumer reads it: the CSV file, TensorBoard, the page of a run.

A step that occurs twice is an error.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def read_csv(folder: Path) -> dict[int, float]:
    """Return the curve in metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        return _build_curve((int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"])


def read_tensorboard(folder: Path) -> dict[int, float]:
    """Return the curve that TensorBoard shows."""
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return _build_curve((point.step, point.value) for point in read.Scalars("loss"))


def read_page(file: Path) -> tuple[dict[int, float], list[str]]:
    """Return the curve on a page, which has only some of the steps, and the labels of its markers."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.DOTALL)
    assert found
    data = json.loads(found[1])["page"]
    curve = data["curves"]["loss"]
    return _build_curve(zip(curve["steps"], curve["values"], strict=True)), [marker["label"] for marker in data["markers"]]


def _build_curve(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for step, value in points:
        assert step not in found, f"step {step} appears twice"
        found[step] = value
    return found
