"""Worlds of real ranks: processes forked from a server that has torch loaded, running the real training_code.py over gloo."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
TIMEOUT = 180.0
ROOT = Path(__file__).parents[2]

CONFIG: dict[str, Any] = {
    "topology": {"global_batch_size": 12, "micro_batch_size": 2},
    "optimizer": {"gradient_clipping": 0.5},
    "learning_rate_scheduler": {"learning_rate": 1e-2, "learning_rate_warmup_steps": 2, "learning_rate_decay_iters": 12},
    "trainer": {"train_iterations": 12, "save_dir": "run", "eval_iterations": 2},
    "logger": {"audit_dir": "audit", "log_interval": 1},
    "transformer_architecture": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 32},
}


class World:
    """`size` ranks that train `config` in `folder`, each with a log of its own."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        size: int,
        environ: Mapping[str, str] | None = None,
        script: str = "training_code",
        *,
        nodes: Sequence[str] = (),
    ) -> None:
        """`nodes`: of each rank, where each has a save_dir of its own, run/NODE."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        port = _free_port()
        self.ranks = [
            CONTEXT.Process(
                target=_rank,
                args=(str(folder), script, (rank, size, port), {**_node(folder, config, nodes, rank), **(environ or {})}),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self.ranks:
            process.start()

    def wait(self) -> list[int | None]:
        """Return the exit codes of all ranks, and fail if one does not end."""
        deadline = time.monotonic() + TIMEOUT
        for process in self.ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in self.ranks if process.is_alive()]
        for process in late:
            process.kill()
        assert not late, f"{len(late)} ranks hang\n{self.log()}"
        return [process.exitcode for process in self.ranks]

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        pid = self.ranks[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; fail if the world ends before."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, f"too slow\n{self.log()}"
            assert all(process.is_alive() for process in self.ranks), f"ended early\n{self.log()}"
            time.sleep(0.005)

    def log(self) -> str:
        """Return what all ranks have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("rank-*.log")))


def train(folder: Path, config: Mapping[str, Any], size: int = 1, environ: Mapping[str, str] | None = None) -> dict[int, float]:
    """Train to the end, and return the loss of every step."""
    world = World(folder, config, size, environ)
    assert world.wait() == [0] * size, world.log()
    return losses(folder)


def changed(base: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the config `base` with `sections` merged into it."""
    config = copy.deepcopy(dict(base))
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of every step, from metrics.jsonl. A step that stands twice is a failure."""
    lines = [line for line in _lines(folder / "run" / "metrics.jsonl") if "loss" in line]
    steps = [line["step"] for line in lines]
    assert sorted(set(steps)) == steps, f"steps not once and in order: {steps}"
    return {line["step"]: line["loss"] for line in lines}


def held_out(folder: Path) -> dict[int, float]:
    """Return the held-out losses, from metrics.jsonl."""
    return told(folder, "held_out_loss")


def gradient_norms(folder: Path) -> dict[int, float]:
    """Return the norm of every step's gradient before clipping, from metrics.jsonl."""
    return told(folder, "gradient_norm")


def told(folder: Path, name: str) -> dict[int, float]:
    """Return the numbers of a name, by step, from metrics.jsonl."""
    return {line["step"]: line[name] for line in _lines(folder / "run" / "metrics.jsonl") if name in line}


def audit(folder: Path) -> list[dict[str, Any]]:
    """Return what all ranks have recorded."""
    return [line for path in sorted((folder / "audit").glob("*.jsonl")) for line in _lines(path)]


def samples_by_step(folder: Path) -> dict[int, list[int]]:
    """Return the ids of the samples that each step has seen, all ranks together, sorted."""
    seen: dict[int, list[int]] = defaultdict(list)
    for line in audit(folder):
        seen[line["step"]] += line["samples"]
    return {step: sorted(samples) for step, samples in seen.items()}


def manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint."""
    values: dict[str, Any] = json.loads((folder / "run" / f"step-{step:08}" / "manifest.json").read_text())
    return values


def steps_saved(folder: Path) -> list[int]:
    """Return the steps of which there is a checkpoint."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run").glob("step-*"))


def deviation(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the largest relative difference at any step; both must have the same steps."""
    assert one.keys() == other.keys()
    assert one
    return max(abs(one[step] - other[step]) / abs(one[step]) for step in one)


def _node(folder: Path, config: Mapping[str, Any], nodes: Sequence[str], rank: int) -> dict[str, str]:
    """Return the environment of `rank` as torchrun would have it, if there are `nodes`; and its config."""
    if not nodes:
        return {}
    name = nodes[rank]
    path = folder / f"config-{name}.json"
    path.write_text(json.dumps(changed(config, trainer={"save_dir": f"run/{name}", "save_dir_shared": False})))
    number = list(dict.fromkeys(nodes)).index(name)
    return {"SWARMTRAIN_CONFIG": str(path), "SWARMTRAIN_NODE": name, "GROUP_RANK": str(number)}


def _rank(folder: str, script: str, place: tuple[int, int, int], environ: dict[str, str]) -> None:
    rank, size, port = place
    gc.freeze()  # as ranks of a run do
    os.chdir(folder)
    log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        SWARMTRAIN_NODE="node0",
        SWARMTRAIN_CONFIG=str(Path(folder) / "config.json"),
    )
    os.environ.update(environ)
    sys.argv = ["training_code.py"]
    importlib.import_module(script).main()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
