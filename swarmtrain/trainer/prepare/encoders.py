"""Texts to tokens: by a Hugging Face tokenizer.json, or a token a byte.

A text is a text: what looks in it like a special token is encoded as the characters it has. Only a chat's template writes
special tokens as text, and there a message that has one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.prepare.options import BYTES, PLACE, needed

_USUAL = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text, and for each the characters that it stands for: from `starts` to before `ends`."""

    tokens: Tokens
    starts: Tokens
    ends: Tokens


class Encoder(Protocol):
    """What makes tokens of texts."""

    name: str
    sha256: str
    size: int
    """One more than the highest token."""

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[Encoded]:
        """Return the tokens of each text; `special`: special tokens that are written in it count as such."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones among them."""

    def token(self, text: str) -> int | None:
        """Return the token that has this text, if there is one."""

    @property
    def specials(self) -> list[str]:
        """The texts of special tokens."""


def opened(name: str) -> Encoder:
    """Return the encoder `name`: BYTES, or the path of a tokenizer.json. Raises TrainingError."""
    return Bytes() if name == BYTES else Tokenizer(name)


def end_token(encoder: Encoder, text: str | None, *, own: bool) -> int | None:
    """Return the token after each document: `text`, or the encoder's `own`. Raises TrainingError if there is none."""
    if text is None and own:
        text = _eos(encoder)
    if text is None:
        return None
    token = encoder.token(text)
    if token is None:
        raise TrainingError(
            f"{encoder.name}: has no token {text!r}",
            place=f"{PLACE} --end-token",
            hint="its special tokens: " + ", ".join(encoder.specials),
        )
    return token


class Bytes:
    """A token a byte of UTF-8, and one more for the end of a document."""

    name, sha256 = BYTES, ""
    specials: list[str] = [_USUAL[0]]  # noqa: RUF012  # never changed

    def __init__(self) -> None:
        self.size = 256

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[Encoded]:
        del special  # there is none in a text
        return [_bytes(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = [bytes([token]) if token < 256 else _USUAL[0].encode() for token in tokens]
        return b"".join(pieces).decode(errors="replace")

    def token(self, text: str) -> int | None:
        if text not in self.specials:
            return None
        self.size = 257
        return 256


class Tokenizer:
    """A tokenizer of the library `tokenizers`, without what it adds, cuts off or fills up."""

    def __init__(self, name: str) -> None:
        library = needed("tokenizers")
        try:
            content = Path(name).read_bytes()
            facts = json.loads(content)
            whole = {**facts, "truncation": None, "padding": None, "post_processor": None}
            self._tokenizer: Any = library.Tokenizer.from_str(json.dumps(whole))
        except OSError as error:
            raise TrainingError(f"{name}: {reason(error)}", place=f"{PLACE} --tokenizer", hint="a tokenizer.json, or bytes") from None
        except Exception as error:  # noqa: BLE001  # the library raises Exception itself
            raise TrainingError(f"{name}: is no tokenizer.json: {error}", place=f"{PLACE} --tokenizer") from None
        self.name, self.sha256 = name, hashlib.sha256(content).hexdigest()
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.specials = [token["content"] for token in facts.get("added_tokens", ()) if token.get("special")]

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[Encoded]:
        self._tokenizer.encode_special_tokens = not special
        return [_of(each) for each in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text, without where they are: a third faster."""
        self._tokenizer.encode_special_tokens = True
        return [np.array(each.ids, dtype=np.uint32) for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def token(self, text: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(text)
        return number


def ends(encoder: Encoder) -> set[int]:
    """Return the token that ends a text, if there is one."""
    try:
        token = end_token(encoder, None, own=True)
    except TrainingError:
        return set()
    return set() if token is None else {token}


def plain(encoder: Encoder, texts: Sequence[str]) -> list[Tokens]:
    """Return the tokens of each text, and nothing else."""
    if isinstance(encoder, Tokenizer):
        return encoder.tokens(texts)
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def _bytes(text: str) -> Encoded:
    widths = [len(character.encode()) for character in text]
    starts = np.repeat(np.arange(len(text)), widths)
    return Encoded(np.frombuffer(text.encode(), dtype=np.uint8), starts, starts + 1)


def _of(encoding: Any) -> Encoded:
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return Encoded(np.array(encoding.ids, dtype=np.uint32), offsets[:, 0], offsets[:, 1])


def _eos(encoder: Encoder) -> str:
    if found := config(encoder.name).get("eos_token"):
        return str(found["content"] if isinstance(found, dict) else found)
    for text in _USUAL:
        if encoder.token(text) is not None:
            return text
    raise TrainingError(f"{encoder.name}: does not say which token ends a text", place=f"{PLACE} --append-eos", hint="--end-token names it")


def config(tokenizer: str) -> dict[str, Any]:
    """Return what tokenizer_config.json beside a tokenizer.json says; nothing if there is none."""
    try:
        facts: dict[str, Any] = json.loads(Path(tokenizer).with_name("tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return facts
