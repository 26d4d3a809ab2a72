"""Tokenizers: encode texts as tokens with a Hugging Face tokenizer.json, or as one token per byte.

If a text contains the characters of a special token, they are encoded as ordinary characters. Only chat templates may write special tokens
as text; messages that contain the text of a special token are rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarmtrain.config.user_files import describe_os_error, read_regular_file
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.tokenize.tokenize_options import BYTE_TOKENIZER, ERROR_PLACE, import_optional_dependency

_COMMON_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text, with character offsets: token i covers the characters from `starts[i]` up to, but not including, `ends[i]`."""

    tokens: Tokens
    starts: Tokens
    ends: Tokens


class BaseTokenizer(Protocol):
    """Interface of a tokenizer, which encodes texts as tokens and decodes them."""

    name: str
    sha256: str
    vocab_size: int
    """Highest token id plus one."""

    def encode(self, texts: Sequence[str], *, allow_special: bool = False) -> list[EncodedText]:
        """Return the tokens and character offsets of each text. `allow_special`: encode the text of a special token as this token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, including special tokens."""

    def token_to_id(self, token_text: str) -> int | None:
        """Return the id of the token `token_text`; None if the vocabulary does not contain it."""

    @property
    def identity(self) -> str:
        """Hash of all that determines the tokens of a text without special tokens: two files that differ only in layout have the same."""

    @property
    def special_tokens(self) -> list[str]:
        """Texts of the special tokens."""


def open_tokenizer(name: str) -> BaseTokenizer:
    """Return the tokenizer `name`: BYTE_TOKENIZER, or the path of a tokenizer.json. Raises TrainingError if it cannot be read."""
    return ByteTokenizer() if name == BYTE_TOKENIZER else HuggingFaceTokenizer(name)


def resolve_eos_token(tokenizer: BaseTokenizer, eos_token: str | None, *, use_default: bool) -> int | None:
    """Return the id of the EOS token to append to each document; None: do not append a token.

    The token is `eos_token`, or the tokenizer's own EOS token if `eos_token` is None and `use_default` is set. Raises TrainingError if
    the tokenizer does not define or contain this token.
    """
    if eos_token is None and use_default:
        eos_token = _find_eos_token_text(tokenizer)
    if eos_token is None:
        return None
    token_id = tokenizer.token_to_id(eos_token)
    if token_id is None:
        raise TrainingError(
            f"{tokenizer.name}: has no token {eos_token!r}",
            place=f"{ERROR_PLACE} --eos-token",
            hint="choose one of its special tokens: " + ", ".join(tokenizer.special_tokens),
        )
    return token_id


class ByteTokenizer:
    """Byte tokenizer: one token per byte of the UTF-8 text, and one EOS token."""

    name, sha256, identity = BYTE_TOKENIZER, "", BYTE_TOKENIZER
    special_tokens: list[str] = [_COMMON_EOS_TOKENS[0]]  # noqa: RUF012  # never modified

    def __init__(self) -> None:
        self.vocab_size = 256

    def encode(self, texts: Sequence[str], *, allow_special: bool = False) -> list[EncodedText]:
        del allow_special  # the text of the EOS token is always encoded as bytes
        return [_encode_bytes(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = [bytes([token]) if token < 256 else _COMMON_EOS_TOKENS[0].encode() for token in tokens]
        return b"".join(pieces).decode(errors="replace")

    def token_to_id(self, token_text: str) -> int | None:
        if token_text not in self.special_tokens:
            return None
        self.vocab_size = 257
        return 256


class HuggingFaceTokenizer:
    """Tokenizer of Hugging Face's library `tokenizers`, without post-processing, truncation and padding."""

    def __init__(self, tokenizer_path: str) -> None:
        library = import_optional_dependency("tokenizers")
        try:
            content = read_regular_file(Path(tokenizer_path))
            settings = json.loads(content)
            plain_settings = {**settings, "truncation": None, "padding": None, "post_processor": None}
            self._tokenizer: Any = library.Tokenizer.from_str(json.dumps(plain_settings))
        except OSError as error:
            raise TrainingError(
                f"{tokenizer_path}: {describe_os_error(error)}",
                place=f"{ERROR_PLACE} --tokenizer",
                hint="pass the path of a tokenizer.json, or the word bytes",
            ) from None
        except Exception as error:  # noqa: BLE001  # the library raises plain Exception
            raise TrainingError(f"{tokenizer_path}: is not a valid tokenizer.json: {error}", place=f"{ERROR_PLACE} --tokenizer") from None
        self.name, self.sha256 = tokenizer_path, hashlib.sha256(content).hexdigest()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.special_tokens = [token["content"] for token in settings.get("added_tokens", ()) if token.get("special")]
        for text, number in read_tokenizer_settings(tokenizer_path)["added_tokens"].items():
            if self.token_to_id(text) != number:  # transformers would add it
                raise TrainingError(
                    f"{tokenizer_path}: lacks the token {text!r} with id {number}, which tokenizer_config.json or added_tokens.json adds",
                    place=f"{ERROR_PLACE} --tokenizer",
                    hint="load the folder with transformers' AutoTokenizer, and save it again: tokenizer.json then has all tokens",
                )

    @cached_property
    def identity(self) -> str:
        """See BaseTokenizer. The library writes files of all its versions alike."""
        settings = json.loads(self._tokenizer.to_str())
        relevant = {name: settings[name] for name in ("normalizer", "pre_tokenizer", "model")}
        relevant["added_tokens"] = [token for token in settings["added_tokens"] if not token["special"]]
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()

    def encode(self, texts: Sequence[str], *, allow_special: bool = False) -> list[EncodedText]:
        self._tokenizer.encode_special_tokens = not allow_special
        return [_convert_huggingface_encoding(each) for each in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def encode_without_offsets(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text without character offsets, which takes about 25 % less time than with offsets."""
        self._tokenizer.encode_special_tokens = True
        return [np.array(each.ids, dtype=np.uint32) for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def token_to_id(self, token_text: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token_text)
        return token_id


def find_eos_token_ids(tokenizer: BaseTokenizer) -> set[int]:
    """Return a set with the id of the tokenizer's EOS token; empty if the tokenizer has none."""
    try:
        token_id = resolve_eos_token(tokenizer, None, use_default=True)
    except TrainingError:
        return set()
    return set() if token_id is None else {token_id}


def encode_without_offsets(tokenizer: BaseTokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Return the tokens of each text, without character offsets."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.encode_without_offsets(texts)
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def _encode_bytes(text: str) -> EncodedText:
    widths = [len(character.encode()) for character in text]
    starts = np.repeat(np.arange(len(text)), widths)
    return EncodedText(np.frombuffer(text.encode(), dtype=np.uint8), starts, starts + 1)


def _convert_huggingface_encoding(encoding: Any) -> EncodedText:
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return EncodedText(np.array(encoding.ids, dtype=np.uint32), offsets[:, 0], offsets[:, 1])


def _find_eos_token_text(tokenizer: BaseTokenizer) -> str:
    if eos_token := read_token_text(read_tokenizer_settings(tokenizer.name), "eos_token"):
        return eos_token
    for text in _COMMON_EOS_TOKENS:
        if tokenizer.token_to_id(text) is not None:
            return text
    raise TrainingError(
        f"{tokenizer.name}: does not define an EOS token", place=f"{ERROR_PLACE} --append-eos", hint="set it with --eos-token"
    )


def read_tokenizer_settings(tokenizer_path: str) -> dict[str, Any]:
    """Return the settings next to the tokenizer.json at `tokenizer_path`; empty if there are none.

    As in transformers, tokens in special_tokens_map.json replace those in tokenizer_config.json, and added_tokens.json adds to both.
    """
    settings = _read_sidecar(tokenizer_path, "tokenizer_config.json") | _read_sidecar(tokenizer_path, "special_tokens_map.json")
    added_tokens = {str(token["content"]): int(number) for number, token in settings.get("added_tokens_decoder", {}).items()}
    return settings | {"added_tokens": added_tokens | _read_sidecar(tokenizer_path, "added_tokens.json")}


def read_token_text(settings: Mapping[str, Any], name: str) -> str:
    """Return the text of the token `name`, such as eos_token, in the settings of a tokenizer; empty if it has none."""
    token = settings.get(name)
    return str(token["content"] if isinstance(token, dict) else token or "")


def _read_sidecar(tokenizer_path: str, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(read_regular_file(Path(tokenizer_path).with_name(name)))
    except (OSError, ValueError):
        return {}
    return content
