"""Conversations as text, by a chat template as Hugging Face has them, and which characters of it are the assistant's.

What the assistant says begins where the template, asked for the assistant's turn, leaves off, and ends where the template has
written that turn. So it works for any template that writes message after message, whether or not it marks them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.prepare.encoders import Encoded, Encoder
from swarmtrain.trainer.prepare.options import PLACE, needed

_BUILT_IN = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_BUILT_IN_MARKS = ("<|im_start|>", "<|im_end|>")
_MARKED = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
_AFTER: Mapping[str, tuple[str, ...]] = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
Range = tuple[int, int]


class Template:
    """A chat template."""

    def __init__(self, encoder: Encoder, file: str | None) -> None:
        """Take that of `file`, a tokenizer_config.json or a Jinja template; else the tokenizer's own, else ChatML.

        Raises TrainingError if it cannot be read.
        """
        settings = encoders.config(encoder.name)
        self.source, self.name = _source(encoder, file, settings)
        if self.name == "ChatML":
            missing = [mark for mark in _BUILT_IN_MARKS if isinstance(encoder, encoders.Tokenizer) and encoder.token(mark) is None]
            self.name += f", in which {' and '.join(missing)} are not tokens of their own" if missing else ""
        self._marks = [*encoder.specials, *(_BUILT_IN_MARKS if self.source == _BUILT_IN else ())]
        self._values = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._jinja = needed("jinja2")
        self._template = self._compiled(
            _MARKED.sub(lambda found: f"{{%{found[1]} {'endif' if found[2] else 'if true'} {found[3]}%}}", self.source)
        )

    def wrong(self, messages: Any) -> str:
        """Return why `messages` are no conversation that can be written, else nothing."""
        if not isinstance(messages, list) or not messages:
            return "has no list of messages"
        before = ""
        for number, message in enumerate(messages, 1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                return f"message {number} is not a role and a content, both texts"
            if message["role"] not in _AFTER[before]:
                after = f"after {before}" if before else "at the beginning"
                return f"message {number} is of {message['role']}, and {after} comes {' or '.join(_AFTER[before])}"
            if mark := next((mark for mark in self._marks if mark in message["content"]), None):
                return f"message {number} has {mark}, which only the template may write"
            before = message["role"]
        return "" if before == "assistant" else f"ends with {before}, and not with the assistant's answer"

    def written(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[Range]]:
        """Return the text of `messages`, and where in it the assistant's are. Raises ValueError if that cannot be told."""
        whole, said = self._render(messages), list[Range]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:number], add_generation_prompt=True)
                until = self._render(messages[: number + 1])
                if not until.startswith(before) or not whole.startswith(until):
                    raise ValueError(f"message {number + 1}: the chat template writes messages otherwise once others follow")
                said.append((len(before), len(before) + self._length(until[len(before) :])))
        return whole, said

    def _length(self, turn: str) -> int:
        """Return how much of a turn is to be learned: not the space that follows the special token at its end."""
        text = turn.rstrip()
        return len(text) if text.endswith(tuple(self._marks)) else len(turn)

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._values)
        except (self._jinja.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template: {error}") from None
        return text

    def _compiled(self, source: str) -> Any:
        sandbox = needed("jinja2.sandbox").ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], keep_trailing_newline=True
        )
        sandbox.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, indent=how.get("indent"))
        sandbox.globals["raise_exception"] = self._refuse
        try:
            return sandbox.from_string(source)
        except self._jinja.TemplateError as error:
            raise TrainingError(f"{self.name}: is no template: {error}", place=f"{PLACE} --chat") from None

    def _refuse(self, message: str) -> NoReturn:
        raise self._jinja.TemplateError(message)


def counting(encoded: Encoded, ranges: Sequence[Range]) -> Any:
    """Return for each token whether one of its characters is in `ranges`."""
    counts = np.zeros(len(encoded.tokens), dtype=bool)
    for start, end in ranges:
        counts |= (encoded.starts < end) & (encoded.ends > start)
    return counts


def _source(encoder: Encoder, file: str | None, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the template's source, and what to call it."""
    if file is None:
        beside = Path(encoder.name).with_name("chat_template.jinja")
        if isinstance(settings.get("chat_template"), str):
            return settings["chat_template"], "tokenizer_config.json"
        return (beside.read_text(), beside.name) if beside.is_file() else (_BUILT_IN, "ChatML")
    try:
        text = Path(file).read_text()
        template = json.loads(text)["chat_template"] if file.endswith(".json") else text
    except (OSError, ValueError, KeyError) as error:
        raise TrainingError(f"{file}: has no chat template: {error}", place=f"{PLACE} --chat-template") from None
    if not isinstance(template, str):
        raise TrainingError(f"{file}: has several chat templates", place=f"{PLACE} --chat-template", hint="give one as a file of its own")
    return template, file


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token or "")
