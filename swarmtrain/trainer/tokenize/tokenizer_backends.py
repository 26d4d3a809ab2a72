"""Tokenizers: encode texts as tokens with a Hugging Face tokenizer, as transformers loads it, or as one token per byte.

The characters of a special token in a text are that token, as in transformers, unless an option says otherwise.
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
_TOKENIZER_FILE = "tokenizer.json"


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
    """Highest token id that a text can have, plus one."""
    begin_tokens: Sequence[int]
    """Tokens that the tokenizer puts before each text, such as BOS."""
    end_tokens: Sequence[int]
    """Tokens that the tokenizer puts after each text."""
    token_texts: Mapping[str, str]
    """Texts of the tokens with a role, by role: bos_token, eos_token, pad_token and others."""
    chat_template: str | Mapping[str, str] | None
    """The chat template of the tokenizer; if it has several, each by its name."""

    def encode(self, texts: Sequence[str], *, split_special: bool = False) -> list[EncodedText]:
        """Return the tokens and character offsets of each text, without `begin_tokens` and `end_tokens`.

        `split_special`: encode the text of a special token as ordinary characters.
        """

    def encode_without_offsets(self, texts: Sequence[str], *, split_special: bool = False) -> list[Tokens]:
        """Return the tokens of each text, like `encode`, in about 25 % less time."""

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
    """Return the tokenizer `name`: BYTE_TOKENIZER, or the path of a tokenizer.json or of its folder.

    Raises TrainingError if it cannot be read.
    """
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
    special_tokens = [_COMMON_EOS_TOKENS[0]]  # noqa: RUF012  # never modified
    token_texts: Mapping[str, str] = {}  # never modified

    def __init__(self) -> None:
        self.vocab_size = 256
        self.begin_tokens: Sequence[int] = ()
        self.end_tokens: Sequence[int] = ()
        self.chat_template: str | Mapping[str, str] | None = None

    def encode(self, texts: Sequence[str], *, split_special: bool = False) -> list[EncodedText]:
        del split_special  # the text of the EOS token is always encoded as bytes
        return [_encode_bytes(text) for text in texts]

    def encode_without_offsets(self, texts: Sequence[str], *, split_special: bool = False) -> list[Tokens]:
        del split_special
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = [bytes([token]) if token < 256 else _COMMON_EOS_TOKENS[0].encode() for token in tokens]
        return b"".join(pieces).decode(errors="replace")

    def token_to_id(self, token_text: str) -> int | None:
        if token_text not in self.special_tokens:
            return None
        self.vocab_size = 257
        return 256


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer, as transformers loads it from its folder, without truncation and padding."""

    def __init__(self, path: str) -> None:
        file = Path(path) / _TOKENIZER_FILE if Path(path).is_dir() else Path(path)
        try:
            content = read_regular_file(file)
        except OSError as error:
            raise TrainingError(
                f"{file}: {describe_os_error(error)}",
                place=f"{ERROR_PLACE} --tokenizer",
                hint="pass the path of a tokenizer.json or of its folder, or the word bytes",
            ) from None
        loaded = _load_with_transformers(file)
        self._tokenizer: Any = _remove_padding_token(loaded, content)
        self.begin_tokens: Sequence[int]
        self.end_tokens: Sequence[int]
        self.begin_tokens, self.end_tokens = _find_added_tokens(self._tokenizer)
        self._tokenizer.post_processor = None
        self.name, self.sha256 = str(file), hashlib.sha256(content).hexdigest()
        self.token_texts: Mapping[str, str] = {name: str(text) for name, text in loaded.special_tokens_map.items() if isinstance(text, str)}
        self.chat_template: str | Mapping[str, str] | None = loaded.chat_template
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added_tokens = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = [token.content for token in added_tokens if token.special]

    @cached_property
    def identity(self) -> str:
        """See BaseTokenizer. The library writes files of all its versions alike."""
        settings = json.loads(self._tokenizer.to_str())
        relevant = {name: settings[name] for name in ("normalizer", "pre_tokenizer", "model")}
        relevant["added_tokens"] = [token for token in settings["added_tokens"] if not token["special"]]
        return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()

    def encode(self, texts: Sequence[str], *, split_special: bool = False) -> list[EncodedText]:
        self._tokenizer.encode_special_tokens = split_special
        return [_convert_huggingface_encoding(each) for each in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def encode_without_offsets(self, texts: Sequence[str], *, split_special: bool = False) -> list[Tokens]:
        self._tokenizer.encode_special_tokens = split_special
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


def _encode_bytes(text: str) -> EncodedText:
    widths = [len(character.encode()) for character in text]
    starts = np.repeat(np.arange(len(text)), widths)
    return EncodedText(np.frombuffer(text.encode(), dtype=np.uint8), starts, starts + 1)


def _convert_huggingface_encoding(encoding: Any) -> EncodedText:
    offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return EncodedText(np.array(encoding.ids, dtype=np.uint32), offsets[:, 0], offsets[:, 1])


def _find_eos_token_text(tokenizer: BaseTokenizer) -> str:
    if eos_token := tokenizer.token_texts.get("eos_token"):
        return eos_token
    for text in _COMMON_EOS_TOKENS:
        if tokenizer.token_to_id(text) is not None:
            return text
    raise TrainingError(
        f"{tokenizer.name}: does not define an EOS token", place=f"{ERROR_PLACE} --append-eos", hint="set it with --eos-token"
    )


def _remove_padding_token(loaded: Any, content: bytes) -> Any:
    """Return the tokenizer of the library `tokenizers` that transformers has loaded from the `content` of a file, without truncation.

    If the file sets padding, but has no padding token, transformers adds one, for which a model has no embedding.
    """
    tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = json.loads(content)
    known = {token["content"] for token in settings.get("added_tokens", ())}
    if (
        loaded.pad_token
        and settings.get("padding")
        and loaded.pad_token not in known
        and loaded.pad_token not in settings["model"]["vocab"]
    ):
        settings = json.loads(tokenizer.to_str())
        settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] != loaded.pad_token]
        return type(tokenizer).from_str(json.dumps(settings))
    return tokenizer


def _find_added_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer of the library `tokenizers` puts before and after each text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    text_tokens = [number for number, is_added in enumerate(encoding.special_tokens_mask) if not is_added] or [len(encoding.ids)]
    return encoding.ids[: text_tokens[0]], encoding.ids[text_tokens[-1] + 1 :]


def _load_with_transformers(file: Path) -> Any:
    """Return the tokenizer that transformers loads from the folder of `file`; if it has another name than there, from the file alone.

    Never runs code of that folder. Raises TrainingError.
    """
    transformers = import_optional_dependency("transformers")
    try:
        if file.name == _TOKENIZER_FILE:
            loaded = transformers.AutoTokenizer.from_pretrained(str(file.parent), local_files_only=True, trust_remote_code=False)
        else:
            loaded = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:  # noqa: BLE001  # an error of any type in files of a stranger
        reason = f"{file}: cannot be loaded by transformers {transformers.__version__}: {' '.join(str(error).split())}"
        raise TrainingError(reason, place=f"{ERROR_PLACE} --tokenizer") from None
    if not loaded.is_fast:
        reason = f"{file}: transformers loads it as {type(loaded).__name__}, which does not tell where in the text a token is"
        raise TrainingError(reason, place=f"{ERROR_PLACE} --tokenizer", hint="use a tokenizer with a fast version")
    return loaded
