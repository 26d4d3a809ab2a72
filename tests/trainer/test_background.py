"""Background checkpoints: the same bytes, no step waits for the disk, and a crash during a write loses only that checkpoint."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from worlds import LocalWorld, list_saved_steps, merge_config, read_audit, read_losses, read_manifest, run_training

from swarmtrain.errors import CheckpointError
from swarmtrain.protocol import EXIT_PLANNED
from swarmtrain.trainer.checkpoint.background_task import BackgroundTask
from swarmtrain.trainer.checkpoint.storage import completion_markers
from swarmtrain.trainer.checkpoint.storage.completion_markers import collect_completion_markers, write_completion_marker


@pytest.fixture(scope="module")
def saving_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config that saves every third step."""
    return merge_config(config, trainer={"save_interval": 3, "keep_checkpoints": 9})


@pytest.fixture(scope="module")
def synchronous_run(tmp_path_factory: pytest.TempPathFactory, saving_config: dict[str, Any]) -> Path:
    """A run of two ranks with synchronous checkpoints."""
    folder = tmp_path_factory.mktemp("waited")
    run_training(folder, merge_config(saving_config, trainer={"save_in_background": False}), 2)
    return folder


def test_the_same_bytes(tmp_path: Path, saving_config: dict[str, Any], synchronous_run: Path) -> None:
    """Each checkpoint equals one saved while training is stalled: later steps do not affect it."""
    world = LocalWorld(tmp_path, saving_config, 2, {"SLOW": "1"}, script="slow_disk")
    assert world.wait() == [0, 0], world.read_log()
    assert list_saved_steps(tmp_path) == [3, 6, 9, 12]
    for step in (3, 6, 9, 12):
        assert read_manifest(tmp_path, step)["files"] == read_manifest(synchronous_run, step)["files"]
        assert read_manifest(tmp_path, step)["tensors"] == read_manifest(synchronous_run, step)["tensors"]
        folder = tmp_path / "run" / f"step-{step:08}"
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "part-00000.bin", "part-00001.bin"]
    assert read_losses(tmp_path) == read_losses(synchronous_run)
    saved_lines = [line for line in world.read_log().splitlines() if "saved run/step-" in line]
    assert [line.split("saved run/")[1].split(" ")[0] for line in saved_lines] == [f"step-{step:08}" for step in (3, 6, 9, 12)]


def test_a_run_that_is_killed_while_it_writes(tmp_path: Path, saving_config: dict[str, Any], synchronous_run: Path) -> None:
    world = LocalWorld(tmp_path, saving_config, 2, {"SLOW": "60"}, script="slow_disk")
    world.wait_until(lambda: any(line["step"] == 8 for line in read_audit(tmp_path)))
    assert list_saved_steps(tmp_path) == [3], "step 8 is done, and the checkpoint of step 6 is still being written"
    assert list((tmp_path / "run").glob(".step-00000006.world-1"))
    world.send_signal(1, signal.SIGKILL)
    codes = world.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None), "it does not wait for a part that will never come"
    assert run_training(tmp_path, saving_config, 2) == read_losses(synchronous_run)
    assert "resuming from step 3" in world.read_log()
    assert not list((tmp_path / "run").glob(".step-*"))


@pytest.mark.test_all_only("waits for a slow disk")
def test_what_one_rank_cannot_write_is_logged_and_missing_at_the_end(tmp_path: Path, saving_config: dict[str, Any]) -> None:
    """One rank's disk is full: all ranks continue training, and the run does not count as finished."""
    world = LocalWorld(tmp_path, saving_config, 2, {"FULL": "yes"}, script="slow_disk")
    assert world.wait() == [1, 1], world.read_log()
    assert list_saved_steps(tmp_path) == [3]
    for step in (6, 9):
        message = f"cannot save the checkpoint of step {step}: rank 1: config trainer.save_dir run: part-00001.bin: no space left on device"
        assert f"{message}; training continues, the newest checkpoint is from step 3" in world.read_log()
    assert max(line["step"] for line in read_audit(tmp_path)) == 12
    assert world.read_log().count("CheckpointError: config trainer.save_dir run: part-00001.bin: no space left on device") == 2, (
        "on every rank"
    )
    assert not list((tmp_path / "run").glob(".step-00000006*")), "nothing half-written stays"


@pytest.mark.test_all_only("waits for a slow disk")
def test_memory_does_not_grow_where_the_disk_is_slower_than_training(tmp_path: Path, config: dict[str, Any]) -> None:
    """One part is written at a time, from the memory that the previous one used: training waits for the disk."""
    large = merge_config(config, transformer_architecture={"hidden_size": 192}, trainer={"save_interval": 1, "train_iterations": 10})
    world = LocalWorld(tmp_path, large, 1, {"SLOW": "0.2"}, script="slow_disk")
    assert world.wait() == [0], world.read_log()
    size = (tmp_path / "run" / "step-00000010" / "part-00000.bin").stat().st_size
    assert size > 8e6
    lines = [line.split() for line in (tmp_path / "memory").read_text().splitlines()]
    assert [line[0] for line in lines] == ["begin", "end"] * 10
    memory = [int(line[1]) for line in lines[::2]]
    assert max(memory[5:]) - max(memory[:5]) < size, "five more took the room of one"


def test_a_stop_is_requested_while_it_writes(tmp_path: Path, saving_config: dict[str, Any]) -> None:
    """The ranks complete the checkpoint being written, and the one of the step at which all of them exit."""
    world = LocalWorld(tmp_path, merge_config(saving_config, trainer={"train_iterations": 100_000}), 2, {"SLOW": "2"}, script="slow_disk")
    world.wait_until(lambda: any(line["step"] == 8 for line in read_audit(tmp_path)))
    world.send_signal(0, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.read_log()
    assert list_saved_steps(tmp_path)[:2] == [3, 6]
    assert list_saved_steps(tmp_path)[-1] == max(line["step"] for line in read_audit(tmp_path))


def test_notes_are_waited_for_and_removed(tmp_path: Path) -> None:
    written = threading.Event()
    write_completion_marker(tmp_path, 0, {"part-00000.bin": {"size": 1}})
    waiting = BackgroundTask(lambda: collect_completion_markers(tmp_path, range(2), written))
    assert not waiting.is_done
    write_completion_marker(tmp_path, 1, {})
    assert waiting.result() == {"part-00000.bin": {"size": 1}}
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_is_not_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is not shared: the rank reports that it has written, but its completion marker does not appear."""
    monkeypatch.setattr(completion_markers, "_VISIBILITY_TIMEOUT_SECONDS", 0.1)
    written = threading.Event()
    written.set()
    waiting = BackgroundTask(lambda: collect_completion_markers(tmp_path, range(2), written))
    with pytest.raises(CheckpointError, match=r"part-00000\.json, written by another node, is not visible on this node"):
        waiting.result()
    assert waiting.has_failed
