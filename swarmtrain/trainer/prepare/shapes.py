"""How documents are made of records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.prepare.shards import Document
from swarmtrain.trainer.prepare.sources import Record


def smallest_type(size: int) -> str:
    """Return the smallest type that holds tokens below `size`."""
    return next(name for name in ("uint8", "uint16", "uint32") if size <= np.iinfo(name).max + 1)


def wrong_text(values: Any, key: str) -> str:
    """Return what keeps `values[key]` from being a text, else nothing."""
    value = values[key]
    if not isinstance(value, str):
        return f"{key!r} is {'null' if value is None else type(value).__name__}, not a text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"{key!r} has half of a character (a lone surrogate)"
    return ""


def ended(tokens: Tokens, end: int | None) -> Tokens:
    """Return `tokens` with the token `end` after them."""
    return tokens if end is None else np.append(tokens.astype(np.uint32), np.uint32(end))


class Texts:
    """A text is a document, in which every token counts. An empty text is none, whatever would end it."""

    masked = False

    def __init__(self, encoder: Encoder, key: str, end: int | None) -> None:
        self.keys: Sequence[str] = (key,)
        self._encoder, self._end = encoder, end
        self.dtype = smallest_type(encoder.size)
        self.told: Mapping[str, Any] = {"key": key}

    def wrong(self, record: Record) -> str:
        """Return why a document cannot be made of `record`, else nothing."""
        return wrong_text(record.values, self.keys[0])

    def documents(self, records: Sequence[Record]) -> list[Document]:
        """Return the document of each."""
        texts = [record.values[self.keys[0]] for record in records if record.values]
        return [Document(ended(tokens, self._end) if len(tokens) else tokens) for tokens in encoders.plain(self._encoder, texts)]
