"""Benchmarks of data loading: CPU time to load batches from token files, and time to open a large token file."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.measurement import BUILD, BenchmarkRow, measure_in_turns
from swarmtrain.config.schema.data import BlendedDatasetConfig, Packing
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import TokenDataset

_REPEATS = 9
_FOLDER = BUILD / "data"
_DOCUMENT_COUNT, _MAX_DOCUMENT_TOKENS = 40_000, 2_000
_LARGE_FILE_BYTES = 100 * 10**9
_SHAPE = TransformerArchitectureConfig(vocab_size=1 << 15, sequence_length=2048)
_BATCH_SIZE = 8
_MIN_SECONDS = 0.5


def measure_data_loading() -> Iterator[BenchmarkRow]:
    """Measure the CPU time, in ns per token, to load batches from the page cache, and the wall time, in ms, to open a file of 100 GB.

    The files contain 16-bit tokens; one process loads them. The file of 100 GB is sparse.
    """
    prefixes = [_FOLDER / name for name in ("a", "b")]
    for seed, prefix in enumerate(prefixes):
        generator = np.random.default_rng(seed)
        documents = (
            generator.integers(0, 1 << 15, size) for size in generator.integers(1, _MAX_DOCUMENT_TOKENS, _DOCUMENT_COUNT // (seed + 1))
        )
        memory_map.write_token_files(prefix, documents, "uint16")
    blend_config = BlendedDatasetConfig(weights=(0.7, 0.3))
    sample_sets = {
        "load": TokenDataset(prefixes, _SHAPE, 0),
        "load/short": TokenDataset(prefixes, _SHAPE.model_copy(update={"sequence_length": 256}), 0),
        "load/blended": TokenDataset(prefixes, _SHAPE, 0, blend_config=blend_config),
        "load/packed": TokenDataset(prefixes, _SHAPE, 0, blend_config=blend_config, packing=Packing.documents),
    }
    descriptions = {
        "load": f"{_BATCH_SIZE} windows of 2,048 tokens per batch",
        "load/short": f"{_BATCH_SIZE} windows of 256 tokens per batch",
        "load/blended": "two files blended by weight",
        "load/packed": "two files blended, packed documents of 1,000 tokens on average",
    }
    rates = measure_in_turns(_REPEATS, *(partial(_measure_nanoseconds_per_token, data) for data in sample_sets.values()))
    for (name, data), sample in zip(sample_sets.items(), rates, strict=True):
        rate = f"{1e3 / sample.median:.0f} M tokens/s; {len(data):,} samples"
        yield BenchmarkRow(
            f"data/{name}",
            f"reading one token from files in the page cache: {descriptions[name]}",
            "ns of CPU",
            sample,
            limit=50 if name == "load" else None,
            note=rate,
        )
    [open_times] = measure_in_turns(_REPEATS, partial(_measure_open_milliseconds, _create_large_file(_FOLDER / "large")))
    yield BenchmarkRow("data/open", "opening a file of 100 GB with 50 M documents", "ms", open_times, limit=50)
    shutil.rmtree(_FOLDER)


def _measure_nanoseconds_per_token(dataset: TokenDataset) -> float:
    """Return the CPU time to load batches of `dataset`, in ns per loss token."""
    tokens = position = 0
    started_at = time.process_time()
    while (seconds := time.process_time() - started_at) < _MIN_SECONDS:
        batch = dataset.build_batch(position, _BATCH_SIZE)
        dataset.load_samples(batch.ids)
        position, tokens = position + _BATCH_SIZE, tokens + batch.loss_tokens
    return seconds / tokens * 1e9


def _measure_open_milliseconds(prefix: Path) -> float:
    started_at = time.perf_counter()
    TokenDataset([prefix], _SHAPE, 0).load_samples(np.array([10**6]))
    return (time.perf_counter() - started_at) * 1e3


def _create_large_file(prefix: Path) -> Path:
    """Create a sparse token file of 100 GB, and return its prefix. Its index is also sparse, except for the last entry."""
    documents, tokens = 50_000_000, _LARGE_FILE_BYTES // 2
    last_entry = np.array([0, tokens], dtype=np.int64)
    for suffix, size in (("bin", _LARGE_FILE_BYTES), ("idx", documents * 16)):
        with prefix.with_name(f"{prefix.name}.{suffix}").open("wb") as file:
            file.truncate(size)
            if suffix == "idx":
                file.seek(size - last_entry.nbytes)
                file.write(last_entry.tobytes())
    meta = {"dtype": "uint16", "index_dtype": "int64", "document_count": documents}
    prefix.with_name(f"{prefix.name}.meta.json").write_text(json.dumps(meta))
    return prefix
