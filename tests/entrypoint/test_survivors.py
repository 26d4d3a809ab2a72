"""Whole runs whose ranks, nodes and savers are killed: what survives saves the last completed step, once, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the trainer needs torch")

from swarmtrain.process import run
from swarmtrain.trainer.data import memory_map

ROOT = Path(__file__).parents[2]

# The real training_code.py, a little slower than it could be, so that a test can meet it between two steps of its choice.
TRAIN = """
import time
import training_code
from swarmtrain.trainer import loop
make_step = loop.make_step
def slowly(*args, **options):
    time.sleep(0.02)
    return make_step(*args, **options)
loop.make_step = slowly
training_code.main()
"""
STEPS = 150
CONFIG: dict[str, Any] = {
    "topology": {"global_batch_size": 8, "micro_batch_size": 2},
    "optimizer": {"gradient_clipping": 0.5},
    "learning_rate_scheduler": {"learning_rate": 1e-2, "learning_rate_warmup_steps": 2, "learning_rate_decay_iters": STEPS},
    "trainer": {"train_iterations": STEPS},
    "transformer_architecture": {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "sequence_length": 16},
}


class Trained:
    """A small run of two nodes that trains for real, and what its ranks have recorded."""

    def __init__(self, run: Any, **topology: Any) -> None:
        self.run = run
        folder: Path = run.folder
        memory_map.write(folder / "train", np.array_split(np.random.default_rng(1).integers(0, 64, 4000), 20), "uint8")
        config = {
            **CONFIG,
            "topology": {**CONFIG["topology"], **topology},
            "trainer": {**CONFIG["trainer"], "save_dir": str(folder / "run")},
            "logger": {"audit_dir": str(folder / "audit")},
            "data": {"data_prefixes": [str(folder / "train")]},
        }
        (folder / "config.json").write_text(json.dumps(config))
        run.start_board()
        for number in (0, 1):
            self.start(number)

    def start(self, number: int) -> None:
        self.run.start_node(number, TRAIN)

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

    def lost(self) -> list[int]:
        """Return for each world after the first how many steps that had been made before it made again."""
        worlds = [steps for _, steps in sorted(self.audit().items())]
        return [max(before) + 1 - min(after) for before, after in pairwise(worlds)]

    def losses(self) -> dict[int, float]:
        """Return every step's loss. Ranks and worlds that have made the same step must agree."""
        seen: dict[int, set[float]] = {}
        for steps in self.audit().values():
            for step, lines in steps.items():
                seen.setdefault(step, set()).update(line["loss"] for line in lines)
        assert all(len(values) == 1 for values in seen.values())
        return {step: next(iter(values)) for step, values in seen.items()}


def test_what_survives_a_death_saves_the_last_step(small_run: Any) -> None:
    """A rank is killed, then a node; then a rank stands still, and comes back when the others have given it up."""
    trained = Trained(small_run)
    trained.until(1)
    os.kill(small_run.ranks(1)[0], signal.SIGKILL)
    trained.until(2)
    small_run.nodes["node0"].kill()
    small_run.nodes["node0"].wait()
    trained.start(0)
    trained.until(3)
    stopped = small_run.ranks(0)[1]
    os.kill(stopped, signal.SIGSTOP)
    small_run.until("checkpoint", count=3)
    os.kill(stopped, signal.SIGCONT)
    assert small_run.finish() == {"node0": 0, "node1": 0, "board": 0}
    assert len(small_run.events("world")) == 4
    assert trained.lost() == [0, 0, 0]
    assert [len(event.data["survivors"]) for event in small_run.events("checkpoint")[:3]] == [1, 1, 1]
    assert trained.losses() == undisturbed(small_run.folder)


def undisturbed(folder: Path) -> dict[int, float]:
    """Return the losses of one process that trains the same, and that nobody disturbs."""
    config = json.loads((folder / "config.json").read_text())
    alone = folder / "alone"
    alone.mkdir()
    config["trainer"]["save_dir"], config["logger"]["audit_dir"] = str(alone / "run"), str(alone / "audit")
    (alone / "config.json").write_text(json.dumps(config))
    run([sys.executable, "training_code.py"], cwd=ROOT, env={"SWARMTRAIN_CONFIG": str(alone / "config.json"), "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (alone / "audit" / "world-000001-rank-0000.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}
