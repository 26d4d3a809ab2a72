"""Whole runs whose ranks, nodes and savers are killed: what survives saves the last completed step, once, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from swarmtrain import process
from swarmtrain.trainer.data import memory_map

ROOT = Path(__file__).parents[2]

# The real training_code.py, a little slower than it could be, so that a test can meet it between two steps of its choice.
TRAIN = """
import os, pathlib, sys, time
import training_code
from swarmtrain.trainer import loop
from swarmtrain.trainer.checkpoint.storage import Writer
make_step, write, folder = loop.make_step, Writer.write, pathlib.Path(sys.argv[1])
def slowly(*args, **options):
    time.sleep(0.02)
    return make_step(*args, **options)
def watched(writer):
    if (folder / "slow").exists():
        (folder / "slow").unlink()
        (writer.folder / writer.name).write_bytes(b"torn")
        (folder / "writing").write_text(str(os.getpid()))
        time.sleep(60)
    return write(writer)
loop.make_step, Writer.write = slowly, watched
home = folder / os.environ.get("SWARMTRAIN_NODE", "")
home.mkdir(exist_ok=True)
os.chdir(home)
training_code.main()
"""
STEPS = 80
CONFIG: dict[str, Any] = {
    "topology": {"global_batch_size": 8, "micro_batch_size": 2},
    "optimizer": {"gradient_clipping": 0.5},
    "learning_rate_scheduler": {"learning_rate": 1e-3, "learning_rate_warmup_steps": 2, "learning_rate_decay_iters": STEPS},
    "trainer": {"train_iterations": STEPS, "save_interval": None},
    "transformer_architecture": {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "sequence_length": 16},
}


def prepare(folder: Path, topology: Mapping[str, Any], *, own_disks: bool = False) -> Path:
    """Write data and config into `folder`, and return the config's path. Where a node's own disk is, see TRAIN."""
    memory_map.write(folder / "train", np.array_split(np.random.default_rng(1).integers(0, 64, 4000), 20), "uint8")
    config = {
        **CONFIG,
        "topology": {**CONFIG["topology"], **topology},
        "trainer": {**CONFIG["trainer"], "save_dir": "run" if own_disks else str(folder / "run"), "save_dir_shared": not own_disks},
        "logger": {"audit_dir": str(folder / "audit")},
        "data": {"data_prefixes": [str(folder / "train")]},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    environment = {"SWARMTRAIN_CONFIG": str(prepare(folder, {})), "OMP_NUM_THREADS": "1"}
    process.run([sys.executable, "training_code.py"], cwd=ROOT, env=environment)
    lines = (folder / "audit" / "world-000001-rank-0000.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


class Trained:
    """A small run of two nodes that trains for real, and what its ranks have recorded."""

    def __init__(self, run: Any, *, own_disks: bool = False, **topology: Any) -> None:
        self.run = run
        prepare(run.folder, topology, own_disks=own_disks)
        run.start_board()
        for number in (0, 1):
            self.start(number)

    def start(self, number: int) -> None:
        self.run.start_node(number, TRAIN, str(self.run.folder))

    def audit(self) -> dict[int, dict[int, list[dict[str, Any]]]]:
        """Return by token and step what ranks have recorded."""
        found: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for path in sorted((self.run.folder / "audit").glob("*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                found.setdefault(line["token"], {}).setdefault(line["step"], []).append(line)
        return found

    def until(self, world: int, steps: int = 10) -> None:
        """Wait until world `world` has made so many steps."""
        end = time.monotonic() + 120
        while len(self.audit().get(world, {})) < steps:
            assert time.monotonic() < end, self.run.transcript()
            time.sleep(0.02)

    def writer(self) -> int:
        """Return the pid of the rank that has begun to write, and sleeps over it."""
        path, end = self.run.folder / "writing", time.monotonic() + 60
        while not path.exists() or not path.read_text():
            assert time.monotonic() < end, self.run.transcript()
            time.sleep(0.02)
        return int(path.read_text())

    def ranks(self) -> dict[int, int]:
        """Return by pid the rank of each process of the newest world, all of which must be alive."""
        of_nodes = self.run.events("world")[-1].data["ranks"].items()
        return {pid: rank for node, ranks in of_nodes for pid, rank in zip(self.run.ranks(int(node[-1])), ranks, strict=True)}

    def lost(self, *died: Collection[int]) -> list[int]:
        """Return for each world after the first how many completed steps of a survivor it made again.

        `died`: the ranks of each world that were killed. One of them may have completed a step that no other did: what it
        sent last dies with its connections, and nobody is left who could save that step.
        """
        worlds = [steps for _, steps in sorted(self.audit().items())]
        outlived = [
            max(step for step, lines in steps.items() if any(line["rank"] not in dead for line in lines))
            for steps, dead in zip(worlds, died, strict=False)
        ]
        return [last + 1 - min(after) for last, after in zip(outlived, worlds[1:], strict=True)]

    def losses(self) -> dict[int, float]:
        """Return every step's loss. Ranks and worlds that have made the same step must agree."""
        seen: dict[int, set[float]] = {}
        for steps in self.audit().values():
            for step, lines in steps.items():
                seen.setdefault(step, set()).update(line["loss"] for line in lines)
        assert all(len(values) == 1 for values in seen.values())
        return {step: next(iter(values)) for step, values in seen.items()}


def kill(*pids: int) -> None:
    """Kill these at once: what is left has no time to save between one and the next."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_what_survives_a_death_saves_the_last_step(small_run: Any, undisturbed: dict[int, float]) -> None:
    """A rank is killed, and the one that saves for it too; then a node; then a rank stands still, and is woken too late."""
    trained = Trained(small_run)
    trained.until(1)
    (small_run.folder / "slow").touch()
    ranks, first = trained.ranks(), small_run.ranks(1)[0]
    kill(first)
    kill(second := trained.writer())
    trained.until(2)
    of_node0 = small_run.events("world")[-1].data["ranks"]["node0"]
    small_run.nodes["node0"].kill()
    small_run.nodes["node0"].wait()
    trained.start(0)
    trained.until(3)
    stopped = small_run.ranks(0)[1]
    halted = trained.ranks()[stopped]
    os.kill(stopped, signal.SIGSTOP)
    assert small_run.finish() == {"node0": 0, "node1": 0, "board": 0}
    assert len(small_run.events("world")) == 4
    assert trained.lost({ranks[first], ranks[second]}, of_node0, {halted}) == [0, 0, 0]
    assert [len(event.data["survivors"]) for event in small_run.events("checkpoint")[:3]] == [1, 1, 1]
    assert trained.losses() == undisturbed


def test_what_survives_saves_to_its_own_disk(small_run: Any, undisturbed: dict[int, float], gone: Callable[[list[int]], None]) -> None:
    """All of a node dies, and its disk is lost; it comes back with nothing. Then a rank dies, and both nodes save."""
    trained = Trained(small_run, own_disks=True)
    trained.until(1)
    family, of_node0 = small_run.ranks(0), small_run.events("world")[-1].data["ranks"]["node0"]
    kill(small_run.agent(0))
    gone(family)
    shutil.rmtree(small_run.folder / "node0")
    trained.until(2)
    ranks, victim = trained.ranks(), small_run.ranks(0)[1]
    kill(victim)
    trained.until(3)
    assert small_run.finish() == {"node0": 0, "node1": 0, "board": 0}
    assert trained.lost(of_node0, {ranks[victim]}) == [0, 0]
    first, second, *_ = [event.data for event in small_run.events("checkpoint")]
    assert (len(first["survivors"]), len(second["survivors"])) == (1, 2)
    for node in ("node0", "node1"):
        stands = {path.name for path in (small_run.folder / node / "run").glob("step-*")}
        assert {f"step-{step:08}" for step in (first["step"], second["step"], STEPS)} == stands, "the first was brought to who had lost it"
    assert "node0 has" not in small_run.output(), "what both have saved is the same"
    assert trained.losses() == undisturbed


def test_a_divided_state_is_saved_by_what_is_left_of_its_replicas(small_run: Any, undisturbed: dict[int, float]) -> None:
    """Each replica has two parts. One of each dies: the other two are a whole. Then a part dies with both that held it."""
    trained = Trained(small_run, data_parallel_type="hsdp", data_parallel_shard_size=2)
    trained.until(1)
    ranks, victims = trained.ranks(), (small_run.ranks(0)[0], small_run.ranks(1)[1])
    kill(*victims)
    trained.until(2)
    saved = small_run.events("checkpoint")[0].data
    kill(small_run.ranks(0)[0], small_run.ranks(1)[0])
    assert small_run.finish() == {"node0": 0, "node1": 0, "board": 0}
    of_nodes = small_run.events("world")[0].data["ranks"]
    assert sorted(saved["survivors"]) == sorted([of_nodes["node0"][1], of_nodes["node1"][0]])
    first, second = trained.lost({ranks[victim] for victim in victims}, ())
    assert first == 0
    assert second > 0, "nobody had the whole of the last step"
    assert [event.data["step"] for event in small_run.events("resumed")] == [saved["step"]] * 2
    assert trained.losses() == undisturbed


@pytest.mark.parametrize("split", ["model_parallel_size", "pipe_parallel_size"])
def test_a_divided_model_is_saved_by_parts_of_several_replicas(small_run: Any, undisturbed: dict[int, float], split: str) -> None:
    """Two replicas of a model in two parts. Of each part one dies, so that no replica is whole, and together they are."""
    trained = Trained(small_run, **{split: 2})
    trained.until(1)
    ranks, victims = trained.ranks(), (small_run.ranks(0)[0], small_run.ranks(1)[1])
    kill(*victims)
    assert small_run.finish() == {"node0": 0, "node1": 0, "board": 0}
    assert trained.lost({ranks[victim] for victim in victims}) == [0]
    assert len(small_run.events("checkpoint")[0].data["survivors"]) == 2
    assert trained.losses() == pytest.approx(undisturbed, rel=1e-5)
