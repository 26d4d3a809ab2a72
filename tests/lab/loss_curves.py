"""The loss curve as each consumer reads it: the CSV file, TensorBoard, `wandb sync`, the page of a run.

A step that occurs twice is an error.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore


def read_csv(folder: Path) -> dict[int, float]:
    """Return the curve in metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        return _build_curve((int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"])


def read_tensorboard(folder: Path) -> dict[int, float]:
    """Return the curve that TensorBoard shows."""
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return _build_curve((point.step, point.value) for point in read.Scalars("loss"))


def read_wandb(folder: Path) -> dict[int, float]:
    """Return the curve that `wandb sync` would send, file by file."""
    points = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points += [(row["_step"], row["loss"])] if "loss" in row else []
        store.close()
    return _build_curve(points)


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
