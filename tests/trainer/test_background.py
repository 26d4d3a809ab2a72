"""Checkpoints written in the background: the same bytes, no step waits for the disk, and a death in between costs only that one."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from worlds import World, audit, changed, losses, manifest, steps_saved, train

from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint import background
from swarmtrain.trainer.checkpoint.background import Background, collect_notes, leave_note
from swarmtrain.wire import EXIT_PLANNED


@pytest.fixture(scope="module")
def saving(config: dict[str, Any]) -> dict[str, Any]:
    """Saves each third step."""
    return changed(config, trainer={"save_interval": 3, "keep_checkpoints": 9})


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory, saving: dict[str, Any]) -> Path:
    """A run of two ranks that waited for each of its checkpoints."""
    folder = tmp_path_factory.mktemp("waited")
    train(folder, changed(saving, trainer={"save_in_background": False}), 2)
    return folder


def test_the_same_bytes(tmp_path: Path, saving: dict[str, Any], waited: Path) -> None:
    """Each is what it would have been had training stood still: later steps do not show in it."""
    world = World(tmp_path, saving, 2, {"SLOW": "1"}, script="slow_disk")
    assert world.wait() == [0, 0], world.log()
    assert steps_saved(tmp_path) == [3, 6, 9, 12]
    for step in (3, 6, 9, 12):
        assert manifest(tmp_path, step)["files"] == manifest(waited, step)["files"]
        assert manifest(tmp_path, step)["tensors"] == manifest(waited, step)["tensors"]
        folder = tmp_path / "run" / f"step-{step:08}"
        assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "part-00000.bin", "part-00001.bin"]
    assert losses(tmp_path) == losses(waited)
    told = [line for line in world.log().splitlines() if "saved run/step-" in line]
    assert [line.split("saved run/")[1].split(" ")[0] for line in told] == [f"step-{step:08}" for step in (3, 6, 9, 12)]


def test_a_run_that_is_killed_while_it_writes(tmp_path: Path, saving: dict[str, Any], waited: Path) -> None:
    world = World(tmp_path, saving, 2, {"SLOW": "60"}, script="slow_disk")
    world.until(lambda: any(line["step"] == 8 for line in audit(tmp_path)))
    assert steps_saved(tmp_path) == [3], "step 8 is done, and the checkpoint of step 6 is still being written"
    assert list((tmp_path / "run").glob(".step-00000006.world-1"))
    world.send(1, signal.SIGKILL)
    codes = world.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None), "it does not wait for a part that will never come"
    assert train(tmp_path, saving, 2) == losses(waited)
    assert "goes on after step 3" in world.log()
    assert not list((tmp_path / "run").glob(".step-*"))


@pytest.mark.test_all_only("waits for a slow disk")
def test_what_one_rank_cannot_write_is_told_and_missing_at_the_end(tmp_path: Path, saving: dict[str, Any]) -> None:
    """A rank's disk is full: all ranks train on alike, and the run does not look finished."""
    world = World(tmp_path, saving, 2, {"FULL": "yes"}, script="slow_disk")
    assert world.wait() == [1, 1], world.log()
    assert steps_saved(tmp_path) == [3]
    for step in (6, 9):
        told = f"no checkpoint of step {step}: rank 1: config trainer.save_dir run: part-00001.bin: no space left on device"
        assert f"{told}; training goes on, the newest is of step 3" in world.log()
    assert max(line["step"] for line in audit(tmp_path)) == 12
    assert world.log().count("CheckpointError: config trainer.save_dir run: part-00001.bin: no space left on device") == 2, "on every rank"
    assert not list((tmp_path / "run").glob(".step-00000006*")), "nothing half-written stays"


@pytest.mark.test_all_only("waits for a slow disk")
def test_memory_does_not_grow_where_the_disk_is_slower_than_training(tmp_path: Path, config: dict[str, Any]) -> None:
    """One part is written at a time, from the room that the one before it had: training waits for the disk."""
    large = changed(config, transformer_architecture={"hidden_size": 192}, trainer={"save_interval": 1, "train_iterations": 10})
    world = World(tmp_path, large, 1, {"SLOW": "0.2"}, script="slow_disk")
    assert world.wait() == [0], world.log()
    size = (tmp_path / "run" / "step-00000010" / "part-00000.bin").stat().st_size
    assert size > 8e6
    lines = [line.split() for line in (tmp_path / "memory").read_text().splitlines()]
    assert [line[0] for line in lines] == ["begin", "end"] * 10
    memory = [int(line[1]) for line in lines[::2]]
    assert max(memory[5:]) - max(memory[:5]) < size, "five more took the room of one"


def test_asked_to_leave_while_it_writes(tmp_path: Path, saving: dict[str, Any]) -> None:
    """What is being written is waited for, and so is the step at which all leave."""
    world = World(tmp_path, changed(saving, trainer={"train_iterations": 100_000}), 2, {"SLOW": "2"}, script="slow_disk")
    world.until(lambda: any(line["step"] == 8 for line in audit(tmp_path)))
    world.send(0, signal.SIGTERM)
    assert world.wait() == [EXIT_PLANNED] * 2, world.log()
    assert steps_saved(tmp_path)[:2] == [3, 6]
    assert steps_saved(tmp_path)[-1] == max(line["step"] for line in audit(tmp_path))


def test_notes_are_waited_for_and_taken_away(tmp_path: Path) -> None:
    written = threading.Event()
    leave_note(tmp_path, 0, {"part-00000.bin": {"size": 1}})
    waiting = Background(lambda: collect_notes(tmp_path, range(2), written))
    assert not waiting.ended
    leave_note(tmp_path, 1, {})
    assert waiting.result() == {"part-00000.bin": {"size": 1}}
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_is_not_to_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is not shared: the rank says that it has written, and its note is not there."""
    monkeypatch.setattr(background, "_SEEN_WITHIN", 0.1)
    written = threading.Event()
    written.set()
    waiting = Background(lambda: collect_notes(tmp_path, range(2), written))
    with pytest.raises(CheckpointError, match=r"part-00000\.json, written by another node, is not to be seen here"):
        waiting.result()
    assert waiting.failed
