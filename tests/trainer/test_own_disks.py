"""trainer.save_dir_shared: false. Each node has a folder of its own; any of them may lose it, and the run goes on the same."""

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
from worlds import World, audit, changed, deviation, losses, train

from swarmtrain.trainer.checkpoint import apart, fence, manifest

STEPS = 15


@pytest.fixture(scope="module")
def saving(config: dict[str, Any]) -> dict[str, Any]:
    """Saves each third step."""
    return changed(config, trainer={"train_iterations": STEPS, "save_interval": 3, "keep_checkpoints": 9})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, saving: dict[str, Any]) -> Path:
    """A run of two ranks on a disk that both see, which nobody disturbs."""
    folder = tmp_path_factory.mktemp("shared")
    train(folder, saving, 2)
    return folder


def go_on(folder: Path, config: dict[str, Any], nodes: Sequence[str], steps: int = STEPS) -> str:
    """Train to step `steps`, and return the log."""
    world = World(folder, changed(config, trainer={"train_iterations": steps}), len(nodes), nodes=nodes)
    assert world.wait() == [0] * len(nodes), world.log()
    return world.log()


def recorded(folder: Path) -> dict[int, float]:
    """Return every step's loss as the newest world that made it had it."""
    return {line["step"]: line["loss"] for line in sorted(audit(folder), key=lambda line: int(line["token"]))}


def standing(folder: Path, node: str) -> dict[int, manifest.Manifest]:
    """Return the checkpoints of a node by step, each of which must be whole."""
    found = {path: manifest.read(path) for path in (folder / "run" / node).glob("step-*")}
    for path, content in found.items():
        manifest.verify(path, content, content.files)
    assert not list((folder / "run" / node).glob(".step-*")), "something half-written has stayed"
    return {content.step: content for content in found.values()}


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_whatever_happens_to_disks_the_run_is_the_same(tmp_path: Path, saving: dict[str, Any], shared: Path) -> None:
    """Torn on both nodes in other places; lost; worth less than it looks; a third node comes, and goes with all it has."""
    undisturbed = losses(shared)
    go_on(tmp_path, saving, "ab", 6)
    for node in "ab":
        assert sorted(standing(tmp_path, node)) == [3, 6]
        for step, content in standing(tmp_path, node).items():
            assert content.files == manifest.read(shared / "run" / f"step-{step:08}").files, "the same bytes as on a shared disk"

    for number, node in enumerate("ab"):
        damage(tmp_path / "run" / node / "step-00000006" / f"part-{number:05}.bin")
    log = go_on(tmp_path, saving, "ba", 9)
    assert "a has a torn run/b/step-00000006: part-00000.bin is damaged" in log
    assert "goes on after step 6" in log, "together they had the whole"
    assert recorded(tmp_path) == {step: undisturbed[step] for step in range(1, 10)}

    shutil.rmtree(tmp_path / "run" / "a")
    zombie = tmp_path / "run" / "b" / "step-00000014"
    shutil.copytree(tmp_path / "run" / "b" / "step-00000009", zombie)
    values = json.loads((zombie / "manifest.json").read_text())
    values.pop("digest")
    (zombie / "manifest.json").write_text(manifest.Manifest(**{**values, "token": 1, "step": 14}).to_text())
    log = go_on(tmp_path, saving, "abc", 12)
    assert "goes on after step 9" in log, "who trained on without the others has nothing to say"
    assert deviation({step: recorded(tmp_path)[step] for step in (10, 11, 12)}, {step: undisturbed[step] for step in (10, 11, 12)}) < 1e-5

    for node in "ab":
        shutil.rmtree(tmp_path / "run" / node)
    assert "goes on after step 12" in go_on(tmp_path, saving, "bc")
    assert standing(tmp_path, "b").keys() == {12, 15}
    metrics = [json.loads(line) for line in (tmp_path / "run" / "b" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss" in line] == [*range(1, 10), 13, 14, 15], "10 to 12 went with the disk of a"
    assert {15, 12, 9} <= standing(tmp_path, "c").keys()
    assert {content.token for content in (standing(tmp_path, node)[15] for node in "bc")} == {4}
    assert deviation(recorded(tmp_path), undisturbed) < 1e-5


def test_a_divided_state_is_whole_on_each_node(tmp_path: Path, saving: dict[str, Any], shared: Path) -> None:
    """Each rank has what no other has. One is killed, and its node's disk is lost."""
    divided = changed(saving, topology={"data_parallel_type": "fsdp"})
    world = World(tmp_path, divided, 3, {"PACE": "0.1"}, script="slow_disk", nodes="aab")
    world.until((tmp_path / "run" / "b" / "step-00000006").exists)
    world.send(2, signal.SIGKILL)
    assert 0 not in world.wait()
    parts = {"part-00000.bin", "part-00001.bin", "part-00002.bin"}
    assert {path.name for path in (tmp_path / "run" / "b" / "step-00000006").iterdir()} == {*parts, manifest.NAME}
    shutil.rmtree(tmp_path / "run" / "b")
    assert "goes on after step" in go_on(tmp_path, divided, "aab")
    assert STEPS in standing(tmp_path, "a").keys() & standing(tmp_path, "b").keys()
    assert deviation(recorded(tmp_path), losses(shared)) < 1e-5


def test_one_node_has_no_room_for_what_the_other_sends(tmp_path: Path, saving: dict[str, Any]) -> None:
    """Its own half would fit. Both say so, train on, and keep nothing half-written."""
    disk = tmp_path / "run" / "b"
    disk.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=288k", "none", str(disk)], check=False, capture_output=True, text=True)
    if made.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(made.stderr)
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    try:
        divided = changed(saving, topology={"data_parallel_type": "fsdp"}, trainer={"train_iterations": 7})
        world = World(tmp_path, divided, 2, nodes="ab")
        assert world.wait() == [1, 1], "what cannot be saved at the end is an error"
        told = "no checkpoint of step 3: rank 1: config trainer.save_dir run/b: part-00000.bin: no space left on device; training goes on"
        assert told in world.log()
        assert max(recorded(tmp_path)) == 7
        left = [path.name for path in (tmp_path / "run").glob("*/*step*")]
        assert left == [".step-00000007.world-1"] * 2, "what the next world clears away"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_world_that_is_cut_off_on_one_disk_stops_on_all(tmp_path: Path, saving: dict[str, Any]) -> None:
    world = World(tmp_path, changed(saving, trainer={"train_iterations": 1_000_000}), 2, nodes="ab")
    world.until((tmp_path / "run" / "a" / "step-00000003").exists)
    assert fence.claim(tmp_path / "run" / "b", 0) == 2
    assert world.wait() == [1, 1]
    assert "world 1 is cut off: world 2 has taken over run/b" in world.log()


def test_one_folder_for_two_nodes_is_refused(tmp_path: Path, saving: dict[str, Any]) -> None:
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "run" / "b").symlink_to("a")
    world = World(tmp_path, saving, 2, nodes="ab")
    assert world.wait() == [1, 1]
    assert "save_dir run/a: is one folder for several of the nodes a, b" in world.log()


def test_parts_are_dealt_to_ranks_that_have_them() -> None:
    zero, one, two = (f"part-0000{number}.bin" for number in range(3))
    assert apart.dealt([{zero, one, two}] * 3, (0, 1)) == {0: [zero, two], 1: [one]}
    assert apart.dealt([{zero, one, two}] * 3, (2,)) == {2: [zero, one, two]}
    assert apart.dealt([{zero}, {one}, {one, two}], (0, 2)) == {0: [zero], 2: [one, two]}


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
def test_a_disk_is_lost_however_the_state_is_divided(tmp_path: Path, saving: dict[str, Any], shared: Path, split: dict[str, Any]) -> None:
    """Two nodes of two ranks: divided within each node, or over both."""
    config = changed(saving, **split)
    go_on(tmp_path, config, "aabb", 3)
    shutil.rmtree(tmp_path / "run" / "a")
    assert "goes on after step 3" in go_on(tmp_path, config, "aabb", 6)
    assert standing(tmp_path, "a").keys() == {3, 6} == standing(tmp_path, "b").keys()
    undisturbed = losses(shared)
    assert deviation(recorded(tmp_path), {step: undisturbed[step] for step in range(1, 7)}) < 1e-5
