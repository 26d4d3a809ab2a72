"""Options of `swarmtrain data tokenize`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from swarmtrain.errors import TrainingError

ERROR_PLACE = "data tokenize"


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `data tokenize`, except the input files."""

    prefix: str
    tokenizer: str
    """Path of a tokenizer.json, or BYTE_TOKENIZER."""
    key: str | None = None
    """Key of a record's text or messages. None: "text", or "messages" for conversations."""
    prompt_key: str | None = None
    completion_key: str | None = None
    chat: bool = False
    """Whether records are conversations."""
    chat_template: str | None = None
    """Path of a tokenizer_config.json or a Jinja template file with the chat template; None: see ChatTemplate."""
    end_token: str | None = None
    """Text of the token that is appended to each document; None: see `append_eos`."""
    append_eos: bool = False
    """Whether to append the tokenizer's own end token to each document."""
    on_bad: str = "stop"
    """How to handle invalid records: stop, skip (and list them) or count (skip, and report their number)."""
    workers: int = 0
    """Number of worker processes; 0: one per available CPU."""


BYTE_TOKENIZER = "bytes"


def import_optional(name: str) -> ModuleType:
    """Import and return the optional dependency `name`. Raises TrainingError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TrainingError(f"needs {name}, which is not installed", place=ERROR_PLACE, hint="pip install 'swarmtrain[data]'") from None
