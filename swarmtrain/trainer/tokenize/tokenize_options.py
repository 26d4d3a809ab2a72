"""Options of `swarmtrain data tokenize`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from swarmtrain.errors import TrainingError

ERROR_PLACE = "data tokenize"


@dataclass(frozen=True)
class TokenizeOptions:
    """Options of `swarmtrain data tokenize`, except the input files."""

    prefix: str
    tokenizer: str
    """Path of a tokenizer.json or of its folder, or BYTE_TOKENIZER."""
    key: str | None = None
    """Key of the text or the messages of each record. None: "text"; for conversations, the keys of their layouts."""
    prompt_key: str | None = None
    completion_key: str | None = None
    chat: bool = False
    """Whether records are conversations."""
    chat_template: str | None = None
    """Path of a tokenizer_config.json with a chat template, or of a Jinja template. None: the tokenizer's own template, or ChatML."""
    eos_token: str | None = None
    """Text of the special token that is appended to each document; None: `append_eos` decides."""
    append_eos: bool = False
    """Whether to append the tokenizer's own EOS token to each document."""
    special_tokens: bool = True
    """Whether to add the tokens with which the tokenizer begins and ends a text, such as BOS."""
    split_special_tokens: bool = False
    """Whether the text of a special token in a text is encoded as ordinary characters."""
    on_bad: str = "stop"
    """How to handle invalid records: "stop" with an error, "skip" and list them, or "count" (skip, and report their number)."""
    workers: int = 0
    """Number of worker processes; 0: one per available CPU."""


BYTE_TOKENIZER = "bytes"


def import_optional_dependency(name: str) -> ModuleType:
    """Import and return the optional dependency `name`. Raises TrainingError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TrainingError(f"needs {name}, which is not installed", place=ERROR_PLACE, hint="pip install 'swarmtrain[data]'") from None
