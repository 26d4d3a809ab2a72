"""How documents are made of records."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.prepare import chats, encoders
from swarmtrain.trainer.prepare.chats import Template
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.prepare.options import PLACE, Options
from swarmtrain.trainer.prepare.shards import Document, Shaper
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
        self.told: Mapping[str, Any] = {"key": key, "end_token": end}

    def wrong(self, record: Record) -> str:
        """Return why a document cannot be made of `record`, else nothing."""
        return wrong_text(record.values, self.keys[0])

    def documents(self, records: Sequence[Record]) -> list[Document]:
        """Return the document of each."""
        texts = [record.values[self.keys[0]] for record in records if record.values]
        return [Document(ended(tokens, self._end) if len(tokens) else tokens) for tokens in encoders.plain(self._encoder, texts)]


class Completions:
    """A prompt and its completion are a document, in which only the completion and the end count."""

    masked = True

    def __init__(self, encoder: Encoder, prompt: str, completion: str, end: int | None) -> None:
        self.keys: Sequence[str] = (prompt, completion)
        self._encoder, self._end = encoder, end
        self.dtype = smallest_type(encoder.size)
        self.told: Mapping[str, Any] = {"prompt_key": prompt, "completion_key": completion, "end_token": end}

    def wrong(self, record: Record) -> str:
        """Return why a document cannot be made of `record`, else nothing."""
        return next(filter(None, (wrong_text(record.values, key) for key in self.keys)), "")

    def documents(self, records: Sequence[Record]) -> list[Document]:
        """Return the document of each."""
        pairs = [tuple(record.values[key] for key in self.keys) for record in records if record.values]
        made = []
        for (prompt, completion), encoded in zip(
            pairs, self._encoder.encode([prompt + completion for prompt, completion in pairs]), strict=True
        ):
            counts = chats.counting(encoded, [(len(prompt), len(prompt) + len(completion))])
            ends = self._end is not None and bool(completion)
            made.append(Document(ended(encoded.tokens, self._end if ends else None), np.append(counts, True) if ends else counts))
        return made


class Chats:
    """A conversation is a document, in which only what the assistant says counts, and the end of its turns."""

    masked = True

    def __init__(self, encoder: Encoder, key: str, template: Template) -> None:
        self.keys: Sequence[str] = (key,)
        self._encoder, self._template = encoder, template
        self.dtype = smallest_type(encoder.size)
        self.told: Mapping[str, Any] = {"key": key, "chat_template": template.source}

    def wrong(self, record: Record) -> str:
        """Return why a document cannot be made of `record`, else nothing."""
        messages = record.values[self.keys[0]] if record.values else None
        wrong = self._template.wrong(messages)
        if not wrong and (half := next(filter(None, (wrong_text(message, "content") for message in messages or ())), "")):
            return half
        if not wrong:
            try:
                self._template.written(messages or ())
            except ValueError as error:
                return str(error)
        return wrong

    def documents(self, records: Sequence[Record]) -> list[Document]:
        """Return the document of each."""
        written = [self._template.written(record.values[self.keys[0]]) for record in records if record.values]
        encoded = self._encoder.encode([text for text, _ in written], special=True)
        return [Document(each.tokens, chats.counting(each, ranges)) for each, (_, ranges) in zip(encoded, written, strict=True)]


def shaper(options: Options, encoder: Encoder) -> Shaper:
    """Return what makes documents as `options` say. Raises TrainingError if they contradict each other."""
    end = encoders.end_token(encoder, options.end_token, own=options.append_eos)
    pair = options.prompt_key, options.completion_key
    if any(pair) and (not all(pair) or options.chat):
        hint = "--prompt-key prompt --completion-key completion; or --chat, with messages under --key"
        raise TrainingError("--prompt-key and --completion-key go together, and without --chat", place=PLACE, hint=hint)
    if options.chat and end is not None:
        raise TrainingError("a chat's template ends its messages itself", place=PLACE, hint="leave out --append-eos and --end-token")
    if options.chat_template and not options.chat:
        raise TrainingError("--chat-template is for --chat", place=PLACE, hint="add --chat")
    if options.chat:
        template = Template(encoder, options.chat_template)
        sys.stderr.write(f"chat template: {template.name}\n")
        return Chats(encoder, options.key or "messages", template)
    if options.prompt_key and options.completion_key:
        return Completions(encoder, options.prompt_key, options.completion_key, end)
    return Texts(encoder, options.key or "text", end)
