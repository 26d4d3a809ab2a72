"""Benchmark of a resume: seconds from the files of a checkpoint to a model that is ready to train, against reading the files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import machine_description
from benchmarks.measurement import BUILD, ROOT, BenchmarkRow, BenchmarkUnavailableError, measure_in_turns, print_progress
from swarmtrain import process

_REPEATS = 5
_GOAL = "goal: at most 1.5 times as long"
_HIDDEN_SIZE, _VOCABULARY_SIZE = 1536, 32768
_LAYER_PARAMETERS = 13 * _HIDDEN_SIZE**2
"""Parameters of the matrices of a layer: attention, and a gated feed-forward block that is three times as wide."""
_EMBEDDING_PARAMETERS = 2 * _VOCABULARY_SIZE * _HIDDEN_SIZE
_STATE_BYTES = 12
"""Bytes per parameter: the parameter and two moments, in float32."""


def measure_resume() -> Iterator[BenchmarkRow]:
    """Measure the time, in seconds, to load a checkpoint of the largest model whose save fits in this machine's memory."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as folder:
        layers = _choose_layer_count(Path(folder))
        config = json.dumps(
            {
                "transformer_architecture": {
                    "vocab_size": _VOCABULARY_SIZE,
                    "hidden_size": _HIDDEN_SIZE,
                    "num_layers": layers,
                    "num_attention_heads": 12,
                    "norm_type": "rms",
                    "mlp_type": "swiglu",
                    "mlp_factor": 3.0,
                },
                "trainer": {"save_dir": folder},
            }
        )
        print_progress(f"saving a checkpoint of {layers} layers")
        _run_program(config, "save")
        files = sorted(Path(folder).glob("step-*/part-*"))
        size = sum(file.stat().st_size for file in files)

        def measure(action: str) -> float:
            _drop_from_page_cache(files)
            # A new process for reading too: in a virtual machine, memory that was free for seconds takes longer to allocate.
            return _run_program(config, action)

        result, baseline = measure_in_turns(_REPEATS, lambda: measure("load"), lambda: measure("read"))
    description = (
        f"a checkpoint of {size / 1e9:.1f} GB ({size / _STATE_BYTES / 1e6:.0f}M parameters, one process) is read from disk and verified, "
        "until the model and its optimizer are ready to train"
    )
    yield BenchmarkRow("resume", description, "s", result, baseline, "reading the same files from disk", note=_GOAL)


def _choose_layer_count(folder: Path) -> int:
    """Return the number of layers of the largest model that can be saved. Raises BenchmarkUnavailableError if not even one layer fits."""
    # A save holds the state twice in memory; a third of the memory is left to everything else.
    memory = 2 / 3 * machine_description.get_available_memory() / (2 * _STATE_BYTES)
    disk = shutil.disk_usage(folder).free / (2 * _STATE_BYTES)
    layers = int((min(memory, disk) - _EMBEDDING_PARAMETERS) // _LAYER_PARAMETERS)
    if layers < 1:
        raise BenchmarkUnavailableError("there is not enough free memory or disk for a checkpoint of 2 GB")
    return layers


def _run_program(config: str, action: str) -> float:
    output = process.run_command([sys.executable, "-m", "benchmarks.loops.resume", config, action], cwd=ROOT)
    return float(output.splitlines()[-1])


def _drop_from_page_cache(files: Sequence[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
