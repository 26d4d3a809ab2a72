"""Options of `data tokenize`."""

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
    """Key of a record's text, or of its messages. None: "text", or "messages" for chat."""
    prompt_key: str | None = None
    completion_key: str | None = None
    chat: bool = False
    """Whether records are conversations."""
    chat_template: str | None = None
    """A tokenizer_config.json or a Jinja template file."""
    end_token: str | None = None
    """Text of the token appended to each document."""
    append_eos: bool = False
    """Whether to append the tokenizer's own end token to each document."""
    on_bad: str = "stop"
    """What to do with bad records: stop, skip (report each) or count."""
    workers: int = 0
    """Number of processes; 0: one per available CPU."""


BYTE_TOKENIZER = "bytes"


def import_optional(name: str) -> ModuleType:
    """Return the module `name`, an optional dependency. Raises TrainingError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TrainingError(f"needs {name}, which is not installed", place=ERROR_PLACE, hint="pip install 'swarmtrain[data]'") from None
