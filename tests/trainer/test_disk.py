"""A disk that is full, and one that is gone and comes back: training goes on, what stands stays, and the next checkpoint is tried."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import World, changed, steps_saved

from swarmtrain.trainer.checkpoint import manifest


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, and beside it the folder `run`, at which it is mounted too."""
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    run.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=False, capture_output=True, text=True)
    if made.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(made.stderr)
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    mount(disk, run)
    yield disk
    for folder in (run, disk):
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def mount(disk: Path, folder: Path) -> None:
    subprocess.run(["mount", "--bind", str(disk), str(folder)], check=True)


def fill(disk: Path) -> Path:
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            while True:
                try:
                    if file.write(bytes(size)) < size:
                        break
                except OSError:
                    break
    return path


@pytest.mark.test_all_only("fills a disk and waits until it is noticed, three times")
def test_training_survives_its_disk(tmp_path: Path, disk: Path, config: dict[str, Any]) -> None:
    endless = changed(config, trainer={"train_iterations": 100_000, "save_interval": 4, "keep_checkpoints": 2})
    world = World(tmp_path, endless, 2, {"PACE": "0.02"}, script="slow_disk")

    def newest() -> int:
        return max(steps_saved(tmp_path), default=0)

    def told(what: str) -> int:
        return sum("training goes on, the newest is of step" in line for line in world.log().splitlines() if what in line)

    world.until(lambda: len(steps_saved(tmp_path)) == 2)
    filler = fill(disk)
    world.until(lambda: told("no space left on device") >= 3)
    stood = newest()
    manifest.verify(disk / f"step-{stood:08}", content := manifest.read(disk / f"step-{stood:08}"), content.files)
    filler.unlink()
    world.until(lambda: newest() > stood)

    subprocess.run(["umount", "-l", str(tmp_path / "run")], check=True)
    world.until(lambda: told("is not the folder that it was") >= 2)
    assert list((tmp_path / "run").iterdir()) == [], "nothing is written beneath the mount"
    mount(disk, tmp_path / "run")
    stood = newest()
    world.until(lambda: newest() > stood)

    fill(disk)
    before = told("no space left on device")
    world.until(lambda: told("no space left on device") > before)
    stood = newest()
    world.send(0, signal.SIGTERM)
    assert world.wait() == [1, 1], "what cannot be saved at the end is an error"
    assert newest() == stood
