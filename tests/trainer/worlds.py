"""Worlds of real ranks: processes forked from a server that has torch loaded, running the real training_code.py over gloo."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmtrain.protocol.distributed_env import reserve_port

CONTEXT = multiprocessing.get_context("forkserver")
TIMEOUT_SECONDS = 180.0
ROOT = Path(__file__).parents[2]

CONFIG: dict[str, Any] = {
    "topology": {"global_batch_size": 12, "micro_batch_size": 2},
    "optimizer": {"gradient_clipping": 0.5},
    "learning_rate_scheduler": {"learning_rate": 1e-2, "learning_rate_warmup_steps": 2, "learning_rate_decay_iters": 12},
    "trainer": {"train_iterations": 12, "save_dir": "run", "eval_iterations": 2},
    "logger": {"audit_dir": "audit", "log_interval": 1},
    "transformer_architecture": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "sequence_length": 32},
}


class LocalWorld:
    """A world of `size` ranks that train `config` in `folder`, each with its own log."""

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
        """`nodes`: the node of each rank, if each node has its own save_dir, run/NODE."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        self._port = reserve_port()
        port = self._port.getsockname()[1]
        self.processes = [
            CONTEXT.Process(
                target=_run_rank,
                args=(str(folder), script, (rank, size, port), {**_build_node_environment(folder, config, nodes, rank), **(environ or {})}),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def wait(self) -> list[int | None]:
        """Return the exit codes of all ranks, and fail if one does not end."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [process for process in self.processes if process.is_alive()]
        for process in late:
            process.kill()
        assert not late, f"{len(late)} ranks hang\n{self.read_log()}"
        return [process.exitcode for process in self.processes]

    def send_signal(self, rank: int, signum: signal.Signals) -> None:
        """Send a signal to one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signum)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; fail if a rank ends first."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"too slow\n{self.read_log()}"
            assert all(process.is_alive() for process in self.processes), f"ended early\n{self.read_log()}"
            time.sleep(0.005)

    def read_log(self) -> str:
        """Return what all ranks have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("rank-*.log")))


def run_training(folder: Path, config: Mapping[str, Any], size: int = 1, environ: Mapping[str, str] | None = None) -> dict[int, float]:
    """Train to the end, and return the loss of every step. Fails if a rank uses something that torch has deprecated."""
    world = LocalWorld(folder, config, size, environ)
    assert world.wait() == [0] * size, world.read_log()
    assert "FutureWarning" not in world.read_log()
    return read_losses(folder)


def merge_config(base: Mapping[str, Any], **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the config `base` with `sections` merged into it."""
    config = copy.deepcopy(dict(base))
    for name, values in sections.items():
        config[name] = {**config.get(name, {}), **values}
    return config


def read_losses(folder: Path) -> dict[int, float]:
    """Return the loss of every step, from metrics.jsonl. Fails if a step occurs twice."""
    lines = [line for line in _read_lines(folder / "run" / "metrics.jsonl") if "loss" in line]
    steps = [line["step"] for line in lines]
    assert sorted(set(steps)) == steps, f"steps not once and in order: {steps}"
    return {line["step"]: line["loss"] for line in lines}


def read_validation_losses(folder: Path) -> dict[int, float]:
    """Return the validation losses by step, from metrics.jsonl."""
    return read_metric(folder, "validation_loss")


def read_gradient_norms(folder: Path) -> dict[int, float]:
    """Return the norm of every step's gradient before clipping, from metrics.jsonl."""
    return read_metric(folder, "gradient_norm")


def read_metric(folder: Path, name: str) -> dict[int, float]:
    """Return the values of the metric `name` by step, from metrics.jsonl."""
    return {line["step"]: line[name] for line in _read_lines(folder / "run" / "metrics.jsonl") if name in line}


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """Return the audit lines of all ranks."""
    return [line for path in sorted((folder / "audit").glob("*.jsonl")) for line in _read_lines(path)]


def read_samples_by_step(folder: Path) -> dict[int, list[int]]:
    """Return the sorted sample ids of each step, over all ranks."""
    ids_by_step: dict[int, list[int]] = defaultdict(list)
    for line in read_audit(folder):
        ids_by_step[line["step"]] += line["samples"]
    return {step: sorted(samples) for step, samples in ids_by_step.items()}


def read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Return the manifest of a checkpoint."""
    values: dict[str, Any] = json.loads((folder / "run" / f"step-{step:08}" / "manifest.json").read_text())
    return values


def list_saved_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, sorted."""
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "run").glob("step-*"))


def compute_deviation(first: Mapping[int, float], second: Mapping[int, float]) -> float:
    """Return the largest relative difference at any step; both must have the same steps."""
    assert first.keys() == second.keys()
    assert first
    return max(abs(first[step] - second[step]) / abs(first[step]) for step in first)


def _build_node_environment(folder: Path, config: Mapping[str, Any], nodes: Sequence[str], rank: int) -> dict[str, str]:
    """Return the environment of `rank` as torchrun would set it, and write its node's config; empty without `nodes`."""
    if not nodes:
        return {}
    name = nodes[rank]
    path = folder / f"config-{name}.json"
    path.write_text(json.dumps(merge_config(config, trainer={"save_dir": f"run/{name}", "save_dir_shared": False})))
    number = list(dict.fromkeys(nodes)).index(name)
    return {"SWARMTRAIN_CONFIG": str(path), "SWARMTRAIN_NODE": name, "GROUP_RANK": str(number)}


def _run_rank(folder: str, script: str, rank_size_port: tuple[int, int, int], environ: dict[str, str]) -> None:
    rank, size, port = rank_size_port
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


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `path`, except for a last one that is still being written."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
