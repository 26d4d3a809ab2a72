"""Describe training samples as the model receives them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
_LOSS_LABELS = {True: ("no loss", "loss   "), False: ("ignored", "counts ")}
"""By whether the sample has a next-token loss: the label of tokens that do not count in the loss or the embedding, and of those that do."""
DecodeFunction = Callable[[Sequence[int]], str | None]


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of one document in a sample, which all count in the loss, or all do not."""

    first_token: int
    """Column of the first token in the sample; the others follow. The last column of a next-token sample is only a target."""
    last_token: int
    first_position: int
    last_position: int
    document: int
    """Number of the document in the token file."""
    begins_document: bool
    is_in_loss: bool
    """Whether the tokens count in the loss, or, in a contrastive sample, in the embedding."""
    tokens: tuple[int, ...]
    text: str | None
    """The decoded tokens; None without a tokenizer."""


@dataclass(frozen=True)
class SampleDescription:
    """A training sample as the model receives it. str() returns several lines, with long texts truncated."""

    number: int
    """Position of the sample in the order of training, from 0."""
    sample_id: int
    prefix: str
    """Prefix of the token files that contain the sample."""
    sequence_length: int
    inputs: int
    """Number of inputs that are tokens; the others are padding."""
    loss_tokens: int
    """Number of loss tokens; in a contrastive sample, of the tokens that the embedding averages."""
    has_next_token_loss: bool
    token_spans: tuple[TokenSpan, ...]

    def __str__(self) -> str:
        purpose = "loss" if self.has_next_token_loss else "embedding"
        summary = f"{self.inputs} of {self.sequence_length} inputs, {self.loss_tokens} tokens count in the {purpose}"
        lines = [f"sample {self.number}: sample id {self.sample_id}, in {self.prefix}; {summary}"]
        for token_span in self.token_spans:
            columns = (
                f"tokens {token_span.first_token}-{token_span.last_token}, positions {token_span.first_position}-{token_span.last_position}"
            )
            document = f"document {token_span.document}{' begins' if token_span.begins_document else ''}"
            lines.append(
                f"  {_LOSS_LABELS[self.has_next_token_loss][token_span.is_in_loss]} {columns}, {document}: {_format_tokens(token_span)}"
            )
        return "\n".join(lines)


def describe_samples(config: Config, count: int, tokenizer: str | None = None) -> Iterator[SampleDescription]:
    """Yield a description of each of the first `count` training samples of `config`.

    `tokenizer`: path of the tokenizer that decodes the tokens; None: the tokenizer recorded in the token files. Raises SwarmtrainError.
    """
    data, _ = open_data(config)
    architecture = config.transformer_architecture
    decoders = {file.prefix: _build_decoder(file, tokenizer) for file in data.all_token_files}
    for number, sample in enumerate(data.build_batch(0, count).ids.tolist()):
        for dataset in (data, *data.companion_datasets):
            yield _describe_sample(dataset, number, sample, decoders, reset_positions=architecture.reset_position_ids)


def _describe_sample(
    data: TokenDataset, sample_number: int, sample_id: int, decoders: Mapping[Path, DecodeFunction], *, reset_positions: bool
) -> SampleDescription:
    ids = np.array([sample_id])
    targets = data.load_samples(ids).targets[0].numpy()
    file, spans, target_shift = data.locate_sample(sample_id)
    order = np.argsort(spans.column)
    token_spans: list[TokenSpan] = []
    for column, start, size in zip(spans.column[order].tolist(), spans.start[order].tolist(), spans.count[order].tolist(), strict=True):
        is_in_loss = np.concatenate([[False] * target_shift, targets[column : column + size] != IGNORE_INDEX])
        token_spans += _describe_token_spans(file, column, start, is_in_loss, decoders[file.prefix], reset_positions=reset_positions)
    return SampleDescription(
        number=sample_number,
        sample_id=sample_id,
        prefix=str(file.prefix),
        sequence_length=data.sequence_length,
        inputs=int(spans.count.sum()),
        loss_tokens=int(np.count_nonzero(targets != IGNORE_INDEX)),
        has_next_token_loss=bool(target_shift),
        token_spans=tuple(token_spans),
    )


def _describe_token_spans(
    token_file: MemoryMap,
    column: int,
    first_token_index: int,
    is_in_loss: npt.NDArray[np.bool_],
    decode: DecodeFunction,
    *,
    reset_positions: bool,
) -> Iterator[TokenSpan]:
    """Yield each run of consecutive tokens of one document that all count in the loss, or all do not.

    `column`: column of the first token in the sample; `first_token_index`: index of this token in the file. `is_in_loss`: one value per
    token. The number of tokens is the number of inputs plus the target shift: with a shift of 1, the last token is only a target.
    """
    tokens = token_file.tokens[first_token_index : first_token_index + len(is_in_loss)]
    documents = token_file.find_documents_at(np.arange(first_token_index, first_token_index + len(tokens), dtype=np.int64))
    changes = np.flatnonzero((np.diff(documents) != 0) | (is_in_loss[1:] != is_in_loss[:-1])) + 1
    for first, end in zip([0, *changes.tolist()], [*changes.tolist(), len(tokens)], strict=True):
        position = first - int(np.searchsorted(documents, documents[first])) if reset_positions else column + first
        yield TokenSpan(
            first_token=column + first,
            last_token=column + end - 1,
            first_position=position,
            last_position=position + end - first - 1,
            document=int(documents[first]),
            begins_document=int(token_file.documents[documents[first], 0]) == first_token_index + first,
            is_in_loss=bool(is_in_loss[first]),
            tokens=tuple(tokens[first:end].tolist()),
            text=decode(tokens[first:end].tolist()),
        )


def _build_decoder(token_file: MemoryMap, tokenizer: str | None) -> DecodeFunction:
    """Return a function that decodes tokens of `token_file` to text.

    `tokenizer`: path of the tokenizer; None: the tokenizer recorded in the file. If the recorded tokenizer is missing or has changed, or if
    none is recorded, the function returns None. Raises TrainingError if `tokenizer` cannot be read.
    """
    recorded = token_file.meta.get("prepared", {}).get("tokenizer", {})
    name = tokenizer or recorded.get("name")
    if name is None:
        return _skip_decoding
    try:
        loaded_tokenizer = tokenizer_backends.open_tokenizer(name)
    except TrainingError:
        if tokenizer:
            raise
        return _skip_decoding
    if tokenizer is None and loaded_tokenizer.sha256 != recorded["sha256"]:
        return _skip_decoding
    return loaded_tokenizer.decode


def _skip_decoding(tokens: Sequence[int]) -> None:
    return None


def _format_tokens(token_span: TokenSpan) -> str:
    text = " ".join(map(str, token_span.tokens)) if token_span.text is None else json.dumps(token_span.text, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS // 2]} … {text[-_MAX_SHOWN_CHARS // 2 :]}"
