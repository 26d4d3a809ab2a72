"""Samples as the model will see them, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.samples import Samples, open_data
from swarmtrain.trainer.prepare import encoders

_LONG = 160
"""Characters of a run that are shown, half of them from its end."""
Decode = Callable[[Sequence[int]], str]


def look(config: Config, count: int, tokenizer: str | None = None) -> Iterator[str]:
    """Yield the first `count` samples of training on `config`, some lines each. Raises SwarmtrainError."""
    data, _ = open_data(config)
    shape = config.transformer_architecture
    decoders = {file.prefix: _decoder(file, tokenizer) for file in data.maps}
    for number, sample in enumerate(data.batch(0, count).ids.tolist()):
        yield "\n".join(_sample(data, number, sample, decoders, reset=shape.reset_position_ids))


def _sample(data: Samples, number: int, sample: int, decoders: Mapping[Path, Decode], *, reset: bool) -> Iterator[str]:
    ids = np.array([sample])
    targets = data.load(ids).targets[0].numpy()
    file, spans = data.spans(sample)
    where = f"{int(spans.count.sum())} of {data.sequence_length} inputs, {data.targets(ids)} tokens count in the loss"
    yield f"sample {number}: number {sample} of the data, in {file.prefix}; {where}"
    order = np.argsort(spans.column)
    for column, start, size in zip(spans.column[order].tolist(), spans.start[order].tolist(), spans.count[order].tolist(), strict=True):
        counts = np.concatenate([[False], targets[column : column + size] >= 0])
        yield from _span(file, column, start, counts, decoders[file.prefix], reset=reset)


def _span(file: MemoryMap, column: int, start: int, counts: Ids, decode: Decode, *, reset: bool) -> Iterator[str]:
    """Yield a line for each run of tokens, of one document, that all count, or do not.

    `counts` is for one token more than there are inputs: the last is only a target.
    """
    tokens = file.tokens[start : start + len(counts)]
    documents = file.document_at(np.arange(start, start + len(tokens), dtype=np.int64))
    changes = np.flatnonzero((np.diff(documents) != 0) | (np.diff(counts) != 0)) + 1
    for first, end in zip([0, *changes.tolist()], [*changes.tolist(), len(tokens)], strict=True):
        position = first - int(np.searchsorted(documents, documents[first])) if reset else column + first
        boundary = " begins" if int(file.documents[documents[first], 0]) == start + first else ""
        loss = "loss   " if counts[first] else "no loss"
        told = f"tokens {column + first}-{column + end - 1}, positions {position}-{position + end - first - 1}"
        yield f"  {loss} {told}, document {documents[first]}{boundary}: {_short(decode(tokens[first:end].tolist()))}"


def _decoder(file: MemoryMap, tokenizer: str | None) -> Decode:
    """Return what makes text of the tokens of `file`: numbers, if its tokenizer is not known or not here as it was."""
    known = file.meta.get("prepared", {}).get("tokenizer", {})
    name = tokenizer or known.get("name")
    if name is None:
        return _numbers
    try:
        encoder = encoders.opened(name)
    except TrainingError:
        if tokenizer:
            raise
        return _numbers
    if tokenizer is None and encoder.sha256 != known["sha256"]:
        return _numbers
    return lambda tokens: json.dumps(encoder.decode(tokens), ensure_ascii=False)


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[: _LONG // 2]} … {text[-_LONG // 2 :]}"
