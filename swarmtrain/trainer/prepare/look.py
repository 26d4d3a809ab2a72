"""Samples as the model will see them, as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.samples import Samples, open_data
from swarmtrain.trainer.model.targets import IGNORE
from swarmtrain.trainer.prepare import encoders

_LONG = 160
"""Characters of a run that are shown, half of them from its end."""
Words = npt.NDArray[np.str_]
_WORDS = {1: ("loss   ", "no loss"), 0: ("counts ", "ignored")}
"""Of what counts and what does not, by how much targets are shifted."""
Decode = Callable[[Sequence[int]], str]


def look(config: Config, count: int, tokenizer: str | None = None) -> Iterator[str]:
    """Yield the first `count` samples of training on `config`, some lines each. Raises SwarmtrainError."""
    data, _ = open_data(config)
    shape = config.transformer_architecture
    decoders = {file.prefix: _decoder(file, tokenizer) for file in data.files}
    for number, sample in enumerate(data.batch(0, count).ids.tolist()):
        for part in (data, *data.beside):
            yield "\n".join(_sample(part, number, sample, decoders, reset=shape.reset_position_ids))


def _sample(data: Samples, number: int, sample: int, decoders: Mapping[Path, Decode], *, reset: bool) -> Iterator[str]:
    ids = np.array([sample])
    targets = data.load(ids).targets[0].numpy()
    file, spans, shift = data.spans(sample)
    own = int(np.count_nonzero(targets != IGNORE))
    where = f"{int(spans.count.sum())} of {data.sequence_length} inputs, {own} tokens count in the {'loss' if shift else 'vector'}"
    yield f"sample {number}: number {sample} of the data, in {file.prefix}; {where}"
    order = np.argsort(spans.column)
    for column, start, size in zip(spans.column[order].tolist(), spans.start[order].tolist(), spans.count[order].tolist(), strict=True):
        counts = np.concatenate([[False] * shift, targets[column : column + size] != IGNORE])
        yield from _span(file, column, start, np.where(counts, *_WORDS[shift]), decoders[file.prefix], reset=reset)


def _span(file: MemoryMap, column: int, start: int, words: Words, decode: Decode, *, reset: bool) -> Iterator[str]:
    """Yield a line for each run of tokens, of one document, of which the same is to be said.

    `words` has that of as many tokens more than there are inputs as targets are shifted by: the last is only a target.
    """
    tokens = file.tokens[start : start + len(words)]
    documents = file.document_at(np.arange(start, start + len(tokens), dtype=np.int64))
    changes = np.flatnonzero((np.diff(documents) != 0) | (words[1:] != words[:-1])) + 1
    for first, end in zip([0, *changes.tolist()], [*changes.tolist(), len(tokens)], strict=True):
        position = first - int(np.searchsorted(documents, documents[first])) if reset else column + first
        boundary = " begins" if int(file.documents[documents[first], 0]) == start + first else ""
        told = f"tokens {column + first}-{column + end - 1}, positions {position}-{position + end - first - 1}"
        yield f"  {words[first]} {told}, document {documents[first]}{boundary}: {_short(decode(tokens[first:end].tolist()))}"


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
