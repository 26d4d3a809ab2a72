"""Benchmark of what compression costs: validation losses of PowerSGD and DiLoCo at equal tokens, against data parallelism.

A model of 0.1 million parameters on the quickstart's data, for 60 rounds of DiLoCo, with three seeds. Data parallelism and DiLoCo run in
one process, since their losses do not depend on the number of ranks; PowerSGD on two ranks. The curves are drawn to
build/bench/learning-curves.svg.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datautils
from benchmarks import third_party_tools
from benchmarks.measurement import BUILD, ROOT, BenchmarkRow, Sample, print_progress
from swarmtrain import process
from swarmtrain.config.loader import load_config

_CURVES_FILE = BUILD / "learning-curves.json"
"""The validation losses by step, of each method and each seed."""
_FOLDER = BUILD / "learning-curves"
_SEEDS = (1, 2, 3)
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
_ROUNDS, _ROUND_STEPS = 60, 50
_OPTIONS = [
    "runner.runner_type=local",
    "runner.nodes=1",
    "runner.min_nodes=1",
    "topology.global_batch_size=64",
    "topology.micro_batch_size=32",
    "transformer_architecture.hidden_size=64",
    "transformer_architecture.sequence_length=64",
    f"trainer.train_iterations={_ROUNDS * _ROUND_STEPS}",
    f"trainer.eval_interval={_ROUND_STEPS}",
    "trainer.eval_iterations=4",
    "trainer.save_interval=null",
    f"data.data_prefixes=[{_FOLDER}/training]",
    f"data.validation_data_prefixes=[{_FOLDER}/validation]",
]


@dataclass(frozen=True)
class _Method:
    """A way of training. `aim`: by how many percent its last validation loss may be higher than that of data parallelism; None: any."""

    name: str
    options: Sequence[str]
    ranks: int = 1
    aim: float | None = None


_DDP = _Method("ddp", [])
_POWERSGD = ["topology.gradient_compression=powersgd", "topology.powersgd.start_step=300"]
_METHODS = (
    _Method("powersgd", _POWERSGD, ranks=2, aim=0.5),
    _Method("powersgd-4", [*_POWERSGD, "topology.powersgd.matrix_approximation_rank=4"], ranks=2),
    _Method(
        "diloco",
        [
            "topology.learners=2",
            "diloco.quantization=int8",
            f"diloco.inner_steps={_ROUND_STEPS}",
            "diloco.outer_optimizer={learning_rate: 0.8, momentum: 0.5}",
        ],
        aim=1.0,
    ),
)


def measure_learning_curves() -> Iterator[BenchmarkRow]:
    """Train with each method and seed, and compare the validation losses after the last step. Also draw the curves."""
    datautils.write_python_sources(_FOLDER / "training", _FOLDER / "validation")
    curves = {method.name: _train_with_all_seeds(method) for method in (_DDP, *_METHODS)}
    _CURVES_FILE.write_text(json.dumps(curves))
    python = third_party_tools.install_with_shared_packages(third_party_tools.MATPLOTLIB)
    picture = _CURVES_FILE.with_suffix(".svg")
    process.run_command([str(python), "-m", "benchmarks.learning_curves_picture", str(_CURVES_FILE), str(picture)], cwd=ROOT)
    ddp = _get_last_losses(curves[_DDP.name])
    for method in _METHODS:
        losses = _get_last_losses(curves[method.name])
        percentages = [100 * (loss / other - 1) for loss, other in zip(losses, ddp, strict=True)]
        triples = zip(_SEEDS, losses, ddp, strict=True)
        notes = [f"seed {seed}: {loss:.4f} nats per byte against {other:.4f}" for seed, loss, other in triples]
        aim = "" if method.aim is None else f"the aim is at most {method.aim:g} %; "
        yield BenchmarkRow(
            f"curves/{method.name}",
            f"how much higher the validation loss of {method.name} is than that of data parallelism after {_ROUNDS * _ROUND_STEPS} steps",
            "%",
            Sample.from_values(percentages),
            note=f"{aim}{' '.join(method.options)}; {', '.join(notes)}",
        )


def _get_last_losses(curves: Sequence[dict[int, float]]) -> list[float]:
    return [losses[_ROUNDS * _ROUND_STEPS] for losses in curves]


def _train_with_all_seeds(method: _Method) -> list[dict[int, float]]:
    """Return the curve of each seed. Runs share the machine: how fast they are does not change their losses."""
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // method.ranks)) as pool:
        return list(pool.map(partial(_train, method), _SEEDS))


def _train(method: _Method, seed: int) -> dict[int, float]:
    """Train with `method` from the start, and return the validation loss of each evaluated step."""
    folder = _FOLDER / f"{method.name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = [*_OPTIONS, f"trainer.seed={seed}", f"trainer.save_dir={folder}", *method.options]
    config_file = folder / "config.json"
    config_file.write_text(load_config(ROOT / "examples" / "quickstart.yml", options).to_json())
    interpreter = [sys.executable] if method.ranks == 1 else [*_TORCHRUN, str(method.ranks)]
    process.run_command([*interpreter, "training_code.py", str(config_file)], cwd=ROOT, env={"OMP_NUM_THREADS": "1"})
    losses = _read_validation_losses(folder / "metrics.jsonl")
    print_progress(f"{method.name}, seed {seed}: {losses[max(losses)]:.4f} nats per byte")
    return losses


def _read_validation_losses(file: Path) -> dict[int, float]:
    lines = map(json.loads, file.read_text().splitlines())
    return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
