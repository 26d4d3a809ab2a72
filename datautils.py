"""Datasets: real text into memory-mapped tokens. Yours to edit; nothing here knows of ranks or nodes.

The quickstart's data needs no download: it is the source text of the Python standard library that this runs on,
a byte a token.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.memory_map import MemoryMap, write
from swarmtrain.trainer.data.token_file import Tokens

_HELD_OUT_PERCENT = 10
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def python_sources(training: Path, held_out: Path) -> None:
    """Write the standard library's source text under the prefixes `training` and `held_out`, unless it is there already.

    Split by file, about one in ten held out, by a hash of the file's name: every node with the same Python gets the same split.
    """
    source = f"standard library of Python {platform.python_version()}"
    if _source(training) == _source(held_out) == source:
        return
    files = dict(_library())
    chosen = {name for name in files if int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < _HELD_OUT_PERCENT}
    for prefix, names in ((training, files.keys() - chosen), (held_out, chosen)):
        documents = (np.frombuffer(files[name].read_bytes(), dtype=np.uint8) for name in sorted(names))
        write(prefix, documents, "uint8", {"source": source})


def only(prefixes: Sequence[Path]) -> Path:
    """Return the single one of `prefixes`. Raises TrainingError if there is another number of them."""
    if len(prefixes) != 1:
        raise TrainingError(
            f"{len(prefixes)} prefixes, where the data set python_sources makes one",
            place="config data",
            hint="give data_prefixes and validation_data_prefixes one each",
        )
    return prefixes[0]


def bigram_loss(training: Path, held_out: Path) -> float:
    """Return the cross-entropy, in nats per byte, of `held_out` under a table of byte pairs counted in `training`, each count plus one.

    What a model must beat to have learned more than which byte follows which.
    """
    counts = np.ones((256, 256))
    for first, second in _pairs(MemoryMap(training)):
        counts += np.bincount(first.astype(np.int64) * 256 + second, minlength=256 * 256).reshape(256, 256)
    logarithms = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    losses = [-logarithms[first, second] for first, second in _pairs(MemoryMap(held_out))]
    return float(np.concatenate(losses).mean())


def _library() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not _NOT_THE_LIBRARY & set(name.parts):
            yield name.as_posix(), path


def _pairs(data: MemoryMap) -> Iterator[tuple[Tokens, Tokens]]:
    for start, length in data.documents:
        document = data.tokens[start : start + length]
        yield document[:-1], document[1:]


def _source(prefix: Path) -> str | None:
    try:
        source: str = json.loads(prefix.with_name(f"{prefix.name}.meta.json").read_text())["source"]
    except (OSError, ValueError, KeyError):
        return None
    return source
