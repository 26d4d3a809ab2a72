"""What `data prepare` is asked for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from swarmtrain.errors import TrainingError

PLACE = "data prepare"


@dataclass(frozen=True)
class Options:
    """The options of `data prepare`, but for the files."""

    prefix: str
    tokenizer: str
    """A tokenizer.json, or BYTES."""
    key: str | None = None
    """Where a record has its text, or its messages. None: text, or messages."""
    prompt_key: str | None = None
    completion_key: str | None = None
    chat: bool = False
    """Records are conversations."""
    chat_template: str | None = None
    """A tokenizer_config.json or a file of Jinja."""
    end_token: str | None = None
    """Text of the token after each document."""
    append_eos: bool = False
    """The token after each document is the tokenizer's own."""
    on_bad: str = "stop"
    """stop, skip (say each) or count."""
    workers: int = 0
    """Processes; 0: one a processor."""


BYTES = "bytes"


def needed(name: str) -> ModuleType:
    """Return the module `name`, which not every installation has. Raises TrainingError."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TrainingError(f"needs {name}, which is not installed", place=PLACE, hint="pip install 'swarmtrain[data]'") from None
