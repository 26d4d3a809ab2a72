"""Render conversations as text with a Hugging Face chat template, and find the characters of the assistant's turns.

An assistant turn begins at the end of the text that is rendered from all earlier messages with the generation prompt. It ends at the end of
the text that is rendered from all messages up to and including this turn. This works for any template that renders one message after
another, whether or not it marks the assistant's tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE, import_optional_dependency
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer, EncodedText

_CHATML_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_GENERATION_TAG = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_ALLOWED_NEXT_ROLES: Mapping[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
CharRange = tuple[int, int]


class ChatTemplate:
    """A chat template, compiled for one tokenizer."""

    def __init__(self, tokenizer: BaseTokenizer, template_file: str | None) -> None:
        """Load the chat template from `template_file`. If it is None, use the tokenizer's own template, or ChatML if it has none.

        `template_file`: path of a tokenizer_config.json or of a Jinja template. Raises TrainingError if the template cannot be read.
        """
        settings = tokenizer_backends.read_tokenizer_settings(tokenizer.name)
        self.source, self.name = _load_template_source(tokenizer, template_file, settings)
        if self.name == "ChatML":
            missing = [
                mark
                for mark in _CHATML_TOKENS
                if isinstance(tokenizer, tokenizer_backends.HuggingFaceTokenizer) and tokenizer.token_to_id(mark) is None
            ]
            self.name += f", in which {' and '.join(missing)} are not single tokens" if missing else ""
        self._tokenizer = tokenizer
        self._special_tokens = [*tokenizer.special_tokens, *(_CHATML_TOKENS if self.source == _CHATML_TEMPLATE else ())]
        self._token_values = {name: tokenizer_backends.read_token_text(settings, name) for name in _TEMPLATE_TOKENS}
        for name, token in self._token_values.items():
            if token and name in self.source and tokenizer.token_to_id(token) is None:
                raise TrainingError(
                    f"{self.name}: writes the {name} {token!r}, which is not a token of {tokenizer.name}", place=f"{ERROR_PLACE} --chat"
                )
        self._jinja = import_optional_dependency("jinja2")
        self._template = self._compile_template(
            _GENERATION_TAG.sub(lambda found: f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}", self.source)
        )

    def find_conversation_problem(self, messages: Any) -> str:
        """Return a description of why `messages` cannot be rendered as a conversation; empty if they can be rendered."""
        if not isinstance(messages, list) or not messages:
            return "has no list of messages"
        previous_role = ""
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                return f"message {number} does not have a role and a content that are both strings"
            if message["role"] not in _ALLOWED_NEXT_ROLES[previous_role]:
                after = f"after {previous_role}" if previous_role else "at the beginning"
                return (
                    f"message {number} has the role {message['role']}, and {after} the role must be "
                    f"{' or '.join(_ALLOWED_NEXT_ROLES[previous_role])}"
                )
            if special_token := next(
                (special_token for special_token in self._special_tokens if special_token in message["content"]), None
            ):
                return f"message {number} has {special_token}, which only the template may write"
            previous_role = message["role"]
        return "" if previous_role == "assistant" else f"ends with a message of {previous_role}, but must end with a message of assistant"

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[CharRange]]:
        """Return the text of `messages`, and the character ranges of the assistant's turns.

        Raises ValueError if the character ranges cannot be determined.
        """
        text, assistant_ranges = self._render_text(messages), list[CharRange]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render_text(messages[:number], add_generation_prompt=True)
                rendered = self._render_text(messages[: number + 1])
                if not rendered.startswith(prompt) or not text.startswith(rendered):
                    raise ValueError(
                        f"message {number + 1}: the chat template renders it differently if others follow, so its loss mask is unknown"
                    )
                assistant_ranges.append((len(prompt), len(prompt) + self._count_loss_characters(rendered[len(prompt) :])))
        return text, assistant_ranges

    def find_end_of_turn_tokens(self) -> list[int]:
        """Return a list with the special token that ends a turn of the assistant; empty if a turn does not end with one."""
        try:
            text, [(_, end)] = self.render_messages([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}])
        except ValueError:
            return []
        tokens = [self._tokenizer.token_to_id(token) for token in self._special_tokens if text[:end].endswith(token)]
        return [token for token in tokens if token is not None]

    def _count_loss_characters(self, turn: str) -> int:
        """Return the number of characters of an assistant turn that contribute to the loss.

        Whitespace after a special token at the end of the turn does not contribute.
        """
        text = turn.rstrip()
        return len(text) if text.endswith(tuple(self._special_tokens)) else len(turn)

    def _render_text(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._token_values)
        except (self._jinja.TemplateError, TypeError) as error:
            raise ValueError(f"cannot be rendered by the chat template: {error}") from None
        return text

    def _compile_template(self, source: str) -> Any:
        sandbox = import_optional_dependency("jinja2.sandbox").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], keep_trailing_newline=True
        )
        sandbox.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, indent=how.get("indent"))
        sandbox.globals["raise_exception"] = self._raise_template_error
        try:
            return sandbox.from_string(source)
        except self._jinja.TemplateError as error:
            raise TrainingError(f"{self.name}: is not a valid template: {error}", place=f"{ERROR_PLACE} --chat") from None

    def _raise_template_error(self, message: str) -> NoReturn:
        raise self._jinja.TemplateError(message)


def build_loss_mask(encoded_text: EncodedText, character_ranges: Sequence[CharRange]) -> Any:
    """Return the loss mask of an encoded text: True for each token with at least one character in `character_ranges`."""
    loss_mask = np.zeros(len(encoded_text.tokens), dtype=bool)
    for start, end in character_ranges:
        loss_mask |= (encoded_text.starts < end) & (encoded_text.ends > start)
    return loss_mask


def _load_template_source(tokenizer: BaseTokenizer, template_file: str | None, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the source text of the chat template, and the name that error messages show for it.

    As in transformers, the file chat_template.jinja has precedence over the tokenizer's settings.
    """
    if template_file is None:
        template_path = Path(tokenizer.name).with_name("chat_template.jinja")
        if template_path.is_file():
            return read_regular_file(template_path).decode(), template_path.name
        template, template_file = settings.get("chat_template"), "tokenizer_config.json"
        if template is None:
            return _CHATML_TEMPLATE, "ChatML"
    else:
        try:
            text = read_regular_file(Path(template_file)).decode()
            template = json.loads(text)["chat_template"] if template_file.endswith(".json") else text
        except (OSError, ValueError, KeyError) as error:
            raise TrainingError(f"{template_file}: has no chat template: {error}", place=f"{ERROR_PLACE} --chat-template") from None
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}
    if isinstance(template, dict) and "default" in template:
        template = template["default"]
    if not isinstance(template, str):
        raise TrainingError(
            f"{template_file}: has several chat templates, none of which is named default: {', '.join(template)}",
            place=f"{ERROR_PLACE} --chat-template",
            hint="pass a single template as a separate file",
        )
    return template, template_file
