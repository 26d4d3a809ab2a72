"""The trainer's verbs: what needs torch is asked of `python -m swarmtrain.trainer VERB`, on this machine, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from swarmtrain import process
from swarmtrain.errors import SwarmtrainError

_LONGEST = 3600.0


def ask(verb: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of `verb`. Raises SwarmtrainError if torch is not here, or with the error that is the answer."""
    if importlib.util.find_spec("torch") is None:
        raise SwarmtrainError(
            f"{sys.executable} cannot find torch, and this takes it",
            place="this machine",
            hint="pip install 'swarmtrain[train]'",
        )
    # No GPU is wanted for it, and looking for one takes a second.
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "swarmtrain.trainer", verb]
    answer: dict[str, Any] = json.loads(process.run(argv, env=quiet, input=json.dumps(question), timeout=_LONGEST))
    if "error" in answer:
        raise SwarmtrainError(answer["error"]["message"], place=answer["error"]["place"], hint=answer["error"]["hint"])
    return answer
