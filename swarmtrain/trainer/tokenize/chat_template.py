"""Render conversations as text with a Hugging Face chat template, as transformers does, and find the characters of the assistant's turns.

If the template marks what the assistant generates ({% generation %}), its marks are used. Else a turn begins at the end of the text that
is rendered from all earlier messages with the generation prompt, and it ends at the end of the text of all messages up to this turn. A
template may also write a turn differently if others follow, for instance without its reasoning: then the turn is what changes with the
message, up to the special token after it.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize.conversations import Conversation, Message
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE, import_optional_dependency
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer, EncodedText, HuggingFaceTokenizer

_CHATML_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")
_MAX_RENDER_SECONDS, _MAX_RENDERED_CHARACTERS = 20, 1 << 26
_MARK = "\ue000changed\ue001"
"""Text that takes the place of a message's texts, to see which part of the rendered text depends on them: characters for private use."""
_FIXED_KEYS = ("role", "type", "id", "tool_call_id")
CharRange = tuple[int, int]


class ChatTemplate:
    """A chat template, compiled for one tokenizer."""

    def __init__(self, tokenizer: BaseTokenizer, template_file: str | None = None, *, source: str | None = None) -> None:
        """Load the chat template `source`, or that in `template_file`; without both, the tokenizer's own, or ChatML if it has none.

        `template_file`: path of a tokenizer_config.json or of a Jinja template. Raises TrainingError if the template cannot be read.
        """
        template, self.name = (source, "the chat template of the training data") if source else _load_template(tokenizer, template_file)
        self._sources = _select_sources(template, self.name)
        self.source = self._sources[False]
        if self.source == _CHATML_TEMPLATE and isinstance(tokenizer, HuggingFaceTokenizer):
            missing = [mark for mark in _CHATML_TOKENS if tokenizer.token_to_id(mark) is None]
            self.name += f", in which {' and '.join(missing)} are not single tokens" if missing else ""
        self._tokenizer = tokenizer
        self._special_tokens = (*tokenizer.special_tokens, *(_CHATML_TOKENS if self.source == _CHATML_TEMPLATE else ()))
        self._templates = {has_tools: self._compile_template(source) for has_tools, source in self._sources.items()}

    def render_conversation(self, conversation: Conversation) -> tuple[str, list[CharRange]]:
        """Return the text of a conversation, and the character ranges of the assistant's turns that contribute to the loss.

        Raises ValueError if the template cannot render it, would omit a part of it, or if the ranges cannot be determined.
        """
        with _limit_time():
            conversation = self._prepare_conversation(conversation)
            text, generated = self._render_with_marks(conversation)
            self._check_completeness(conversation, text)
            if generated is None:
                return text, [self._find_turn(conversation, number, text) for number in conversation.trained_messages]
            return text, self._select_generated_ranges(conversation, text, generated)

    def render_prompt(self, messages: Sequence[Message], *, continue_last: bool = False) -> str:
        """Return the text of `messages`, and of the beginning of the assistant's answer.

        `continue_last`: the answer has begun, with the last message. Raises ValueError if the template cannot render it.
        """
        with _limit_time():
            conversation = self._prepare_conversation(Conversation(messages, ()))
            text = self._render(conversation, conversation.messages, add_generation_prompt=not continue_last)
            if continue_last:
                return text[: self._find_changed_part(conversation, conversation.messages, len(messages) - 1, text)[1]]
            self._check_completeness(conversation, text)
            return text

    @cached_property
    def end_of_turn_tokens(self) -> list[int]:
        """The special tokens with which a turn of the assistant ends; empty if there is none."""
        messages = [{"role": role, "content": "Hello"} for role in ("user", "assistant", "user")]
        tails = []
        for shown in (messages[:2], messages):
            conversation = Conversation(shown, ())
            try:
                with _limit_time():
                    text = self._render(conversation, shown)
                    tails.append(text[self._find_changed_part(conversation, shown, 1, text)[1] :])
            except ValueError:
                return []
        end_tokens = [token for token in self._special_tokens if token in tails[0]]
        end_tokens = end_tokens or [token for token in self._special_tokens if tails[1].startswith(token)]
        return [number for token in end_tokens if (number := self._tokenizer.token_to_id(token)) is not None]

    @cached_property
    def begin_tokens(self) -> Sequence[int]:
        """The tokens that the tokenizer puts before each text, if the template writes them; else an empty list."""
        begin = list(self._tokenizer.begin_tokens)
        try:
            [encoded] = self._tokenizer.encode([self.render_prompt([{"role": "user", "content": "Hello"}])])
        except ValueError:
            return begin
        return begin if encoded.tokens[: len(begin)].tolist() == begin else []

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template can write a content that is a list of parts."""
        messages = [{"role": "user", "content": [{"type": "text", "text": _MARK}]}]
        try:
            text = self._render(Conversation(messages, ()), messages)
        except ValueError:
            return False
        return _MARK in text and repr(messages[0]["content"]) not in text

    def _prepare_conversation(self, conversation: Conversation) -> Conversation:
        """Return a conversation that the template can write. Raises ValueError if a message has the text of a special token."""
        for number, message in enumerate(conversation.messages, 1):
            texts = "".join(_iterate_texts(message))
            if special_token := next((special_token for special_token in self._special_tokens if special_token in texts), None):
                raise ValueError(f"message {number} has {special_token}, which only the template may write")
        if self._reads_parts or not any(isinstance(message.get("content"), list) for message in conversation.messages):
            return conversation
        messages = [
            {**message, "content": "\n".join(part["text"] for part in message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in conversation.messages
        ]
        return replace(conversation, messages=messages)

    def _check_completeness(self, conversation: Conversation, text: str) -> None:
        """Raise ValueError if the template has omitted tools or a message, or has quoted the arguments of a call once more."""
        if conversation.tools and not re.search(r"\btools\b", self._sources[True]):
            raise ValueError("has tools, which the chat template does not write")
        for number, message in enumerate(conversation.messages):
            for call in message.get("tool_calls") or ():
                function = call.get("function", call) if isinstance(call, dict) else {}
                if str(function.get("name")) not in text:
                    raise ValueError(f"message {number + 1} calls {function.get('name')}, which the chat template does not write")
                arguments = function.get("arguments")
                if isinstance(arguments, str) and arguments not in text and json.dumps(arguments, ensure_ascii=False) in text:
                    raise ValueError(f"message {number + 1} has arguments as a text, which the chat template quotes: use an object")
            content = _join_parts(message.get("content", "")).strip()
            if content and content not in text:
                changed = {**message, "content": _change_texts(message["content"])}
                if self._render(conversation, [*conversation.messages[:number], changed, *conversation.messages[number + 1 :]]) == text:
                    raise ValueError(f"the content of message {number + 1}, of the role {message['role']}, is omitted by the chat template")

    def _select_generated_ranges(self, conversation: Conversation, text: str, generated: Sequence[CharRange]) -> list[CharRange]:
        """Return those of the ranges that the template has marked, in which the assistant's messages that are trained are."""
        answers = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if len(conversation.trained_messages) == len(answers):
            return list(generated)
        changed = {number: self._find_changed_part(conversation, conversation.messages, number, text) for number in answers}
        selected = []
        for start, end in generated:
            inside = [number for number, part in changed.items() if part[0] < end and start < part[1]]
            if len(inside) != 1:
                raise ValueError("has messages that are not trained, and the chat template marks what is generated in another way")
            if inside[0] in conversation.trained_messages:
                selected.append((start, end))
        return selected

    def _find_turn(self, conversation: Conversation, number: int, text: str) -> CharRange:
        """Return the range of the assistant's turn `number` in the rendered `text`."""
        messages = conversation.messages
        if number:
            prompt = self._render(conversation, messages[:number], add_generation_prompt=True)
        else:  # many templates need a message
            prompt = text[: self._find_changed_part(conversation, messages, number, text)[0]]
        alone = text if number == len(messages) - 1 else self._render(conversation, messages[: number + 1])
        if alone.startswith(prompt) and text.startswith(alone):
            return len(prompt), self._find_end(text, len(prompt), alone[len(prompt) :])
        return self._find_rewritten_turn(conversation, number, text, prompt, alone)

    def _find_rewritten_turn(self, conversation: Conversation, number: int, text: str, prompt: str, alone: str) -> CharRange:
        """Return the range of a turn that the template writes differently in `text` than after `prompt`, or as the last one in `alone`."""
        messages = conversation.messages
        first, last = self._find_changed_part(conversation, messages, number, text)
        start = _count_common_characters(prompt, text)
        if start < len(prompt):  # the generation prompt opens a block, such as the reasoning, which the text does not have
            marks = [mark for mark in ("\n", *self._special_tokens) if mark in text[:start]]
            start = max((text.rindex(mark, 0, start) + len(mark) for mark in marks), default=0)
        start = min(first, start)
        if number and start < self._find_changed_part(conversation, messages, number - 1, text)[1]:
            raise ValueError(
                f"message {number + 1}: the chat template writes the messages before it differently, so its loss mask is unknown"
            )
        tail = alone[self._find_changed_part(conversation, messages[: number + 1], number, alone)[1] :]
        if text.startswith(tail, last):
            return start, self._find_end(text, last, tail)
        # Not all of the end is alike, for instance since the whole conversation ends with another token.
        common = tail[: _count_common_characters(tail, text[last:])]
        ends = [common.rindex(token) + len(token) for token in self._special_tokens if token in common]
        rest = text[last:].lstrip()
        if not ends:
            spaces = len(text) - last - len(rest)
            ends = [spaces + len(token) for token in self._special_tokens if rest.startswith(token)]
        if not ends:
            raise ValueError(f"message {number + 1}: the chat template ends it differently if others follow, so its loss mask is unknown")
        return start, last + max(ends)

    def _find_changed_part(self, conversation: Conversation, messages: Sequence[Message], number: int, text: str) -> CharRange:
        """Return the range of `text`, which are the rendered `messages`, that depends on the texts in the message `number`."""
        changed = self._render_changed(conversation, messages, number)
        if changed == text:
            raise ValueError(f"message {number + 1}, of the role {messages[number]['role']}, is omitted by the chat template")
        first = _count_common_characters(text, changed)
        return first, len(text) - min(_count_common_characters(text[::-1], changed[::-1]), len(text) - first)

    def _render_changed(self, conversation: Conversation, messages: Sequence[Message], number: int) -> str:
        return self._render(conversation, [*messages[:number], _change_texts(messages[number]), *messages[number + 1 :]])

    def _find_end(self, text: str, position: int, tail: str) -> int:
        """Return the end of the loss characters of a turn whose last characters, at `position` of `text`, are `tail`.

        Whitespace after a special token at the end of the turn does not contribute. If a turn does not end with a special token, the one
        with which the next message begins does: the model ends its turn with it.
        """
        stripped = tail.rstrip()
        if stripped.endswith(self._special_tokens):
            return position + len(stripped)
        end = position + len(tail)
        return end + next((len(token) for token in self._special_tokens if text.startswith(token, end)), 0)

    def _render(self, conversation: Conversation, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._templates[bool(conversation.tools)].render(
                **self._list_variables(conversation, messages, add_generation_prompt=add_generation_prompt)
            )
        except Exception as error:  # noqa: BLE001  # an error of any type in a template of a stranger
            raise ValueError(f"cannot be rendered by the chat template: {error}") from None
        if len(text) > _MAX_RENDERED_CHARACTERS:
            raise ValueError(f"is rendered by the chat template as {len(text):,} characters")
        return text

    def _render_with_marks(self, conversation: Conversation) -> tuple[str, list[CharRange] | None]:
        """Return the text of a conversation, and the ranges that the template marks as generated; None if it has no such marks."""
        template = self._templates[bool(conversation.tools)]
        if not _GENERATION_TAG.search(self._sources[bool(conversation.tools)]):
            return self._render(conversation, conversation.messages), None
        blocks: list[str] = []
        ranges: list[CharRange] = []
        try:
            with template.environment.activate_tracker(blocks, ranges):
                blocks += template.generate(**self._list_variables(conversation, conversation.messages, add_generation_prompt=False))
        except Exception as error:  # noqa: BLE001  # an error of any type in a template of a stranger
            raise ValueError(f"cannot be rendered by the chat template: {error}") from None
        return "".join(blocks), ranges

    def _list_variables(self, conversation: Conversation, messages: Sequence[Message], *, add_generation_prompt: bool) -> Mapping[str, Any]:
        given = {"messages": messages, "tools": conversation.tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        return {**self._tokenizer.token_texts, **conversation.template_values, **given}

    def _compile_template(self, source: str) -> Any:
        import_optional_dependency("jinja2")
        utils = import_optional_dependency("transformers.utils.chat_template_utils")
        try:
            # transformers' own sandbox and filters. Its public function copies each conversation, and takes half as long again.
            return utils._compile_jinja_template(source)
        except Exception as error:  # noqa: BLE001  # an error of any type in a template of a stranger
            raise TrainingError(f"{self.name}: is not a valid template: {error}", place=f"{ERROR_PLACE} --chat") from None


def build_loss_mask(encoded_text: EncodedText, character_ranges: Sequence[CharRange]) -> Any:
    """Return the loss mask of an encoded text: True for each token with at least one character in `character_ranges`."""
    loss_mask = np.zeros(len(encoded_text.tokens), dtype=bool)
    for start, end in character_ranges:
        loss_mask |= (encoded_text.starts < end) & (encoded_text.ends > start)
    return loss_mask


def _load_template(tokenizer: BaseTokenizer, template_file: str | None) -> tuple[Any, str]:
    """Return the chat template, or several with their names, and the name that error messages show for it."""
    if template_file is None:
        if not tokenizer.chat_template:
            return _CHATML_TEMPLATE, "ChatML"
        own_file = Path(tokenizer.name).with_name("chat_template.jinja")
        return tokenizer.chat_template, own_file.name if own_file.is_file() else "tokenizer_config.json"
    try:
        text = read_regular_file(Path(template_file)).decode()
        return json.loads(text)["chat_template"] if template_file.endswith(".json") else text, template_file
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrainingError(f"{template_file}: has no chat template: {error}", place=f"{ERROR_PLACE} --chat-template") from None


def _select_sources(template: Any, name: str) -> Mapping[bool, str]:
    """Return the source text of the template for conversations without tools, and with them, as transformers selects it."""
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}
    if isinstance(template, dict) and "default" in template:
        return {False: template["default"], True: template.get("tool_use", template["default"])}
    if not isinstance(template, str):
        raise TrainingError(
            f"{name}: has several chat templates, none of which is named default: {', '.join(template)}",
            place=f"{ERROR_PLACE} --chat-template",
            hint="pass a single template as a separate file",
        )
    return {False: template, True: template}


def _change_texts(value: Any) -> Any:
    """Return a message, or a part of one, with other texts than those of `value`, but the same structure."""
    if isinstance(value, str):
        return _MARK
    if isinstance(value, dict):
        return {key: part if key in _FIXED_KEYS else _change_texts(part) for key, part in value.items()}
    return [_change_texts(part) for part in value] if isinstance(value, list) else value


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield the texts in a message, or in a part of one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _iterate_texts(part)


def _join_parts(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _count_common_characters(text: str, other: str) -> int:
    """Return the number of characters at the beginning of two texts that are the same."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((number for number, (first, second) in pairs if first != second), min(len(text), len(other)))


class _TimeLimitExceeded(BaseException):
    """A template has used up its time. Not an Exception, which a template's filters might catch."""


@contextmanager
def _limit_time() -> Iterator[None]:
    """Context manager that raises ValueError when its body takes too long, in the main thread of a process: others get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise _TimeLimitExceeded

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _MAX_RENDER_SECONDS)
    try:
        yield
    except _TimeLimitExceeded:
        raise ValueError(f"is not rendered by the chat template within {_MAX_RENDER_SECONDS} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
