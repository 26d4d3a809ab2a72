"""trainer.save_dir_shared: false. Each node has its own folder; any node may lose it, and the run continues unchanged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds import LocalWorld, compute_deviation, merge_config, read_audit, read_losses, run_training

from swarmtrain.trainer.checkpoint import manifest
from swarmtrain.trainer.checkpoint.storage import fence, tensor_storage

STEPS = 15


@pytest.fixture(scope="module")
def saving_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config that saves every third step."""
    return merge_config(config, trainer={"train_iterations": STEPS, "save_interval": 3, "keep_checkpoints": 9})


@pytest.fixture(scope="module")
def shared_disk_run(tmp_path_factory: pytest.TempPathFactory, saving_config: dict[str, Any]) -> Path:
    """An undisturbed run of two ranks on a shared disk."""
    folder = tmp_path_factory.mktemp("shared")
    run_training(folder, saving_config, 2)
    return folder


def train_to_step(folder: Path, config: dict[str, Any], nodes: Sequence[str], steps: int = STEPS) -> str:
    """Train to step `steps`, and return the log."""
    world = LocalWorld(folder, merge_config(config, trainer={"train_iterations": steps}), len(nodes), nodes=nodes)
    assert world.wait() == [0] * len(nodes), world.read_log()
    return world.read_log()


def read_recorded_losses(folder: Path) -> dict[int, float]:
    """Return every step's loss, from the newest world that ran the step."""
    return {line["step"]: line["loss"] for line in sorted(read_audit(folder), key=lambda line: int(line["generation"]))}


def read_valid_checkpoints(folder: Path, node: str) -> dict[int, manifest.Manifest]:
    """Return the checkpoints of a node by step; each must be complete and valid."""
    manifests = {path: manifest.read_manifest(path) for path in (folder / "run" / node).glob("step-*")}
    for path, content in manifests.items():
        manifest.verify_files(path, content, content.files)
    assert not list((folder / "run" / node).glob(".step-*")), "something half-written has stayed"
    return {content.step: content for content in manifests.values()}


def damage_file(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_run_is_the_same_after_any_disk_failure(tmp_path: Path, saving_config: dict[str, Any], shared_disk_run: Path) -> None:
    """Corrupt on both nodes in different parts; lost on one, with a fenced generation on the other; then only a third node has it."""
    undisturbed = read_losses(shared_disk_run)
    train_to_step(tmp_path, saving_config, "ab", 6)
    for node in "ab":
        assert sorted(read_valid_checkpoints(tmp_path, node)) == [3, 6]
        for step, content in read_valid_checkpoints(tmp_path, node).items():
            assert content.files == manifest.read_manifest(shared_disk_run / "run" / f"step-{step:08}").files, (
                "the same bytes as on a shared disk"
            )

    for number, node in enumerate("ab"):
        damage_file(tmp_path / "run" / node / "step-00000006" / f"part-{number:05}.bin")
    log = train_to_step(tmp_path, saving_config, "ba", 9)
    assert "a has a corrupt run/b/step-00000006: part-00000.bin is corrupt" in log
    assert "resuming from step 6" in log, "together they had the whole"
    assert read_recorded_losses(tmp_path) == {step: undisturbed[step] for step in range(1, 10)}

    shutil.rmtree(tmp_path / "run" / "a")
    zombie = tmp_path / "run" / "b" / "step-00000014"
    shutil.copytree(tmp_path / "run" / "b" / "step-00000009", zombie)
    values = json.loads((zombie / "manifest.json").read_text())
    values.pop("digest")
    (zombie / "manifest.json").write_text(manifest.Manifest(**{**values, "generation": 1, "step": 14}).to_text())
    log = train_to_step(tmp_path, saving_config, "abc", 12)
    assert "resuming from step 9" in log, "who trained on without the others has nothing to say"
    assert (
        compute_deviation(
            {step: read_recorded_losses(tmp_path)[step] for step in (10, 11, 12)}, {step: undisturbed[step] for step in (10, 11, 12)}
        )
        < 1e-5
    )

    for node in "ab":
        shutil.rmtree(tmp_path / "run" / node)
    assert "resuming from step 12" in train_to_step(tmp_path, saving_config, "bc")
    assert read_valid_checkpoints(tmp_path, "b").keys() == {12, 15}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss" in line] == [*range(1, 10), 13, 14, 15], "10 to 12 went with the disk of a"
    assert {15, 12, 9} <= read_valid_checkpoints(tmp_path, "c").keys()
    assert {content.generation for content in (read_valid_checkpoints(tmp_path, node)[15] for node in "bc")} == {4}
    assert compute_deviation(read_recorded_losses(tmp_path), undisturbed) < 1e-5


def test_a_sharded_state_is_complete_on_each_node(tmp_path: Path, saving_config: dict[str, Any], shared_disk_run: Path) -> None:
    """Each rank has a shard that no other has. One rank is killed, and its node's disk is lost."""
    divided = merge_config(saving_config, topology={"data_parallel_type": "fsdp"})
    world = LocalWorld(tmp_path, divided, 3, {"PACE": "0.1"}, script="slow_disk", nodes="aab")
    world.wait_until((tmp_path / "run" / "b" / "step-00000006").exists)
    world.send_signal(2, signal.SIGKILL)
    assert 0 not in world.wait()
    parts = {"part-00000.bin", "part-00001.bin", "part-00002.bin"}
    assert {path.name for path in (tmp_path / "run" / "b" / "step-00000006").iterdir()} == {*parts, manifest.MANIFEST_NAME}
    shutil.rmtree(tmp_path / "run" / "b")
    assert "resuming from step" in train_to_step(tmp_path, divided, "aab")
    assert STEPS in read_valid_checkpoints(tmp_path, "a").keys() & read_valid_checkpoints(tmp_path, "b").keys()
    assert compute_deviation(read_recorded_losses(tmp_path), read_losses(shared_disk_run)) < 1e-5


def test_one_node_has_no_room_for_what_the_other_sends(tmp_path: Path, saving_config: dict[str, Any]) -> None:
    """Its own half would fit. Both report it, continue training, and keep nothing half-written."""
    disk = tmp_path / "run" / "b"
    disk.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=288k", "none", str(disk)], check=False, capture_output=True, text=True)
    if made.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(made.stderr)
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        divided = merge_config(saving_config, topology={"data_parallel_type": "fsdp"}, trainer={"train_iterations": 7})
        world = LocalWorld(tmp_path, divided, 2, nodes="ab")
        assert world.wait() == [1, 1], "what cannot be saved at the end is an error"
        expected_line = (
            "cannot save the checkpoint of step 3: rank 1: config trainer.save_dir run/b: part-00000.bin: no space left on "
            "device; training continues"
        )
        assert expected_line in world.read_log()
        assert max(read_recorded_losses(tmp_path)) == 7
        left = [path.name for path in (tmp_path / "run").glob("*/*step*")]
        assert left == [".step-00000007.world-1"] * 2, "what the next world clears away"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_world_that_is_fenced_on_one_disk_stops_on_all(tmp_path: Path, saving_config: dict[str, Any]) -> None:
    world = LocalWorld(tmp_path, merge_config(saving_config, trainer={"train_iterations": 1_000_000}), 2, nodes="ab")
    world.wait_until((tmp_path / "run" / "a" / "step-00000003").exists)
    assert fence.claim_generation(tmp_path / "run" / "b", 0) == 2
    assert world.wait() == [1, 1]
    assert "world 1 can no longer save: the newer world 2 has taken over run/b" in world.read_log()


def test_one_folder_for_two_nodes_is_refused(tmp_path: Path, saving_config: dict[str, Any]) -> None:
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "b").symlink_to("a")
    world = LocalWorld(tmp_path, saving_config, 2, nodes="ab")
    assert world.wait() == [1, 1]
    assert "save_dir run/a: is the same folder on several of the nodes a, b" in world.read_log()


def test_parts_are_assigned_to_ranks_that_have_them() -> None:
    zero, one, two = (f"part-0000{number}.bin" for number in range(3))
    assert tensor_storage.assign_shards_to_ranks([{zero, one, two}] * 3, (0, 1)) == {0: [zero, two], 1: [one]}
    assert tensor_storage.assign_shards_to_ranks([{zero, one, two}] * 3, (2,)) == {2: [zero, one, two]}
    assert tensor_storage.assign_shards_to_ranks([{zero}, {one}, {one, two}], (0, 2)) == {0: [zero], 2: [one, two]}


@pytest.mark.test_all_only("one more topology each; the gate loses disks of a replicated state")
@pytest.mark.parametrize(
    "split",
    [
        {"topology": {"data_parallel_type": "hsdp", "data_parallel_shard_size": 2}},
        {"optimizer": {"zero": True}},
        {"topology": {"model_parallel_size": 2}},
        {"topology": {"pipe_parallel_size": 2}},
    ],
    ids=["hsdp", "zero", "tensor", "pipe"],
)
def test_a_lost_disk_is_survived_with_any_sharding(
    tmp_path: Path, saving_config: dict[str, Any], shared_disk_run: Path, split: dict[str, Any]
) -> None:
    """Two nodes of two ranks: the state is sharded within each node, or over both."""
    config = merge_config(saving_config, **split)
    train_to_step(tmp_path, config, "aabb", 3)
    shutil.rmtree(tmp_path / "run" / "a")
    assert "resuming from step 3" in train_to_step(tmp_path, config, "aabb", 6)
    assert read_valid_checkpoints(tmp_path, "a").keys() == {3, 6} == read_valid_checkpoints(tmp_path, "b").keys()
    undisturbed = read_losses(shared_disk_run)
    assert compute_deviation(read_recorded_losses(tmp_path), {step: undisturbed[step] for step in range(1, 7)}) < 1e-5
