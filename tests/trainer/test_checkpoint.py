"""Checkpoints: complete or absent, the newest valid one is loaded, one writer, and nothing in them is ever executed."""

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
from worlds import (
    LocalWorld,
    compute_deviation,
    list_saved_steps,
    merge_config,
    read_losses,
    read_manifest,
    read_validation_losses,
    run_training,
)

from swarmtrain.errors import CheckpointError, IncompatibleCheckpoint
from swarmtrain.trainer.checkpoint.compatibility import LOAD_EVERYTHING, LoadRules, assign_source_checkpoints, select_tensors_to_load
from swarmtrain.trainer.checkpoint.file_digests import hash_memory
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage import commit, fence


@pytest.fixture(scope="module")
def saving_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config that saves every third step, and stops after the ninth of twelve."""
    return merge_config(config, trainer={"train_iterations": 9, "save_interval": 3})


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory, saving_config: dict[str, Any]) -> Path:
    """A run of two ranks with checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("saved")
    run_training(folder, saving_config, 2)
    return folder


@pytest.fixture
def run_copy(saved_run: Path, tmp_path: Path) -> Path:
    """A copy of `saved_run` that the test may damage."""
    return Path(shutil.copytree(saved_run, tmp_path / "copy"))


def get_newest_checkpoint(folder: Path) -> Path:
    return folder / "run" / "step-00000009"


def truncate_part(folder: Path) -> None:
    part = get_newest_checkpoint(folder) / "part-00001.bin"
    part.write_bytes(part.read_bytes()[:-1])


def flip_bit(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = get_newest_checkpoint(folder) / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return damage


def remove_file(name: str) -> Callable[[Path], None]:
    return lambda folder: (get_newest_checkpoint(folder) / name).unlink()


DAMAGES = {
    "truncated": (truncate_part, "bytes instead of"),
    "flipped bit": (flip_bit("part-00000.bin"), "corrupt"),
    "flipped bit in the manifest": (flip_bit("manifest.json"), "manifest.json is"),
    "missing part": (remove_file("part-00001.bin"), "cannot be read"),
    "missing manifest": (remove_file("manifest.json"), "cannot be read"),
    "empty folder": (lambda folder: [path.unlink() for path in get_newest_checkpoint(folder).iterdir()], "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_checkpoint_is_skipped(run_copy: Path, saving_config: dict[str, Any], saved_run: Path, damage: str) -> None:
    act, reason = DAMAGES[damage]
    act(run_copy)
    world = LocalWorld(run_copy, saving_config, 2)
    assert world.wait() == [0, 0], world.read_log()
    assert "skipped run/step-00000009" in world.read_log()
    assert reason in world.read_log()
    assert "resuming from step 6" in world.read_log()
    assert read_losses(run_copy) == read_losses(saved_run)
    assert read_manifest(run_copy, 9)["files"] == read_manifest(saved_run, 9)["files"], "the torn one has been replaced"


@pytest.mark.parametrize("shared", [True, False], ids=["shared disk", "disk of each node"])
def test_a_checkpoint_of_another_format_stops_the_run_and_stays(run_copy: Path, saving_config: dict[str, Any], *, shared: bool) -> None:
    """Skipping it would restart from scratch, and eventually remove it."""
    path = get_newest_checkpoint(run_copy) / "manifest.json"
    values = {**json.loads(path.read_text()), "format": 1}
    path.write_text(json.dumps(values))
    world = LocalWorld(run_copy, merge_config(saving_config, trainer={"save_dir_shared": shared}), 2)
    assert all(code != 0 for code in world.wait())
    assert "run/step-00000009: has format 1, but this version of swarmtrain reads formats 2 and 3" in world.read_log()
    assert json.loads(path.read_text()) == values


@pytest.mark.parametrize("shared", [True, False], ids=["shared disk", "disk of each node"])
def test_a_checkpoint_of_format_2_is_resumed(run_copy: Path, saving_config: dict[str, Any], saved_run: Path, *, shared: bool) -> None:
    """It has the SHA-256 of whole files. The next checkpoint has the present format."""
    for folder in (run_copy / "run").glob("step-*"):
        values = json.loads((folder / "manifest.json").read_text())
        values.pop("digest")
        assert values["format"] == 3
        files = {
            name: {"size": entry["size"], "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
            for name, entry in values["files"].items()
        }
        (folder / "manifest.json").write_text(Manifest(**{**values, "files": files, "format": 2}).to_text())
    longer = merge_config(saving_config, trainer={"train_iterations": 12, "save_dir_shared": shared})
    world = LocalWorld(run_copy, longer, 2)
    assert world.wait() == [0, 0], world.read_log()
    assert "resuming from step 9" in world.read_log()
    assert "skipped" not in world.read_log()
    assert [read_manifest(run_copy, step)["format"] for step in (9, 12)] == [2, 3]


def test_if_all_checkpoints_are_corrupt_training_restarts(run_copy: Path, saving_config: dict[str, Any], saved_run: Path) -> None:
    for path in (run_copy / "run").glob("step-*/part-00000.bin"):
        path.unlink()
    assert run_training(run_copy, saving_config, 2) == read_losses(saved_run)


class PickledPayload:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_nothing_is_unpickled(run_copy: Path, saving_config: dict[str, Any]) -> None:
    """Pickles in every place where torch's own format has one, with a manifest that matches them."""
    marker = run_copy / "executed"
    payload = pickle.dumps(PickledPayload(marker))
    for folder in (run_copy / "run").glob("step-*"):
        values = json.loads((folder / "manifest.json").read_text())
        values.pop("digest")
        for name, file in values["files"].items():
            content = (payload + bytes(file["size"]))[: file["size"]]
            (folder / name).write_bytes(content)
            values["files"][name] = hash_memory(memoryview(content)).build_entry(len(content))
        (folder / "manifest.json").write_text(Manifest(**values).to_text())
        for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
            (folder / name).write_bytes(payload)
    world = LocalWorld(run_copy, merge_config(saving_config, trainer={"train_iterations": 10}), 2)
    world.wait()
    assert "resuming from step 9" in world.read_log()
    assert not marker.exists()
    pickle.loads(payload)  # noqa: S301  # proves that unpickling would be detected
    assert marker.exists()


def test_another_model_is_refused(run_copy: Path, saving_config: dict[str, Any]) -> None:
    world = LocalWorld(run_copy, merge_config(saving_config, transformer_architecture={"hidden_size": 64}), 2)
    assert world.wait() == [1, 1]
    assert (
        "belongs to a different model: model/blocks.0.attention.key.weight is (32, 32) in the checkpoint and (64, 64) in the model"
        in world.read_log()
    )
    assert "transformer_architecture.hidden_size is 32 in the checkpoint and 64 in the config" in world.read_log()
    assert list_saved_steps(run_copy) == [3, 6, 9], "nothing was touched"


@pytest.mark.test_all_only("one more way to combine checkpoints")
def test_parts_of_another_model_are_loaded_by_pattern(run_copy: Path, saving_config: dict[str, Any]) -> None:
    """One more layer, and another vocabulary: parameters of both are loaded, the log lists the rest."""
    takes = {
        "load_dir": str(run_copy / "run"),
        "load_optimizer_states": False,
        "load_context": False,
        "ignore_keys_in_checkpoint": ["^embedding"],
        "allowed_missing_keys_in_checkpoint": [r"^blocks\.2\."],
    }
    other = merge_config(
        saving_config, transformer_architecture={"num_layers": 3, "vocab_size": 80}, trainer={**takes, "train_iterations": 1}
    )
    world = LocalWorld(run_copy / "other", other, 2)
    assert world.wait() == [0, 0], world.read_log()
    assert "17 of 26 parameters loaded; start from scratch: blocks.2.attention.key.weight, " in world.read_log()
    assert "embedding.weight; not loaded: embedding.weight; 0 of 52 tensors of optimizer state loaded" in world.read_log()
    assert set(read_losses(run_copy / "other")) == {1}


@pytest.mark.test_all_only("one more way to combine checkpoints")
def test_each_parameter_comes_from_the_first_that_has_it(run_copy: Path, saving_config: dict[str, Any]) -> None:
    """Two layers of one run and a third of another, with their optimizer state; nothing is allowed to be missing."""
    deeper = merge_config(saving_config, transformer_architecture={"num_layers": 3}, trainer={"train_iterations": 1, "load_dir": None})
    run_training(run_copy / "deep", deeper)
    sources = [str(run_copy / "run"), str(run_copy / "deep" / "run")]
    world = LocalWorld(run_copy / "both", merge_config(deeper, trainer={"load_dir": sources, "load_context": False}), 1)
    assert world.wait() == [0], world.read_log()
    assert "26 of 26 parameters loaded; 52 of 52 tensors of optimizer state loaded" in world.read_log()
    world = LocalWorld(run_copy / "typo", merge_config(deeper, trainer={"load_dir": [*sources, "runs/pretraned"]}), 1)
    assert world.wait() == [1]
    assert "config trainer.load_dir runs/pretraned: has no complete checkpoint" in world.read_log()


def test_state_comes_from_where_its_parameter_does() -> None:
    first, second = (
        ["model/a", "optimizer/m/a", "optimizer/scale"],
        ["model/a", "model/b", "optimizer/v/a", "optimizer/m/b", "optimizer/scale"],
    )
    assert assign_source_checkpoints([first, second]) == {
        "model/a": 0,
        "optimizer/m/a": 0,
        "optimizer/scale": 0,
        "model/b": 1,
        "optimizer/m/b": 1,
    }


CHECKPOINT_SHAPES = {"model/a": (2,), "model/b": (3,), "optimizer/m/a": (2,), "optimizer/m/b": (3,), "optimizer/scale": ()}


@pytest.mark.parametrize(
    ("rules", "model_shapes", "expected"),
    [
        (LOAD_EVERYTHING, CHECKPOINT_SHAPES, list(CHECKPOINT_SHAPES)),
        (LoadRules(ignored_patterns=("b",)), CHECKPOINT_SHAPES, ["model/a", "optimizer/m/a", "optimizer/scale"]),
        (LoadRules(ignored_patterns=("^b$",)), {"model/a": (2,), "model/b": (9,)}, ["model/a"]),
        (LoadRules(load_optimizer_state=False), CHECKPOINT_SHAPES, ["model/a", "model/b"]),
        (LoadRules(allowed_missing=("c",)), {**CHECKPOINT_SHAPES, "model/c": (1,), "optimizer/m/c": (1,)}, list(CHECKPOINT_SHAPES)),
        (LoadRules(allowed_unexpected=("b",)), {"model/a": (2,)}, ["model/a"]),
    ],
)
def test_what_is_taken(rules: LoadRules, model_shapes: dict[str, tuple[int, ...]], expected: list[str]) -> None:
    assert select_tensors_to_load(CHECKPOINT_SHAPES, model_shapes, "there", rules) == expected


@pytest.mark.parametrize(
    ("rules", "model_shapes", "message"),
    [
        (
            LoadRules(allowed_missing=("b",)),
            {"model/a": (2,), "model/b": (9,)},
            r"model/b is \(3,\) in the checkpoint and \(9,\) in the model; mismatched parameters: 1",
        ),
        (LoadRules(allowed_unexpected=("a",)), {"model/a": (2,)}, r"model/b is \(3,\) in the checkpoint and missing in the model"),
        (LoadRules(allowed_unexpected=("c",)), {**CHECKPOINT_SHAPES, "model/c": (1,)}, r"model/c is missing in the checkpoint"),
        (LOAD_EVERYTHING, {"model/a": (2,), "model/b": (3,), "optimizer/v/a": (2,)}, "has the state of a different optimizer"),
    ],
)
def test_what_fits_no_rule_is_refused(rules: LoadRules, model_shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(IncompatibleCheckpoint, match=message):
        select_tensors_to_load(CHECKPOINT_SHAPES, model_shapes, "there", rules)


def test_other_data_is_refused(run_copy: Path, saving_config: dict[str, Any]) -> None:
    other = merge_config(saving_config, data={"data_prefixes": saving_config["data"]["validation_data_prefixes"]})
    world = LocalWorld(run_copy, other, 1)
    assert world.wait() == [1]
    assert "was trained on different data, or in a different order; data.data_prefixes is " in world.read_log()


def test_old_checkpoints_are_removed(tmp_path: Path, config: dict[str, Any]) -> None:
    """The newest two, the best, and each multiple of five stay; multiples of five are also saved."""
    keeps = {"save_interval": 4, "keep_checkpoints": 2, "eval_interval": 3, "keep_best_checkpoints": 1, "keep_checkpoints_every": 5}
    growing = {"learning_rate": 3.0, "learning_rate_warmup_steps": 12}
    run_training(tmp_path, merge_config(config, trainer=keeps, learning_rate_scheduler=growing))
    measured = {step: loss for step, loss in read_validation_losses(tmp_path).items() if step}
    best = min(measured, key=lambda step: measured[step])
    assert best == 3, "the learning rate was chosen so that it grows worse"
    assert list_saved_steps(tmp_path) == [3, 5, 10, 12]
    assert [read_manifest(tmp_path, step)["validation_loss"] for step in (3, 5, 12)] == [measured[3], None, measured[12]]
    assert not list((tmp_path / "run").glob(".step-*"))


def test_a_world_that_is_cut_off_cannot_commit(tmp_path: Path, config: dict[str, Any]) -> None:
    endless = merge_config(config, trainer={"train_iterations": 1_000_000, "save_interval": 5})
    world = LocalWorld(tmp_path, endless, 2)
    world.wait_until(lambda: list_saved_steps(tmp_path))
    token = fence.claim_generation(tmp_path / "run", 0)
    assert token == 2
    assert world.wait() == [1, 1]
    assert "world 1 can no longer save: the newer world 2 has taken over" in world.read_log()
    before = list_saved_steps(tmp_path)[-1]
    run_training(tmp_path, merge_config(config, trainer={"train_iterations": before + 5}))
    assert read_manifest(tmp_path, before + 5)["generation"] == 3


def test_a_checkpoint_of_a_fenced_world_ranks_lower(run_copy: Path, saving_config: dict[str, Any], saved_run: Path) -> None:
    """A complete and valid checkpoint with a higher step but a lower generation is not the newest."""
    for step in (6, 9):
        set_generation(run_copy / "run" / f"step-{step:08}", step, 7 if step == 6 else 5)
    world = LocalWorld(run_copy, saving_config, 2)
    assert world.wait() == [0, 0]
    assert "resuming from step 6" in world.read_log()
    assert read_manifest(run_copy, 9)["generation"] == 8
    assert read_losses(run_copy) == read_losses(saved_run)


def test_a_partial_checkpoint_is_never_visible(tmp_path: Path) -> None:
    """At every moment of a commit, every visible checkpoint in save_dir has a valid manifest."""
    fence.claim_generation(tmp_path, 0)
    folder = commit.create_staging_folder(tmp_path, 3, 1)
    assert list(commit.scan_checkpoints(tmp_path)) == []
    (folder / "part-00000.bin").write_bytes(b"12345678")
    assert list(commit.scan_checkpoints(tmp_path)) == []
    commit.commit_checkpoint(tmp_path, folder, build_manifest(generation=1, step=3))
    assert [content.step for _, content in commit.list_checkpoints_newest_first(tmp_path)] == [3]
    assert not folder.exists()


def test_commit_behind_the_fence(tmp_path: Path) -> None:
    fence.claim_generation(tmp_path, 0)
    folder = commit.create_staging_folder(tmp_path, 3, 1)
    (folder / "part-00000.bin").write_bytes(b"12345678")
    fence.claim_generation(tmp_path, 5)
    with pytest.raises(Exception, match="world 1 can no longer save: the newer world 6"):
        commit.commit_checkpoint(tmp_path, folder, build_manifest(generation=1, step=3))
    assert not commit.build_checkpoint_path(tmp_path, 3).exists()


def test_a_disk_that_is_not_shared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "_VISIBILITY_TIMEOUT_SECONDS", 0.2)
    fence.claim_generation(tmp_path, 0)
    folder = commit.create_staging_folder(tmp_path, 3, 1)
    with pytest.raises(CheckpointError, match=r"part-00000\.bin, written by another node, is not visible on this node"):
        commit.commit_checkpoint(tmp_path, folder, build_manifest(generation=1, step=3))


def test_generations_are_taken_once(tmp_path: Path) -> None:
    assert [fence.claim_generation(tmp_path, at_least) for at_least in (0, 0, 7, 3)] == [1, 2, 8, 9]


def test_all_ranks_find_the_fence_that_the_first_has_set_up(tmp_path: Path) -> None:
    """Also if a network file system shows it late. In a folder of the same name on another disk it never appears."""
    token = fence.claim_generation(tmp_path / "ours", 0)
    fence.wait_for_fence_file(tmp_path / "ours", token, timeout=0)
    late = threading.Timer(0.3, fence.claim_generation, (tmp_path / "late", 0))
    late.start()
    fence.wait_for_fence_file(tmp_path / "late", 1)
    late.join()
    fence.claim_generation(tmp_path / "other", 6)
    with pytest.raises(CheckpointError, match=r"save_dir .*/other: is not the same folder as on rank 0's node"):
        fence.wait_for_fence_file(tmp_path / "other", token, timeout=0.2)


def test_save_dir_that_cannot_be_written(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "run").write_text("in the way")
    world = LocalWorld(tmp_path, config, 2)
    assert world.wait() == [1, 1]
    assert "config trainer.save_dir run: cannot be written" in world.read_log()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to others, and becomes them")
def test_a_user_who_cannot_write_to_save_dir_sees_the_line_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:2]):  # pytest lets no other user through
        folder.chmod(0o711)
    Path("runs").mkdir()
    os.chown("runs", 1234, 100)
    os.setegid(9)
    os.seteuid(9)
    try:
        with pytest.raises(CheckpointError) as caught:
            fence.claim_generation(Path("runs/first"), 0)
    finally:
        os.seteuid(0)
        os.setegid(0)
    assert f"permission denied; {tmp_path}/runs belongs to 1234:100, and the ranks run as 9:9" in str(caught.value)
    assert (
        caught.value.hint
        == f"set runner.docker_config.user: 1234:100; or run chown -R 9:9 on {tmp_path}/runs, or on the host folder that is mounted there"
    )


def test_resharded_state_is_the_same_state(run_copy: Path, saving_config: dict[str, Any]) -> None:
    """Saved by two ranks, then saved again by four tensor-parallel ranks: the following steps are the same."""
    more = merge_config(saving_config, trainer={"train_iterations": 12})
    again = shutil.copytree(run_copy, run_copy.with_name("again"))
    two = run_training(run_copy, more, 2)
    four = run_training(again, merge_config(more, topology={"model_parallel_size": 4}), 4)
    assert compute_deviation(two, four) < 1e-6
    assert read_manifest(again, 12)["tensors"].keys() == read_manifest(run_copy, 12)["tensors"].keys()


def set_generation(folder: Path, step: int, generation: int) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    values.pop("digest")
    assert values["step"] == step
    (folder / "manifest.json").write_text(Manifest(**{**values, "generation": generation}).to_text())


def build_manifest(generation: int, step: int) -> Manifest:
    files = {"part-00000.bin": hash_memory(memoryview(b"12345678")).build_entry(8)}
    return Manifest(generation, step, 12 * step, None, "data", {}, {}, files, {}, {})
