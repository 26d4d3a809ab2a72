"""The trainer beside other training loops, step by step in turns: tokens for each second of CPU time, with one thread a process.

So measured, other work on the machine hardly shows: a step that waits for a core costs no more than one that does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import others
from benchmarks.measure import BUILD, Row, in_turns_for
from benchmarks.racers import Loop, Racer

_UNIT = "tokens/s of CPU"
_SECONDS = 60.0
_BATCH, _LENGTH = 8, 256
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
        yield _race(_row("train", precision, "the same model in a loop by hand", 0.98), Loop("ours", config), Loop("by_hand", config))


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
    for precision, goal in (("float32", 1.0), ("bfloat16", 1.1)):
        config = _config(_LLAMA, precision)
        theirs = Loop("hugging_face", config, python=python, environment=others.environment())
        yield _race(_row("train-hf", precision, other_is, goal), Loop("ours", config), theirs)


def nanogpt() -> Iterator[Row]:
    """nanoGPT's train.py, which has no bfloat16 on a CPU."""
    environment = {"BENCH_NANOGPT": str(others.clone(others.NANOGPT))}
    theirs = Loop("nanogpt", _config(_GPT, "float32"), environment=environment)
    for precision, goal in (("float32", 1.0), ("bfloat16", 2.2)):
        row = _row("train-nanogpt", precision, "nanoGPT's train.py, float32", goal)
        yield _race(row, Loop("ours", _config(_GPT, precision)), theirs)


def _row(benchmark: str, precision: str, other_is: str, goal: float, where: str = "one process") -> Row:
    name = benchmark if precision == "float32" else f"{benchmark}/{precision}"
    what = f"`train`, 9M parameters, {_BATCH} × {_LENGTH} tokens, {precision}, {where}"
    return Row(name, what, _UNIT, other_is=other_is, goal=goal)


def _race(row: Row, ours: Loop, other: Loop) -> Row:
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
