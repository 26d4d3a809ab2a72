"""The loss of each step as those read it who look at it: a table's reader, TensorBoard, `wandb sync`, the page of a run.

A step that stands twice is an error.
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


def table(folder: Path) -> dict[int, float]:
    """Return what metrics.csv has."""
    with (folder / "metrics.csv").open(newline="") as file:
        return _once((int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"])


def tensorboard(folder: Path) -> dict[int, float]:
    """Return what TensorBoard shows."""
    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return _once((point.step, point.value) for point in read.Scalars("loss"))


def wandb(folder: Path) -> dict[int, float]:
    """Return what `wandb sync` would send of one file after the other."""
    points = []
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points += [(row["_step"], row["loss"])] if "loss" in row else []
        store.close()
    return _once(points)


def page(file: Path) -> tuple[dict[int, float], list[str]]:
    """Return the curve that a page has, which is of some steps, and the kinds of what is marked on it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.DOTALL)
    assert found
    data = json.loads(found[1])["page"]
    curve = data["curves"]["loss"]
    return _once(zip(curve["steps"], curve["values"], strict=True)), [marker["kind"] for marker in data["markers"]]


def _once(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for step, value in points:
        assert step not in found, f"step {step} stands twice"
        found[step] = value
    return found
