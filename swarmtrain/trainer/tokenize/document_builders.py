"""Build tokenized documents from records: texts, prompts with completions, or conversations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.tokenize import chat_template, conversations, tokenizer_backends
from swarmtrain.trainer.tokenize.chat_template import CharRange, ChatTemplate
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


@dataclass(frozen=True)
class AddedTokens:
    """What is added to the tokens of each text: the tokens that the tokenizer adds, and an EOS token."""

    begin: Sequence[int] = ()
    end: Sequence[int] = ()
    split_special: bool = False
    """Whether the text of a special token in a text is encoded as ordinary characters."""

    def add_to(self, tokens: Tokens) -> tuple[Tokens, int, int]:
        """Return `tokens` with the added tokens, and the number of those at the beginning and at the end.

        What is there already, since the text has it, is not added again.
        """
        begin = () if self.begin and tokens[: len(self.begin)].tolist() == list(self.begin) else self.begin
        end = () if self.end and tokens[-len(self.end) :].tolist() == list(self.end) else self.end
        if not begin and not end:
            return tokens, 0, 0
        return np.concatenate([np.array(begin, np.uint32), tokens, np.array(end, np.uint32)], dtype=np.uint32), len(begin), len(end)

    def list_options(self) -> dict[str, Any]:
        """Return the options that affect documents."""
        return {"begin_tokens": list(self.begin), "end_tokens": list(self.end), "split_special_tokens": self.split_special}


_NO_TOKENS = AddedTokens()


class TextBuilder:
    """Builds one document per text. All tokens contribute to the loss.

    An empty text yields an empty document, without added tokens.
    """

    has_loss_mask = False

    def __init__(self, tokenizer: BaseTokenizer, text_key: str, added_tokens: AddedTokens = _NO_TOKENS) -> None:
        self.keys: Sequence[str] = (text_key,)
        self._tokenizer, self._added_tokens = tokenizer, added_tokens
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        self.identity_options: Mapping[str, Any] = {"key": text_key, **added_tokens.list_options()}
        self.begin_tokens, self.stop_tokens = added_tokens.begin, added_tokens.end[-1:]

    def find_record_problem(self, record: SourceRecord) -> str:
        """Return a description of why `record` cannot become a document; empty if it can."""
        return find_text_problem(record.values, self.keys[0])

    def build_documents(self, records: Sequence[SourceRecord]) -> list[Document]:
        """Return one document per record."""
        texts = [record.values[self.keys[0]] for record in records if record.values]
        encoded = self._tokenizer.encode_without_offsets(texts, split_special=self._added_tokens.split_special)
        return [Document(self._added_tokens.add_to(tokens)[0] if len(tokens) else tokens) for tokens in encoded]


class CompletionBuilder:
    """Builds one document per record, from a prompt and its completion.

    Only the completion and the tokens added at the end contribute to the loss.
    """

    has_loss_mask = True

    def __init__(self, tokenizer: BaseTokenizer, prompt_key: str, completion_key: str, added_tokens: AddedTokens = _NO_TOKENS) -> None:
        self.keys: Sequence[str] = (prompt_key, completion_key)
        self._tokenizer, self._added_tokens = tokenizer, added_tokens
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        keys = {"prompt_key": prompt_key, "completion_key": completion_key}
        self.identity_options: Mapping[str, Any] = {**keys, **added_tokens.list_options()}
        self.begin_tokens, self.stop_tokens = added_tokens.begin, added_tokens.end[-1:]

    def find_record_problem(self, record: SourceRecord) -> str:
        """Return a description of why `record` cannot become a document; empty if it can."""
        values = record.values or {}
        if any(isinstance(values[key], list) for key in self.keys):
            return "has a list of messages: use --chat with --prompt-key and --completion-key"
        return next(filter(None, (find_text_problem(values, key) for key in self.keys)), "")

    def build_documents(self, records: Sequence[SourceRecord]) -> list[Document]:
        """Return one document per record."""
        pairs = [tuple(record.values[key] for key in self.keys) for record in records if record.values]
        texts = [prompt + completion for prompt, completion in pairs]
        documents = []
        for (prompt, completion), encoded in zip(
            pairs, self._tokenizer.encode(texts, split_special=self._added_tokens.split_special), strict=True
        ):
            loss_mask = chat_template.build_loss_mask(encoded, [(len(prompt), len(prompt) + len(completion))])
            if not completion:
                documents.append(Document(encoded.tokens, loss_mask))
                continue
            tokens, begin, end = self._added_tokens.add_to(encoded.tokens)
            documents.append(Document(tokens, np.pad(loss_mask, (begin, end), constant_values=((False, True),))))
        return documents


class ChatBuilder:
    """Builds one document per conversation. Only the assistant's turns contribute to the loss."""

    has_loss_mask = True
    keys: Sequence[str] = ()  # the layouts of conversations have other keys

    def __init__(self, tokenizer: BaseTokenizer, message_keys: Sequence[str], template: ChatTemplate) -> None:
        """`message_keys`: as in read_conversation."""
        self._tokenizer, self._message_keys, self._template = tokenizer, message_keys, template
        self.dtype = select_token_dtype(tokenizer.vocab_size)
        self.identity_options: Mapping[str, Any] = {"keys": list(message_keys), "chat_template": template.source}
        self.stop_tokens: Sequence[int] = template.end_of_turn_tokens
        self.begin_tokens: Sequence[int] = template.begin_tokens
        self._rendered: dict[int, tuple[str, list[CharRange]]] = {}
        """Texts of the records that were checked, by record, until their documents are built."""

    def find_record_problem(self, record: SourceRecord) -> str:
        """Return a description of why `record` cannot become a document; empty if it can."""
        try:
            conversation = conversations.read_conversation(record.values or {}, self._message_keys)
            text, ranges = self._template.render_conversation(conversation)
            text.encode()
        except UnicodeEncodeError:
            return "contains a lone surrogate, which is not a valid character"
        except ValueError as error:
            return str(error)
        self._rendered[id(record)] = text, ranges
        return ""

    def build_documents(self, records: Sequence[SourceRecord]) -> list[Document]:
        """Return one document per record, each of which was checked."""
        rendered = [self._rendered.pop(id(record)) for record in records]
        encoded = self._tokenizer.encode([text for text, _ in rendered])
        return [
            Document(each.tokens, chat_template.build_loss_mask(each, ranges)) for each, (_, ranges) in zip(encoded, rendered, strict=True)
        ]


def select_document_builder(options: TokenizeOptions, tokenizer: BaseTokenizer) -> DocumentBuilder:
    """Return the document builder that `options` select. Raises TrainingError if `options` contradict each other."""
    eos_token = tokenizer_backends.resolve_eos_token(tokenizer, options.eos_token, use_default=options.append_eos)
    pair_keys = options.prompt_key, options.completion_key
    if any(pair_keys) and (not all(pair_keys) or options.key):
        hint = "use --prompt-key prompt --completion-key completion, also with --chat"
        raise TrainingError("--prompt-key and --completion-key must be used together, and without --key", place=ERROR_PLACE, hint=hint)
    if options.chat and (eos_token is not None or options.split_special_tokens or not options.special_tokens):
        raise TrainingError(
            "--append-eos, --eos-token, --no-special-tokens and --split-special-tokens cannot be used with --chat: the template writes "
            "all special tokens",
            place=ERROR_PLACE,
            hint="omit them",
        )
    if options.chat_template and not options.chat:
        raise TrainingError("--chat-template needs --chat", place=ERROR_PLACE, hint="add --chat")
    if options.chat:
        template = ChatTemplate(tokenizer, options.chat_template)
        sys.stderr.write(f"chat template: {template.name}\n")
        return ChatBuilder(tokenizer, [key for key in (options.key, *pair_keys) if key], template)
    begin, end = (tokenizer.begin_tokens, tokenizer.end_tokens) if options.special_tokens else ((), ())
    if eos_token is not None and list(end[-1:]) != [eos_token]:
        end = (*end, eos_token)
    added_tokens = AddedTokens(tuple(begin), tuple(end), options.split_special_tokens)
    if options.prompt_key and options.completion_key:
        return CompletionBuilder(tokenizer, options.prompt_key, options.completion_key, added_tokens)
    return TextBuilder(tokenizer, options.key or "text", added_tokens)
