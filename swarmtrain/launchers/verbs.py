"""The trainer's verbs: what needs torch or numpy is asked of `python -m swarmtrain.trainer VERB`, here, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from swarmtrain import process
from swarmtrain.errors import SwarmtrainError

_LONGEST = 3600.0
# No GPU is wanted for it, and looking for one takes a second.
_QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def ask(verb: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of `verb`. Raises SwarmtrainError if torch is not here, or with the error that is the answer."""
    argv = _command(verb)
    answer: dict[str, Any] = json.loads(process.run(argv, env=_QUIET, input=json.dumps(question), timeout=_LONGEST))
    if "error" in answer:
        raise SwarmtrainError(answer["error"]["message"], place=answer["error"]["place"], hint=answer["error"]["hint"])
    return answer


def become(verb: str, what: str, options: Mapping[str, Any], names: Sequence[str] = (), *, needs: str = "numpy") -> NoReturn:
    """Go on as `verb what`, which has the terminal, and whose exit code is ours.

    Raises SwarmtrainError if the package that it `needs` is not here.
    """
    process.become([*_command(verb, needs), what, json.dumps(options), *names], env={**os.environ, **_QUIET})


def share(verb: str, options: Mapping[str, Any], ranks: int) -> NoReturn:
    """Go on as `verb` on so many ranks of this machine, with its GPUs if it has any. Raises SwarmtrainError if torch is not here."""
    python, *module = _command(verb)
    if ranks > 1:
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        # torchrun speaks of threads where nothing is said of them.
        process.become([python, *several, *module, json.dumps(options)], env={"OMP_NUM_THREADS": "1", **os.environ})
    process.become([python, *module, json.dumps(options)], env=os.environ)


def _command(verb: str, needs: str = "torch") -> list[str]:
    if importlib.util.find_spec(needs) is None:
        raise SwarmtrainError(
            f"{sys.executable} cannot find {needs}, and this takes it",
            place="this machine",
            hint=f"pip install 'swarmtrain[{'train' if needs == 'torch' else 'data'}]'",
        )
    return [sys.executable, "-m", "swarmtrain.trainer", verb]
