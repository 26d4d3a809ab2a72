"""Checkpoints: whole or not at all, the newest sound one, one writer, and nothing in them is ever run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worlds import World, changed, deviation, held_out, losses, manifest, steps_saved, train

from swarmtrain.errors import CheckpointError, ForeignCheckpoint
from swarmtrain.trainer.checkpoint import fence, stage
from swarmtrain.trainer.checkpoint.fit import EVERYTHING, Rules, names_to_load, owners
from swarmtrain.trainer.checkpoint.manifest import Manifest


@pytest.fixture(scope="module")
def saving(config: dict[str, Any]) -> dict[str, Any]:
    """Saves each third step, and stops after the ninth of twelve."""
    return changed(config, trainer={"train_iterations": 9, "save_interval": 3})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, saving: dict[str, Any]) -> Path:
    """A run of two ranks with checkpoints of the steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("saved")
    train(folder, saving, 2)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def newest(folder: Path) -> Path:
    return folder / "run" / "step-00000009"


def truncate(folder: Path) -> None:
    part = newest(folder) / "part-00001.bin"
    part.write_bytes(part.read_bytes()[:-1])


def flip(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = newest(folder) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (newest(folder) / name).unlink()


DAMAGES = {
    "truncated": (truncate, "bytes instead of"),
    "flipped bit": (flip("part-00000.bin"), "damaged"),
    "flipped bit in the manifest": (flip("manifest.json"), "manifest.json is"),
    "missing part": (remove("part-00001.bin"), "cannot be read"),
    "missing manifest": (remove("manifest.json"), "cannot be read"),
    "empty folder": (lambda folder: [path.unlink() for path in newest(folder).iterdir()], "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_torn_checkpoint_is_passed_over(copy: Path, saving: dict[str, Any], saved: Path, damage: str) -> None:
    act, reason = DAMAGES[damage]
    act(copy)
    world = World(copy, saving, 2)
    assert world.wait() == [0, 0], world.log()
    assert "passed over run/step-00000009" in world.log()
    assert reason in world.log()
    assert "goes on after step 6" in world.log()
    assert losses(copy) == losses(saved)
    assert manifest(copy, 9)["files"] == manifest(saved, 9)["files"], "the torn one has been replaced"


def test_all_torn_starts_anew(copy: Path, saving: dict[str, Any], saved: Path) -> None:
    for path in (copy / "run").glob("step-*/part-00000.bin"):
        path.unlink()
    assert train(copy, saving, 2) == losses(saved)


class Payload:
    """Pickled, this leaves a file behind when it is read back."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_nothing_is_unpickled(copy: Path, saving: dict[str, Any]) -> None:
    """Pickles in every place in which torch's own format has one, with a manifest that vouches for them."""
    marker = copy / "executed"
    payload = pickle.dumps(Payload(marker))
    for folder in (copy / "run").glob("step-*"):
        values = json.loads((folder / "manifest.json").read_text())
        values.pop("digest")
        for name, file in values["files"].items():
            content = (payload + bytes(file["size"]))[: file["size"]]
            (folder / name).write_bytes(content)
            file["sha256"] = hashlib.sha256(content).hexdigest()
        (folder / "manifest.json").write_text(Manifest(**values).to_text())
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            (folder / name).write_bytes(payload)
    world = World(copy, changed(saving, trainer={"train_iterations": 10}), 2)
    world.wait()
    assert "goes on after step 9" in world.log()
    assert not marker.exists()
    pickle.loads(payload)  # noqa: S301  # the proof that it would have been noticed
    assert marker.exists()


def test_another_model_is_refused(copy: Path, saving: dict[str, Any]) -> None:
    world = World(copy, changed(saving, transformer_architecture={"hidden_size": 64}), 2)
    assert world.wait() == [1, 1]
    assert "is of another model: model/blocks.0.attention.key.weight is (32, 32) there and (64, 64) here" in world.log()
    assert "transformer_architecture.hidden_size is 32 there and 64 here" in world.log()
    assert steps_saved(copy) == [3, 6, 9], "nothing was touched"


@pytest.mark.test_all_only("one more way to combine checkpoints")
def test_parts_of_another_model_are_taken_by_pattern(copy: Path, saving: dict[str, Any]) -> None:
    """A layer more, and another vocabulary: what both have is taken, the log lists the rest."""
    takes = {
        "load_dir": str(copy / "run"),
        "load_optimizer_states": False,
        "load_context": False,
        "ignore_keys_in_checkpoint": ["^embedding"],
        "allowed_missing_keys_in_checkpoint": [r"^blocks\.2\."],
    }
    other = changed(saving, transformer_architecture={"num_layers": 3, "vocab_size": 80}, trainer={**takes, "train_iterations": 1})
    world = World(copy / "other", other, 2)
    assert world.wait() == [0, 0], world.log()
    assert "17 of 26 parameters taken; begin anew: blocks.2.attention.key.weight, " in world.log()
    assert "embedding.weight; not taken: embedding.weight; 0 of 52 tensors of optimizer state taken" in world.log()
    assert set(losses(copy / "other")) == {1}


@pytest.mark.test_all_only("one more way to combine checkpoints")
def test_each_parameter_comes_from_the_first_that_has_it(copy: Path, saving: dict[str, Any]) -> None:
    """Two layers of one run, and a third of another, with their state: with nothing allowed to be missing."""
    deeper = changed(saving, transformer_architecture={"num_layers": 3}, trainer={"train_iterations": 1, "load_dir": None})
    train(copy / "deep", deeper)
    sources = [str(copy / "run"), str(copy / "deep" / "run")]
    world = World(copy / "both", changed(deeper, trainer={"load_dir": sources, "load_context": False}), 1)
    assert world.wait() == [0], world.log()
    assert "26 of 26 parameters taken; 52 of 52 tensors of optimizer state taken" in world.log()
    world = World(copy / "typo", changed(deeper, trainer={"load_dir": [*sources, "runs/pretraned"]}), 1)
    assert world.wait() == [1]
    assert "config trainer.load_dir runs/pretraned: has no checkpoint that is whole" in world.log()


def test_state_comes_from_where_its_parameter_does() -> None:
    first, second = (
        ["model/a", "optimizer/m/a", "optimizer/scale"],
        ["model/a", "model/b", "optimizer/v/a", "optimizer/m/b", "optimizer/scale"],
    )
    assert owners([first, second]) == {
        "model/a": 0,
        "optimizer/m/a": 0,
        "optimizer/scale": 0,
        "model/b": 1,
        "optimizer/m/b": 1,
    }


FOUND = {"model/a": (2,), "model/b": (3,), "optimizer/m/a": (2,), "optimizer/m/b": (3,), "optimizer/scale": ()}


@pytest.mark.parametrize(
    ("rules", "wanted", "taken"),
    [
        (EVERYTHING, FOUND, list(FOUND)),
        (Rules(ignored=("b",)), FOUND, ["model/a", "optimizer/m/a", "optimizer/scale"]),
        (Rules(ignored=("^b$",)), {"model/a": (2,), "model/b": (9,)}, ["model/a"]),
        (Rules(optimizer=False), FOUND, ["model/a", "model/b"]),
        (Rules(may_lack=("c",)), {**FOUND, "model/c": (1,), "optimizer/m/c": (1,)}, list(FOUND)),
        (Rules(may_have=("b",)), {"model/a": (2,)}, ["model/a"]),
    ],
)
def test_what_is_taken(rules: Rules, wanted: dict[str, tuple[int, ...]], taken: list[str]) -> None:
    assert names_to_load(FOUND, wanted, "there", rules) == taken


@pytest.mark.parametrize(
    ("rules", "wanted", "message"),
    [
        (Rules(may_lack=("b",)), {"model/a": (2,), "model/b": (9,)}, r"model/b is \(3,\) there and \(9,\) here; 1 differ"),
        (Rules(may_have=("a",)), {"model/a": (2,)}, r"model/b is \(3,\) there and missing here"),
        (Rules(may_have=("c",)), {**FOUND, "model/c": (1,)}, r"model/c is missing there"),
        (EVERYTHING, {"model/a": (2,), "model/b": (3,), "optimizer/v/a": (2,)}, "has another optimizer's state"),
    ],
)
def test_what_fits_no_rule_is_refused(rules: Rules, wanted: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ForeignCheckpoint, match=message):
        names_to_load(FOUND, wanted, "there", rules)


def test_other_data_is_refused(copy: Path, saving: dict[str, Any]) -> None:
    other = changed(saving, data={"data_prefixes": saving["data"]["validation_data_prefixes"]})
    world = World(copy, other, 1)
    assert world.wait() == [1]
    assert "was trained on other data, or in another order; data.data_prefixes is " in world.log()


def test_old_checkpoints_are_removed(tmp_path: Path, config: dict[str, Any]) -> None:
    """The newest two stay, the best, and each multiple of five, at which one is saved."""
    keeps = {"save_interval": 4, "keep_checkpoints": 2, "eval_interval": 3, "keep_best_checkpoints": 1, "keep_checkpoints_every": 5}
    growing = {"learning_rate": 3.0, "learning_rate_warmup_steps": 12}
    train(tmp_path, changed(config, trainer=keeps, learning_rate_scheduler=growing))
    measured = {step: loss for step, loss in held_out(tmp_path).items() if step}
    best = min(measured, key=lambda step: measured[step])
    assert best == 3, "the learning rate was chosen so that it grows worse"
    assert steps_saved(tmp_path) == [3, 5, 10, 12]
    assert [manifest(tmp_path, step)["held_out_loss"] for step in (3, 5, 12)] == [measured[3], None, measured[12]]
    assert not list((tmp_path / "run").glob(".step-*"))


def test_a_world_that_is_cut_off_cannot_commit(tmp_path: Path, config: dict[str, Any]) -> None:
    endless = changed(config, trainer={"train_iterations": 1_000_000, "save_interval": 5})
    world = World(tmp_path, endless, 2)
    world.until(lambda: steps_saved(tmp_path))
    token = fence.claim(tmp_path / "run", 0)
    assert token == 2
    assert world.wait() == [1, 1]
    assert "world 1 is cut off: world 2 has taken over" in world.log()
    before = steps_saved(tmp_path)[-1]
    train(tmp_path, changed(config, trainer={"train_iterations": before + 5}))
    assert manifest(tmp_path, before + 5)["token"] == 3


def test_what_a_cut_off_world_left_is_worth_less(copy: Path, saving: dict[str, Any], saved: Path) -> None:
    """A higher step with a lower token, whole and sound, is not the newest."""
    for step in (6, 9):
        retoken(copy / "run" / f"step-{step:08}", step, 7 if step == 6 else 5)
    world = World(copy, saving, 2)
    assert world.wait() == [0, 0]
    assert "goes on after step 6" in world.log()
    assert manifest(copy, 9)["token"] == 8
    assert losses(copy) == losses(saved)


def test_half_written_is_never_in_sight(tmp_path: Path) -> None:
    """At every moment of a commit, what stands in save_dir has a sound manifest."""
    fence.claim(tmp_path, 0)
    folder = stage.begin(tmp_path, 3, 1)
    assert list(stage.known(tmp_path)) == []
    (folder / "part-00000.bin").write_bytes(b"12345678")
    assert list(stage.known(tmp_path)) == []
    stage.commit(tmp_path, folder, made_up(token=1, step=3))
    assert [content.step for _, content in stage.newest_first(tmp_path)] == [3]
    assert not folder.exists()


def test_commit_behind_the_fence(tmp_path: Path) -> None:
    fence.claim(tmp_path, 0)
    folder = stage.begin(tmp_path, 3, 1)
    (folder / "part-00000.bin").write_bytes(b"12345678")
    fence.claim(tmp_path, 5)
    with pytest.raises(Exception, match="world 1 is cut off: world 6"):
        stage.commit(tmp_path, folder, made_up(token=1, step=3))
    assert not stage.path(tmp_path, 3).exists()


def test_a_disk_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_SEEN_WITHIN", 0.2)
    fence.claim(tmp_path, 0)
    folder = stage.begin(tmp_path, 3, 1)
    with pytest.raises(CheckpointError, match=r"part-00000\.bin, written by another node, is not to be seen here"):
        stage.commit(tmp_path, folder, made_up(token=1, step=3))


def test_tokens_are_taken_once(tmp_path: Path) -> None:
    assert [fence.claim(tmp_path, at_least) for at_least in (0, 0, 7, 3)] == [1, 2, 8, 9]


def test_all_ranks_find_the_fence_that_the_first_has_set_up(tmp_path: Path) -> None:
    """Also where a network's file system shows it later; in a folder of the same name on a disk of its own it never comes."""
    token = fence.claim(tmp_path / "ours", 0)
    fence.find(tmp_path / "ours", token, patience=0)
    late = threading.Timer(0.3, fence.claim, (tmp_path / "late", 0))
    late.start()
    fence.find(tmp_path / "late", 1)
    late.join()
    fence.claim(tmp_path / "other", 6)
    with pytest.raises(CheckpointError, match=r"save_dir .*/other: is another folder here"):
        fence.find(tmp_path / "other", token, patience=0.2)


def test_save_dir_that_cannot_be_written(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "run").write_text("in the way")
    world = World(tmp_path, config, 2)
    assert world.wait() == [1, 1]
    assert "config trainer.save_dir run: cannot be written" in world.log()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to others, and becomes them")
def test_who_may_not_write_to_save_dir_is_told_the_line_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:2]):  # pytest lets nobody through
        folder.chmod(0o711)
    Path("runs").mkdir()
    os.chown("runs", 1234, 100)
    os.setegid(9)
    os.seteuid(9)
    try:
        with pytest.raises(CheckpointError) as caught:
            fence.claim(Path("runs/first"), 0)
    finally:
        os.seteuid(0)
        os.setegid(0)
    assert f"permission denied; {tmp_path}/runs belongs to 1234:100, and the ranks are 9:9" in str(caught.value)
    assert caught.value.hint == f"runner.docker_config.user: 1234:100; or chown -R 9:9 {tmp_path}/runs, or what is mounted there"


def test_resharded_state_is_the_same_state(copy: Path, saving: dict[str, Any]) -> None:
    """Saved by two ranks, saved again by four that share layers: the same steps on."""
    more = changed(saving, trainer={"train_iterations": 12})
    again = shutil.copytree(copy, copy.with_name("again"))
    two = train(copy, more, 2)
    four = train(again, changed(more, topology={"model_parallel_size": 4}), 4)
    assert deviation(two, four) < 1e-6
    assert manifest(again, 12)["tensors"].keys() == manifest(copy, 12)["tensors"].keys()


def retoken(folder: Path, step: int, token: int) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    values.pop("digest")
    assert values["step"] == step
    (folder / "manifest.json").write_text(Manifest(**{**values, "token": token}).to_text())


def made_up(token: int, step: int) -> Manifest:
    files = {"part-00000.bin": {"size": 8, "sha256": hashlib.sha256(b"12345678").hexdigest()}}
    return Manifest(token, step, 12 * step, None, "data", {}, {}, files, {}, {})
