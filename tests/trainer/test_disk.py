"""A full disk, and one that disappears and returns: training continues, committed checkpoints stay, and the next one is attempted."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import LocalWorld, list_saved_steps, merge_config

from swarmtrain.trainer.checkpoint import manifest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, also mounted at the folder `run` next to it."""
    small_disk, run = tmp_path / "disk", tmp_path / "run"
    small_disk.mkdir()
    run.mkdir()
    result = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small_disk)], check=False, capture_output=True, text=True)
    if result.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(result.stderr)
        pytest.skip(f"nothing can be mounted here: {result.stderr.strip()}")
    mount_disk(small_disk, run)
    yield small_disk
    for folder in (run, small_disk):
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def mount_disk(disk: Path, folder: Path) -> None:
    subprocess.run(["mount", "--bind", str(disk), str(folder)], check=True)


def fill_disk(disk: Path) -> Path:
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
def test_training_survives_its_disk(tmp_path: Path, small_disk: Path, config: dict[str, Any]) -> None:
    endless = merge_config(config, trainer={"train_iterations": 100_000, "save_interval": 4, "keep_checkpoints": 2})
    world = LocalWorld(tmp_path, endless, 2, {"PACE": "0.02"}, script="slow_disk")

    def newest() -> int:
        return max(list_saved_steps(tmp_path), default=0)

    def count_log_lines(text: str) -> int:
        return sum("training continues" in line for line in world.read_log().splitlines() if text in line)

    world.wait_until(lambda: len(list_saved_steps(tmp_path)) == 2)
    filler = fill_disk(small_disk)
    world.wait_until(lambda: count_log_lines("no space left on device") >= 3)
    stood = newest()
    manifest.verify_files(
        small_disk / f"step-{stood:08}", content := manifest.read_manifest(small_disk / f"step-{stood:08}"), content.files
    )
    filler.unlink()
    world.wait_until(lambda: newest() > stood)

    subprocess.run(["umount", "-l", str(tmp_path / "run")], check=True)
    world.wait_until(lambda: count_log_lines("is no longer the same folder") >= 2)
    assert list((tmp_path / "run").iterdir()) == [], "nothing is written beneath the mount"
    mount_disk(small_disk, tmp_path / "run")
    stood = newest()
    world.wait_until(lambda: newest() > stood)

    fill_disk(small_disk)
    before = count_log_lines("no space left on device")
    world.wait_until(lambda: count_log_lines("no space left on device") > before)
    stood = newest()
    world.send_signal(0, signal.SIGTERM)
    assert world.wait() == [1, 1], "what cannot be saved at the end is an error"
    assert newest() == stood
