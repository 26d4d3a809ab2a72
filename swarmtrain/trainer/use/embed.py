"""`python -m swarmtrain.trainer embed`: what our own command line starts, once a rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from swarmtrain.config.files import reason
from swarmtrain.errors import SwarmtrainError
from swarmtrain.trainer.ending import verb
from swarmtrain.trainer.model.targets import IGNORE
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.prepare.progress import Progress
from swarmtrain.trainer.prepare.shapes import Completions
from swarmtrain.trainer.prepare.shards import Document
from swarmtrain.trainer.prepare.sources import Record
from swarmtrain.trainer.use import source
from swarmtrain.trainer.use.shared import ready


@dataclass(frozen=True)
class Asked:
    """The options of `embed`."""

    source: str
    base: str | None
    texts: list[str]
    instruction: str
    append_eos: bool | None
    batch: int
    output: str | None
    tokenizer: str | None


@verb
def main(question: Mapping[str, Any]) -> None:
    """Write the vectors of texts. Raises SwarmtrainError."""
    asked = Asked(**question)
    model = source.opened(Path(asked.source), Path(asked.base) if asked.base else None)
    encoder = model.encoder(asked.tokenizer)
    end = model.end if asked.append_eos is None else encoders.end_token(encoder, None, own=asked.append_eos)
    records = [Record(number, {"before": asked.instruction, "text": text}) for number, text in enumerate(asked.texts)]
    documents = Completions(encoder, "before", "text", end).documents(records)
    with ready(model, vectors=True) as (shared, here):
        vectors = embedded(shared.local, documents, asked.batch, here.device, aloud=here.first)
        if here.first:
            _tell(asked, vectors)
            longest = model.shape.sequence_length
            if long := sum(len(each.tokens) > longest for each in documents):
                note = f"{long} of {len(documents)} texts are longer than {longest} tokens, and were cut off there, as in training"
                sys.stderr.write(f"note: {note}\n")


@torch.no_grad()
def embedded(model: Transformer, documents: Sequence[Document], batch: int, device: torch.device, *, aloud: bool = False) -> Tensor:
    """Return the vectors (documents, dimensions), in their order, in float32 at least, on the CPU. `batch`: documents at a time."""
    found: dict[int, Tensor] = {}
    progress = Progress("texts", sum(len(each.tokens) for each in documents), verb="embedding", of="tokens")
    # Those of like lengths go together: what fills up a short one beside a long one is work for nothing.
    order = sorted(range(len(documents)), key=lambda number: -len(documents[number].tokens))
    for first in range(0, len(order), batch):
        numbers = order[first : first + batch]
        rows = [_row(documents[number], model.shape.sequence_length) for number in numbers]
        inputs, targets = (pad_sequence(list(each), batch_first=True, padding_value=IGNORE) for each in zip(*rows, strict=True))
        found |= zip(numbers, model(inputs.clamp_min(0).to(device), targets.to(device)).cpu(), strict=True)
        progress.add(sum(len(documents[number].tokens) for number in numbers), len(numbers))
        if aloud:
            progress.tell()
    if aloud:
        progress.end()
    return torch.stack([found[number] for number in range(len(documents))])


def _row(document: Document, longest: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a document, as far as it fits."""
    tokens = torch.from_numpy(document.tokens[:longest].astype(np.int64))
    counts = torch.ones(len(tokens), dtype=torch.bool) if document.counts is None else torch.from_numpy(document.counts[:longest])
    return tokens, torch.where(counts, tokens, IGNORE)


def _tell(asked: Asked, vectors: Tensor) -> None:
    rows = vectors.float().numpy()
    if asked.output is None:
        for text, row in zip(asked.texts, rows, strict=True):
            sys.stdout.write(f"{json.dumps({'text': text, 'vector': [round(float(value), 7) for value in row]}, ensure_ascii=False)}\n")
        return
    output = Path(asked.output)
    aside = output.with_name(f".{output.name}.partial")
    try:
        with aside.open("wb") as file:
            np.save(file, rows)
        aside.replace(output)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise SwarmtrainError(f"cannot be written: {reason(error)}", place=str(output), hint="--output names a file") from None
    sys.stderr.write(f"wrote {output}: {rows.shape[0]:,} vectors of {rows.shape[1]:,} numbers\n")
