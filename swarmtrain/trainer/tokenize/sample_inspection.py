"""Format training samples as text, as the model receives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.samples import TokenDataset, open_data
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.tokenize import tokenizer_backends

_MAX_SHOWN_CHARS = 160
"""Maximum number of characters shown for a run of tokens. Of a longer text, the beginning and the end are shown."""
LabelArray = npt.NDArray[np.str_]
_LOSS_LABELS = {1: ("loss   ", "no loss"), 0: ("counts ", "ignored")}
"""By target shift: the label of tokens that contribute to the loss (shift 1) or the embedding (shift 0), and the label of other tokens."""
DecodeFunction = Callable[[Sequence[int]], str]


def format_samples(config: Config, count: int, tokenizer: str | None = None) -> Iterator[str]:
    """Yield a text of several lines for each of the first `count` training samples of `config`.

    `tokenizer`: path of the tokenizer that decodes the tokens; None: the tokenizer recorded in the token files. Raises SwarmtrainError.
    """
    data, _ = open_data(config)
    architecture = config.transformer_architecture
    decoders = {file.prefix: _build_decoder(file, tokenizer) for file in data.all_token_files}
    for number, sample in enumerate(data.build_batch(0, count).ids.tolist()):
        for dataset in (data, *data.companion_datasets):
            yield "\n".join(_format_sample(dataset, number, sample, decoders, reset_positions=architecture.reset_position_ids))


def _format_sample(
    data: TokenDataset, sample_number: int, sample_id: int, decoders: Mapping[Path, DecodeFunction], *, reset_positions: bool
) -> Iterator[str]:
    ids = np.array([sample_id])
    targets = data.load_samples(ids).targets[0].numpy()
    file, spans, target_shift = data.locate_sample(sample_id)
    loss_tokens = int(np.count_nonzero(targets != IGNORE_INDEX))
    summary = (
        f"{int(spans.count.sum())} of {data.sequence_length} inputs, {loss_tokens} "
        f"tokens count in the {'loss' if target_shift else 'embedding'}"
    )
    yield f"sample {sample_number}: sample id {sample_id}, in {file.prefix}; {summary}"
    order = np.argsort(spans.column)
    for column, start, size in zip(spans.column[order].tolist(), spans.start[order].tolist(), spans.count[order].tolist(), strict=True):
        is_in_loss = np.concatenate([[False] * target_shift, targets[column : column + size] != IGNORE_INDEX])
        yield from _format_token_span(
            file, column, start, np.where(is_in_loss, *_LOSS_LABELS[target_shift]), decoders[file.prefix], reset_positions=reset_positions
        )


def _format_token_span(
    token_file: MemoryMap, column: int, first_token_index: int, labels: LabelArray, decode: DecodeFunction, *, reset_positions: bool
) -> Iterator[str]:
    """Yield a line for each run of consecutive tokens of one document with the same label.

    `column`: column of the span's first token in the sample; `first_token_index`: index of this token in the file. `labels`: one label per
    token. The number of tokens is the number of inputs plus the target shift: with a shift of 1, the last token is only a target.
    """
    tokens = token_file.tokens[first_token_index : first_token_index + len(labels)]
    documents = token_file.find_documents_at(np.arange(first_token_index, first_token_index + len(tokens), dtype=np.int64))
    changes = np.flatnonzero((np.diff(documents) != 0) | (labels[1:] != labels[:-1])) + 1
    for first, end in zip([0, *changes.tolist()], [*changes.tolist(), len(tokens)], strict=True):
        position = first - int(np.searchsorted(documents, documents[first])) if reset_positions else column + first
        boundary = " begins" if int(token_file.documents[documents[first], 0]) == first_token_index + first else ""
        token_range = f"tokens {column + first}-{column + end - 1}, positions {position}-{position + end - first - 1}"
        yield (
            f"  {labels[first]} {token_range}, document {documents[first]}{boundary}: {_truncate_text(decode(tokens[first:end].tolist()))}"
        )


def _build_decoder(token_file: MemoryMap, tokenizer: str | None) -> DecodeFunction:
    """Return a function that decodes tokens of `token_file` to text.

    `tokenizer`: path of the tokenizer; None: the tokenizer recorded in the file. If the recorded tokenizer is missing or has changed, or if
    none is recorded, the function returns the token ids as text. Raises TrainingError if `tokenizer` cannot be read.
    """
    recorded = token_file.meta.get("prepared", {}).get("tokenizer", {})
    name = tokenizer or recorded.get("name")
    if name is None:
        return _format_token_ids
    try:
        loaded_tokenizer = tokenizer_backends.open_tokenizer(name)
    except TrainingError:
        if tokenizer:
            raise
        return _format_token_ids
    if tokenizer is None and loaded_tokenizer.sha256 != recorded["sha256"]:
        return _format_token_ids
    return lambda tokens: json.dumps(loaded_tokenizer.decode(tokens), ensure_ascii=False)


def _format_token_ids(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _truncate_text(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS // 2]} … {text[-_MAX_SHOWN_CHARS // 2 :]}"
