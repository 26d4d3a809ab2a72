"""`python -m swarmtrain.trainer embed`: the command that `swarmtrain embed` starts on each rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.cli_exit import handle_cli_errors
from swarmtrain.trainer.inference import model_source
from swarmtrain.trainer.inference.parallel_model import open_parallel_model
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.document_builders import AddedTokens, CompletionBuilder
from swarmtrain.trainer.tokenize.progress import ProgressBar
from swarmtrain.trainer.tokenize.readers import SourceRecord
from swarmtrain.trainer.tokenize.shards import Document


@dataclass(frozen=True)
class EmbedOptions:
    """Options of `swarmtrain embed`."""

    source: str
    base: str | None
    texts: list[str]
    instruction: str
    append_eos: bool | None
    batch_size: int
    output: str | None
    tokenizer: str | None


@handle_cli_errors
def main(request: Mapping[str, Any]) -> None:
    """Compute the embeddings of the texts in `request`, and write them to stdout or to a file. Raises SwarmtrainError."""
    options = EmbedOptions(**request)
    model = model_source.open_model(Path(options.source), Path(options.base) if options.base else None)
    tokenizer = model.open_tokenizer(options.tokenizer)
    added_tokens = model.added_tokens or AddedTokens(tuple(tokenizer.begin_tokens), tuple(tokenizer.end_tokens))
    if options.append_eos is not None:
        eos_token = tokenizer_backends.resolve_eos_token(tokenizer, None, use_default=options.append_eos)
        added_tokens = replace(added_tokens, end=() if eos_token is None else (eos_token,))
    records = [SourceRecord(number, {"before": options.instruction, "text": text}) for number, text in enumerate(options.texts)]
    documents = CompletionBuilder(tokenizer, "before", "text", added_tokens).build_documents(records)
    with open_parallel_model(model, requires_embedding_model=True) as (parallel_model, runtime):
        vectors = embed_documents(
            parallel_model.local_model, documents, options.batch_size, runtime.device, show_progress=runtime.is_rank_zero
        )
        if runtime.is_rank_zero:
            _write_vectors(options, vectors)
            max_length = model.architecture.sequence_length
            if truncated_count := sum(len(each.tokens) > max_length for each in documents):
                note = (
                    f"{truncated_count} of {len(documents)} texts are longer than {max_length} tokens, and were truncated, as in training"
                )
                sys.stderr.write(f"note: {note}\n")


@torch.no_grad()
def embed_documents(
    model: Transformer, documents: Sequence[Document], batch_size: int, device: torch.device, *, show_progress: bool = False
) -> Tensor:
    """Return the embeddings of `documents`, in float32 or higher precision, on the CPU: (documents, dimensions).

    `batch_size`: documents per batch.
    """
    vectors: dict[int, Tensor] = {}
    progress_bar = ProgressBar("texts", sum(len(each.tokens) for each in documents), verb="embedding", total_unit="tokens")
    # Documents of similar length are put into the same batch, since padding wastes compute.
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number].tokens))
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        rows = [_build_inputs_and_targets(documents[number], model.architecture.sequence_length) for number in numbers]
        inputs, targets = (pad_sequence(list(each), batch_first=True, padding_value=IGNORE_INDEX) for each in zip(*rows, strict=True))
        vectors |= zip(numbers, model(inputs.clamp_min(0).to(device), targets.to(device)).cpu(), strict=True)
        progress_bar.update(sum(len(documents[number].tokens) for number in numbers), len(numbers))
        if show_progress:
            progress_bar.print_if_due()
    if show_progress:
        progress_bar.close()
    return torch.stack([vectors[number] for number in range(len(documents))])


def _build_inputs_and_targets(document: Document, max_length: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a document, truncated to `max_length` tokens.

    The targets of an embedding model are its inputs, but IGNORE_INDEX where the loss mask is 0.
    """
    tokens = torch.from_numpy(document.tokens[:max_length].astype(np.int64))
    loss_mask = (
        torch.ones(len(tokens), dtype=torch.bool) if document.loss_mask is None else torch.from_numpy(document.loss_mask[:max_length])
    )
    return tokens, torch.where(loss_mask, tokens, IGNORE_INDEX)


def _write_vectors(options: EmbedOptions, vectors: Tensor) -> None:
    rows = vectors.float().numpy()
    if options.output is None:
        for text, row in zip(options.texts, rows, strict=True):
            sys.stdout.write(f"{json.dumps({'text': text, 'vector': [round(float(value), 7) for value in row]}, ensure_ascii=False)}\n")
        return
    output = Path(options.output)
    staging = output.with_name(f".{output.name}.partial")
    try:
        with staging.open("wb") as file:
            np.save(file, rows)
        staging.replace(output)
    except OSError as error:
        staging.unlink(missing_ok=True)
        raise SwarmtrainError(
            f"cannot be written: {describe_os_error(error)}", place=str(output), hint="pass a writable file with --output"
        ) from None
    sys.stderr.write(f"wrote {output}: {rows.shape[0]:,} embeddings of {rows.shape[1]:,} dimensions\n")
