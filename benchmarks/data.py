"""How fast a process has its batches from token files, and how soon it has opened a large one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.measure import BUILD, Row, in_turns
from swarmtrain.config.data import BlendedDatasetConfig, Packing
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.data import memory_map
from swarmtrain.trainer.data.samples import Samples

_RUNS = 9
_FOLDER = BUILD / "data"
_DOCUMENTS, _LONGEST = 40_000, 2_000
_LARGE = 100 * 10**9
_SHAPE = TransformerArchitectureConfig(vocab_size=1 << 15, sequence_length=2048)
_BATCH = 8
_SECONDS = 0.5


def loading() -> Iterator[Row]:
    """`batch` and `load` of one process, tokens of 16 bits that the page cache has; and the opening of a file of 100 GB with holes."""
    prefixes = [_FOLDER / name for name in ("a", "b")]
    for seed, prefix in enumerate(prefixes):
        random = np.random.default_rng(seed)
        documents = (random.integers(0, 1 << 15, size) for size in random.integers(1, _LONGEST, _DOCUMENTS // (seed + 1)))
        memory_map.write(prefix, documents, "uint16")
    mix = BlendedDatasetConfig(weights=(0.7, 0.3))
    ways = {
        "load": Samples(prefixes, _SHAPE, 0),
        "load/short": Samples(prefixes, _SHAPE.model_copy(update={"sequence_length": 256}), 0),
        "load/blended": Samples(prefixes, _SHAPE, 0, mix=mix),
        "load/packed": Samples(prefixes, _SHAPE, 0, mix=mix, packing=Packing.documents),
    }
    told = {
        "load": f"{_BATCH} windows of 2,048 tokens a batch",
        "load/short": f"{_BATCH} windows of 256 tokens a batch",
        "load/blended": "two files blended by weight",
        "load/packed": "two files blended, whole documents packed, 1,000 tokens long on average",
    }
    rates = in_turns(_RUNS, *(partial(_microseconds, data) for data in ways.values()))
    for (name, data), sample in zip(ways.items(), rates, strict=True):
        rate = f"{1 / sample.median:.0f} M tokens/s; {len(data):,} samples"
        yield Row(
            f"data/{name}",
            f"a token out of warm files: {told[name]}",
            "µs of CPU",
            sample,
            limit=0.05 if name == "load" else None,
            note=rate,
        )
    [opened] = in_turns(_RUNS, partial(_open, _large(_FOLDER / "large")))
    yield Row("data/open", "a file of 100 GB opened, 50 M documents", "ms", opened, limit=50)
    shutil.rmtree(_FOLDER)


def _microseconds(data: Samples) -> float:
    """Return microseconds a token that counts."""
    tokens = position = 0
    begun = time.process_time()
    while (seconds := time.process_time() - begun) < _SECONDS:
        batch = data.batch(position, _BATCH)
        data.load(batch.ids)
        position, tokens = position + _BATCH, tokens + batch.tokens
    return seconds / tokens * 1e6


def _open(prefix: Path) -> float:
    begun = time.perf_counter()
    Samples([prefix], _SHAPE, 0).load(np.array([10**6]))
    return (time.perf_counter() - begun) * 1e3


def _large(prefix: Path) -> Path:
    """Make a token file whose size is that of a large one, and which takes no room; but for the last entry, so is its index."""
    documents, tokens = 50_000_000, _LARGE // 2
    last = np.array([0, tokens], dtype=np.int64)
    for ending, size in (("bin", _LARGE), ("idx", documents * 16)):
        with prefix.with_name(f"{prefix.name}.{ending}").open("wb") as file:
            file.truncate(size)
            if ending == "idx":
                file.seek(size - last.nbytes)
                file.write(last.tobytes())
    meta = {"dtype": "uint16", "index_dtype": "int64", "document_count": documents}
    prefix.with_name(f"{prefix.name}.meta.json").write_text(json.dumps(meta))
    return prefix
