"""Benchmark of what compression costs: validation losses of PowerSGD and DiLoCo at equal tokens, against data parallelism.

A model of 0.1 million parameters on the quickstart's data, for 60 rounds of DiLoCo, with three seeds, with AdamW and with Muon. Data
parallelism and DiLoCo run in one process, since their losses do not depend on the number of ranks; PowerSGD on two ranks. The curves are
drawn to build/bench/learning-curves.svg.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
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
_GLOBAL_BATCH, _VALIDATION_SAMPLES = 64, 4096
_OPTIONS = [
    "runner.runner_type=local",
    "runner.nodes=1",
    "runner.min_nodes=1",
    f"topology.global_batch_size={_GLOBAL_BATCH}",
    "topology.micro_batch_size=32",
    "transformer_architecture.hidden_size=64",
    "transformer_architecture.sequence_length=64",
    f"trainer.train_iterations={_ROUNDS * _ROUND_STEPS}",
    f"trainer.eval_interval={2 * _ROUND_STEPS}",
    f"trainer.eval_iterations={_VALIDATION_SAMPLES // _GLOBAL_BATCH}",
    "trainer.save_interval=null",
    f"data.data_prefixes=[{_FOLDER}/training]",
    f"data.validation_data_prefixes=[{_FOLDER}/validation]",
]


@dataclass(frozen=True)
class _Method:
    """A way of training. `aim`: by how many percent its last validation loss may be higher than that of `reference`; None: any."""

    name: str
    options: Sequence[str]
    ranks: int = 1
    reference: str = ""
    """Name of the method with which it is compared; empty: none."""
    aim: float | None = None


_POWERSGD = ["topology.gradient_compression=powersgd", "topology.powersgd.start_step=300"]
_DILOCO = [
    "topology.learners=2",
    "diloco.quantization=int8",
    f"diloco.inner_steps={_ROUND_STEPS}",
    "diloco.outer_optimizer={learning_rate: 0.8, momentum: 0.5}",
]
_MUON = ["optimizer.method=muon"]
_METHODS = (
    _Method("ddp", []),
    _Method("powersgd", _POWERSGD, ranks=2, reference="ddp", aim=0.5),
    _Method("powersgd-4", [*_POWERSGD, "topology.powersgd.matrix_approximation_rank=4"], ranks=2, reference="ddp"),
    _Method("diloco", _DILOCO, reference="ddp", aim=1.0),
    _Method("ddp-muon", _MUON),
    _Method("diloco-muon", [*_MUON, *_DILOCO], reference="ddp-muon", aim=1.0),
)


def measure_learning_curves() -> Iterator[BenchmarkRow]:
    """Train with each method and seed, and compare the validation losses after the last step. Also draw the curves."""
    datautils.write_python_sources(_FOLDER / "training", _FOLDER / "validation")
    curves = _train_all_methods()
    _CURVES_FILE.write_text(json.dumps(curves))
    python = third_party_tools.install_with_shared_packages(third_party_tools.MATPLOTLIB)
    picture = _CURVES_FILE.with_suffix(".svg")
    process.run_command([str(python), "-m", "benchmarks.learning_curves_picture", str(_CURVES_FILE), str(picture)], cwd=ROOT)
    for method in _METHODS:
        if not method.reference:
            continue
        losses, reference_losses = (_get_last_losses(curves[name]) for name in (method.name, method.reference))
        percentages = [100 * (loss / other - 1) for loss, other in zip(losses, reference_losses, strict=True)]
        triples = zip(_SEEDS, losses, reference_losses, strict=True)
        notes = [f"seed {seed}: {loss:.4f} nats per byte against {other:.4f}" for seed, loss, other in triples]
        aim = "" if method.aim is None else f"the aim is at most {method.aim:g} %; "
        yield BenchmarkRow(
            f"curves/{method.name}",
            f"how much higher the validation loss of {method.name} is than that of {method.reference} after {_ROUNDS * _ROUND_STEPS} steps",
            "%",
            Sample.from_values(percentages),
            note=f"{aim}{' '.join(method.options)}; {', '.join(notes)}",
        )


def _get_last_losses(curves: Sequence[dict[int, float]]) -> list[float]:
    return [losses[_ROUNDS * _ROUND_STEPS] for losses in curves]


def _train_all_methods() -> dict[str, list[dict[int, float]]]:
    """Return the curves of each method, by name: one per seed. Runs share the machine: how fast they are does not change their losses."""
    curves: dict[str, list[dict[int, float]]] = {method.name: [] for method in _METHODS}
    for ranks, methods in groupby(sorted(_METHODS, key=_get_ranks), key=_get_ranks):
        runs = [(method, seed) for method in methods for seed in _SEEDS]
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // ranks)) as pool:
            for (method, _), losses in zip(runs, pool.map(_train, *zip(*runs, strict=True)), strict=True):
                curves[method.name].append(losses)
    return curves


def _get_ranks(method: _Method) -> int:
    return method.ranks


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
