"""Benchmarks of tokenization, compared with the tokenizer alone, and of the peak memory of tokenization and export."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.measurement import (
    BUILD,
    SWARMTRAIN_ARGV,
    BenchmarkRow,
    Sample,
    measure_in_turns,
    measure_peak_memory,
    measure_wall_seconds,
    print_progress,
)

_REPEATS = 3
_FOLDER = BUILD / "models"
_VOCABULARY_SIZE = 16_384
_TOKENIZER_TRAINING_BYTES = 20_000_000
_TEXT_MEGABYTES = 1000
"""Size of the text to tokenize, in MB."""
_SHARD_BYTES = 2 * 10**9
_MAX_MEMORY_RATIO = 1.2
"""Maximum peak memory, relative to the baseline."""
_BASELINE_SCRIPT = """
import json, sys
from itertools import islice
from tokenizers import Tokenizer

tokenizer, count = Tokenizer.from_file(sys.argv[1]), 0
with open(sys.argv[2]) as lines:
    while batch := [json.loads(line)["text"] for line in islice(lines, 1000)]:
        count += sum(len(each.ids) for each in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
print(count)
"""


def measure_tokenization() -> Iterator[BenchmarkRow]:
    """Measure the throughput of `data tokenize`, in MB/s, and its peak memory, in MB, for two text sizes.

    The baseline of the throughput is a script that only encodes the same text.
    """
    full_text, tenth_of_text = (
        _write_text(_FOLDER / "whole.jsonl", _TEXT_MEGABYTES),
        _write_text(_FOLDER / "tenth.jsonl", _TEXT_MEGABYTES // 10),
    )
    tokenizer = _train_tokenizer(tenth_of_text)
    workers = len(os.sched_getaffinity(0))
    measure_baseline = partial(
        _measure_baseline_seconds,
        [sys.executable, "-c", _BASELINE_SCRIPT, str(tokenizer), str(full_text)],
        {"RAYON_NUM_THREADS": str(workers)},
    )
    result, baseline = measure_in_turns(
        _REPEATS, partial(_measure_tokenization_seconds, full_text, tokenizer), measure_baseline, warm_up=False
    )
    description = f"`swarmtrain data tokenize` of {_TEXT_MEGABYTES} MB of text, a BPE of {_VOCABULARY_SIZE:,} tokens, {workers} processes"
    result, baseline = (Sample.from_values([_TEXT_MEGABYTES / seconds for seconds in sample.values]) for sample in (result, baseline))
    yield BenchmarkRow(
        "prepare", description, "MB/s", result, baseline, f"`tokenizers` alone, {workers} threads: read, encode and count lines", goal=0.9
    )
    peaks = [_measure_peak_memory_megabytes(sample, tokenizer) for sample in (full_text, tenth_of_text)]
    yield BenchmarkRow(
        "prepare/memory",
        f"peak memory of a tokenizing process, for {_TEXT_MEGABYTES} MB of text",
        "MB",
        Sample.from_values([peaks[0]]),
        Sample.from_values([peaks[1]]),
        "10 % of this text",
        limit=_MAX_MEMORY_RATIO * peaks[1],
    )
    shutil.rmtree(_FOLDER)


def measure_export() -> Iterator[BenchmarkRow]:
    """Measure the peak memory, in GB, of `export` of a model of 1.2 billion parameters, sharded into files of at most 2 GB."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    print_progress("writing a checkpoint of 1.2 billion parameters")
    config = _FOLDER / "config.yml"
    argv = [*SWARMTRAIN_ARGV, "init", str(config), "--preset", "llama-3.2-1b"]
    measure_wall_seconds(argv)
    values = {
        # Nothing is trained, and frozen parameters have no optimizer state.
        "trainer.train_iterations": 0,
        "trainer.finetunable_parameters": "[norm]",
        "trainer.save_dir": str(_FOLDER / "run"),
        "data.data_prefixes": f"[{_FOLDER / 'tokens'}]",
        "transformer_architecture.sequence_length": 128,
        "topology.global_batch_size": 1,
        "topology.micro_batch_size": 1,
    }
    (_FOLDER / "text.jsonl").write_text(json.dumps({"text": "a " * 1000}) + "\n")
    measure_wall_seconds(
        [*SWARMTRAIN_ARGV, "data", "tokenize", str(_FOLDER / "text.jsonl"), "--to", str(_FOLDER / "tokens"), "--tokenizer", "bytes"]
    )
    measure_wall_seconds([sys.executable, "training_code.py", str(config), *(f"{key}={value}" for key, value in values.items())])
    request = json.dumps(
        {
            "source": str(_FOLDER / "run"),
            "base": None,
            "output": str(_FOLDER / "out"),
            "dtype": None,
            "shard_bytes": _SHARD_BYTES,
            "adapter": False,
            "tokenizer": None,
            "json": False,
        }
    )
    peak = measure_peak_memory([sys.executable, "-m", "swarmtrain.trainer", "export"], input=request) / 1e9
    largest = max(path.stat().st_size for path in (_FOLDER / "out").glob("*.safetensors")) / 1e9
    description = "peak memory of `swarmtrain export` of 1.2 billion parameters in float32"
    yield BenchmarkRow(
        "export",
        description,
        "GB",
        Sample.from_values([peak]),
        Sample.from_values([largest]),
        "the size of the largest exported file",
        limit=_MAX_MEMORY_RATIO * largest,
    )
    shutil.rmtree(_FOLDER)


def _write_text(path: Path, megabytes: int) -> Path:
    """Write `megabytes` MB of text as JSONL: copies of the standard library's source, each with a different word replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = [text for source in sources if "site-packages" not in source.parts if (text := source.read_text(errors="replace"))]
    words, generator, size = sorted({word for text in texts[:200] for word in text.split()}), random.Random(1), 0  # noqa: S311
    with path.open("w") as file:
        while True:
            old, new = generator.sample(words, 2)
            for text in texts:
                size += file.write(json.dumps({"text": text.replace(old, new)}) + "\n")
                if size >= megabytes * 10**6:
                    return path


def _train_tokenizer(text_file: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY_SIZE, initial_alphabet=alphabet, show_progress=False)
    with text_file.open() as lines:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines.readlines(_TOKENIZER_TRAINING_BYTES)), trainer)
    path = _FOLDER / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def _build_tokenize_command(text_file: Path, tokenizer_file: Path) -> list[str]:
    for path in _FOLDER.glob("tokens*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [*SWARMTRAIN_ARGV, "data", "tokenize", str(text_file), "--to", str(_FOLDER / "tokens"), "--tokenizer", str(tokenizer_file)]


def _measure_tokenization_seconds(text_file: Path, tokenizer_file: Path) -> float:
    return measure_wall_seconds(_build_tokenize_command(text_file, tokenizer_file))


def _measure_baseline_seconds(argv: list[str], env: dict[str, str]) -> float:
    return measure_wall_seconds(argv, env)


def _measure_peak_memory_megabytes(text_file: Path, tokenizer_file: Path) -> float:
    return measure_peak_memory(_build_tokenize_command(text_file, tokenizer_file)) / 1e6
