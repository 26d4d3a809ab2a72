"""The trainer beside other training loops, step by step in turns: tokens for each second of CPU time, with one thread a process.

So measured, other work on the machine hardly shows: a step that waits for a core costs no more than one that does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import machine, others
from benchmarks.measure import BUILD, ROOT, Row, Sample, in_turns_for
from benchmarks.racers import Loop, Racer
from swarmtrain import process

_HAND = "the same model in a loop by hand"
_UNIT = "tokens/s of CPU"
_SECONDS = 60.0
_BATCH, _LENGTH = 8, 256
_WHOLE = 30
_SAVED = 10
_LOGGED, _INTERVAL = 62, 10
_LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_layers": 8,
    "num_attention_heads": 8,
    "sequence_length": _LENGTH,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "mlp_factor": 3.0,
}
_GPT = {**_LLAMA, "norm_type": "layernorm", "mlp_type": "default", "mlp_factor": 4.0}
"""nanoGPT's, but for its learned positions."""


def by_hand() -> Iterator[Row]:
    """One process, and the loop that one writes by hand around the same model."""
    for precision in ("float32", "bfloat16"):
        config = _config(_LLAMA, precision)
        yield _race(_row("train", precision, _HAND, 0.98), Loop("ours", config), Loop("by_hand", config))
    compiled = _compiled(_row("train", "float32", f"{_HAND}, not compiled"), None)
    yield _race(compiled, Loop("ours", _config(_LLAMA, "float32", compile=True)), Loop("by_hand", _config(_LLAMA, "float32")))


def by_hand_ddp() -> Iterator[Row]:
    """Two processes, and DistributedDataParallel by hand."""
    for precision in ("float32", "bfloat16"):
        config = _config(_LLAMA, precision, micro=_BATCH // 2)
        row = _row("train-ddp", precision, "the same model under DistributedDataParallel, by hand", 0.98, where="two processes over gloo")
        yield _race(row, Loop("ours", config, 2), Loop("by_hand", config, 2))


def hugging_face() -> Iterator[Row]:
    """Hugging Face's Trainer on transformers' Llama."""
    python = str(others.beside_torch(others.TRANSFORMERS, others.ACCELERATE))
    other_is = f"Hugging Face's Trainer, {others.TRANSFORMERS.replace('==', ' ')}, the same shape"
    for precision, goal, compiled_goal in (("float32", 1.0, None), ("bfloat16", 1.1, 1.2)):
        theirs = Loop("hugging_face", _config(_LLAMA, precision), python=python, environment=others.environment())
        row = _row("train-hf", precision, other_is, goal)
        yield _race(row, Loop("ours", _config(_LLAMA, precision)), theirs)
        yield _race(_compiled(row, compiled_goal), Loop("ours", _config(_LLAMA, precision, compile=True)), theirs)


def nanogpt() -> Iterator[Row]:
    """nanoGPT's train.py, which has no bfloat16 on a CPU."""
    environment = {"BENCH_NANOGPT": str(others.clone(others.NANOGPT))}
    theirs = Loop("nanogpt", _config(_GPT, "float32"), environment=environment)
    for precision, goal in (("float32", 1.0), ("bfloat16", 2.2)):
        row = _row("train-nanogpt", precision, "nanoGPT's train.py, float32", goal)
        yield _race(row, Loop("ours", _config(_GPT, precision)), theirs)


def whole_run() -> Iterator[Row]:
    """A run with its checkpoint, metrics and log, in terms of its steps."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        config = _config(_LLAMA, "float32", train_iterations=_WHOLE, save_dir=folder)
        argv = [sys.executable, "-m", "benchmarks.loops.whole", config]
        said = process.run(argv, env={"OMP_NUM_THREADS": "1"}, cwd=ROOT).splitlines()[-1]
    whole, step = (Sample.of([_BATCH * _LENGTH / float(seconds)]) for seconds in said.split())
    row = _row("train-whole", "float32", "its median step", 0.97)
    yield replace(row, what=f"{row.what}: {_WHOLE} steps and a checkpoint", ours=whole, other=step)


def background_checkpoint() -> Iterator[Row]:
    """What checkpoints in the background cost, at the interval that `save_interval: auto` has for them."""
    from swarmtrain.trainer.checkpoint import rhythm

    BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        config = _config(_LLAMA, "float32", train_iterations=2 * _SAVED, save_dir=folder, save_interval=2)
        argv = [sys.executable, "-m", "benchmarks.loops.saving", config]
        said = process.run(argv, env={"OMP_NUM_THREADS": "1"}, cwd=ROOT).splitlines()
    measured = [tuple(map(float, line.split())) for line in said if line[0].isdigit()][1:]  # the first has its memory to find
    model = "of a model of 9M parameters, one process"
    yield Row(
        "checkpoint/stall", f"training stands still for a checkpoint {model}", "ms", Sample.of([1e3 * stood for stood, _ in measured])
    )
    share = Sample.of([100 * cpu / rhythm.auto(stood, cpu) for stood, cpu in measured])
    what = f"CPU time of a checkpoint in the background {model}, of that between two by `save_interval: auto`"
    yield Row("checkpoint", what, "%", share, limit=1)


def logging() -> Iterator[Row]:
    """What telling of steps takes of them, with the metrics on disk: by the trainer's own clock."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        config = _config(_LLAMA, "float32", train_iterations=_LOGGED, save_dir=folder, save_interval=None)
        process.run([sys.executable, "-m", "benchmarks.loops.whole", config], env={"OMP_NUM_THREADS": "1"}, cwd=ROOT)
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    told = [(line["logging_seconds"], line["step_seconds"]) for line in lines if "logging_seconds" in line][1:]
    spans = [told[first : first + _INTERVAL] for first in range(0, len(told) - _INTERVAL + 1, _INTERVAL)]
    share = Sample.of([100 * sum(logged for logged, _ in span) / sum(step for _, step in span) for span in spans])
    each = Sample.of([1e3 * logged for logged, _ in told])
    what = "of the time of a step of a model of 9M parameters, one process: telling of it, on disk, in the log and to sinks"
    yield Row("logging", what, "%", share, limit=0.5, note=f"a line is logged every {_INTERVAL} steps, metrics are written at each")
    yield Row("logging/step", "the same, after one step", "ms", each)


def _row(benchmark: str, precision: str, other_is: str, goal: float | None = None, where: str = "one process") -> Row:
    name = benchmark if precision == "float32" else f"{benchmark}/{precision}"
    what = f"`train`, 9M parameters, {_BATCH} × {_LENGTH} tokens, {precision}, {where}"
    return Row(name, what, _UNIT, other_is=other_is, goal=goal)


def _compiled(row: Row, goal: float | None) -> Row:
    return replace(row, name=f"{row.name}/compiled", what=f"{row.what}, trainer.compile", goal=goal)


def _race(row: Row, ours: Loop, other: Loop) -> Row:
    if "/bfloat16" in row.name and not machine.has_bfloat16():
        return replace(row, why_not="this processor does not multiply bfloat16")
    with Racer(ours) as mine, Racer(other) as theirs:
        for racer in (mine, theirs):
            racer.seconds(2)  # with all that is done once
        our_speed, their_speed = in_turns_for(_SECONDS, partial(_speed, mine), partial(_speed, theirs))
    return replace(row, ours=our_speed, other=their_speed, note=f"{len(our_speed.values)} pairs of steps")


def _speed(racer: Racer) -> float:
    return _BATCH * _LENGTH / racer.seconds(1)


def _config(shape: dict[str, Any], precision: str, micro: int = _BATCH, **trainer: Any) -> str:
    return json.dumps(
        {
            "topology": {"global_batch_size": _BATCH, "micro_batch_size": micro},
            "learning_rate_scheduler": {"learning_rate": 1e-3},
            "trainer": {"train_iterations": 1_000_000, **trainer},
            "transformer_architecture": {**shape, "precision": precision},
            "data": {"data_prefixes": [str(_tokens())]},
        }
    )


def _tokens() -> Path:
    """Return the prefix of two million random tokens."""
    import numpy as np

    from swarmtrain.trainer.data import memory_map

    prefix = BUILD / "tokens"
    if not prefix.with_name("tokens.meta.json").exists():
        documents = np.random.default_rng(0).integers(8192, size=(8, 2**18))
        memory_map.write(prefix, documents, "uint16")
    return prefix
