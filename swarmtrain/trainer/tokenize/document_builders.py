"""Build tokenized documents from records: texts, prompts with completions, or conversations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.tokenize import chat_template, tokenizer_backends
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate
from swarmtrain.trainer.tokenize.readers import SourceRecord
from swarmtrain.trainer.tokenize.shards import Document, DocumentBuilder
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE, TokenizeOptions
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer


def select_token_dtype(vocab_size: int) -> str:
    """Return the smallest unsigned integer dtype for tokens below `vocab_size`."""
    return next(name for name in ("uint8", "uint16", "uint32") if vocab_size <= np.iinfo(name).max + 1)


def find_text_problem(record_values: Any, text_key: str) -> str:
    """Return a description of why `record_values[text_key]` is not a valid text; empty if it is."""
    value = record_values[text_key]
    if not isinstance(value, str):
        return f"{text_key!r} is {'null' if value is None else type(value).__name__}, not a string"
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"{text_key!r} contains a lone surrogate, which is not a valid character"
    return ""


def append_eos_token(tokens: Tokens, eos_token: int | None) -> Tokens:
    """Return `tokens` followed by `eos_token`. If `eos_token` is None, return `tokens` unchanged."""
    return tokens if eos_token is None else np.append(tokens.astype(np.uint32), np.uint32(eos_token))


class TextBuilder:
    """Builds one document per text. All tokens contribute to the loss.

    An empty text yields an empty document, without an EOS token.
    """

    has_loss_mask = False

    def __init__(self, tokenizer: BaseTokenizer, text_key: str, eos_token: int | None) -> None:
        self.keys: Sequence[str] = (text_key,)
        self._tokenizer, self._eos_token = tokenizer, eos_token
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        self.identity_options: Mapping[str, Any] = {"key": text_key, "eos_token": eos_token}
        self.stop_tokens: Sequence[int] = [] if eos_token is None else [eos_token]

    def find_record_problem(self, record: SourceRecord) -> str:
        """Return a description of why `record` cannot become a document; empty if it can."""
        return find_text_problem(record.values, self.keys[0])

    def build_documents(self, records: Sequence[SourceRecord]) -> list[Document]:
        """Return one document per record."""
        texts = [record.values[self.keys[0]] for record in records if record.values]
        return [
            Document(append_eos_token(tokens, self._eos_token) if len(tokens) else tokens)
            for tokens in tokenizer_backends.encode_without_offsets(self._tokenizer, texts)
        ]


class CompletionBuilder:
    """Builds one document per record, from a prompt and its completion. Only the completion and the EOS token contribute to the loss."""

    has_loss_mask = True

    def __init__(self, tokenizer: BaseTokenizer, prompt_key: str, completion_key: str, eos_token: int | None) -> None:
        self.keys: Sequence[str] = (prompt_key, completion_key)
        self._tokenizer, self._eos_token = tokenizer, eos_token
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        self.identity_options: Mapping[str, Any] = {"prompt_key": prompt_key, "completion_key": completion_key, "eos_token": eos_token}
        self.stop_tokens: Sequence[int] = [] if eos_token is None else [eos_token]

    def find_record_problem(self, record: SourceRecord) -> str:
        """Return a description of why `record` cannot become a document; empty if it can."""
        return next(filter(None, (find_text_problem(record.values, key) for key in self.keys)), "")

    def build_documents(self, records: Sequence[SourceRecord]) -> list[Document]:
        """Return one document per record."""
        pairs = [tuple(record.values[key] for key in self.keys) for record in records if record.values]
        documents = []
        for (prompt, completion), encoded in zip(
            pairs, self._tokenizer.encode([prompt + completion for prompt, completion in pairs]), strict=True
        ):
            loss_mask = chat_template.build_loss_mask(encoded, [(len(prompt), len(prompt) + len(completion))])
            has_end = self._eos_token is not None and bool(completion)
            documents.append(
                Document(
                    append_eos_token(encoded.tokens, self._eos_token if has_end else None),
                    np.append(loss_mask, True) if has_end else loss_mask,
                )
            )
        return documents


class ChatBuilder:
    """Builds one document per conversation. Only the assistant's turns, including their end-of-turn tokens, contribute to the loss."""

    has_loss_mask = True

    def __init__(self, tokenizer: BaseTokenizer, messages_key: str, template: ChatTemplate) -> None:
        self.keys: Sequence[str] = (messages_key,)
        self._tokenizer, self._template = tokenizer, template
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        self.identity_options: Mapping[str, Any] = {"key": messages_key, "chat_template": template.source}
        self.stop_tokens: Sequence[int] = template.find_end_of_turn_tokens()

    def find_record_problem(self, record: SourceRecord) -> str:
        """Return a description of why `record` cannot become a document; empty if it can."""
        messages = record.values[self.keys[0]] if record.values else None
        problem = self._template.find_conversation_problem(messages)
        if not problem and (text_problem := next(filter(None, (find_text_problem(message, "content") for message in messages or ())), "")):
            return text_problem
        if not problem:
            try:
                self._template.render_messages(messages or ())
            except ValueError as error:
                return str(error)
        return problem

    def build_documents(self, records: Sequence[SourceRecord]) -> list[Document]:
        """Return one document per record."""
        rendered = [self._template.render_messages(record.values[self.keys[0]]) for record in records if record.values]
        encoded = self._tokenizer.encode([text for text, _ in rendered], allow_special=True)
        return [
            Document(each.tokens, chat_template.build_loss_mask(each, ranges)) for each, (_, ranges) in zip(encoded, rendered, strict=True)
        ]


def select_document_builder(options: TokenizeOptions, tokenizer: BaseTokenizer) -> DocumentBuilder:
    """Return the document builder that `options` select. Raises TrainingError if `options` contradict each other."""
    eos_token = tokenizer_backends.resolve_eos_token(tokenizer, options.eos_token, use_default=options.append_eos)
    pair_keys = options.prompt_key, options.completion_key
    if any(pair_keys) and (not all(pair_keys) or options.chat):
        hint = "use --prompt-key prompt --completion-key completion, or --chat with messages under --key"
        raise TrainingError("--prompt-key and --completion-key must be used together, and without --chat", place=ERROR_PLACE, hint=hint)
    if options.chat and eos_token is not None:
        raise TrainingError(
            "--append-eos and --eos-token cannot be used with --chat: the template ends each message",
            place=ERROR_PLACE,
            hint="omit --append-eos and --eos-token",
        )
    if options.chat_template and not options.chat:
        raise TrainingError("--chat-template needs --chat", place=ERROR_PLACE, hint="add --chat")
    if options.chat:
        template = ChatTemplate(tokenizer, options.chat_template)
        sys.stderr.write(f"chat template: {template.name}\n")
        return ChatBuilder(tokenizer, options.key or "messages", template)
    if options.prompt_key and options.completion_key:
        return CompletionBuilder(tokenizer, options.prompt_key, options.completion_key, eos_token)
    return TextBuilder(tokenizer, options.key or "text", eos_token)
