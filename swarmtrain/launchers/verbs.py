"""The trainer's verbs: what needs torch or numpy is asked of `python -m swarmtrain.trainer VERB`, here, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from swarmtrain import process
from swarmtrain.errors import SwarmtrainError

_LONGEST = 3600.0
_FOLLOW_WITHIN, _LOOK_EVERY = 5.0, 0.05
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


def share(verb: str, options: Mapping[str, Any], ranks: int) -> int:
    """Do `verb` on so many ranks of this machine, with its GPUs if it has any, and return the exit code: that of the first that failed.

    Raises SwarmtrainError if torch is not here.
    """
    argv = [*_command(verb), json.dumps(options)]
    if ranks == 1:
        process.become(argv, env=os.environ)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    places = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
    return _together([process.start(argv, env={**threads, **meeting, **place}, die_with_parent=True) for place in places])


def _together(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return when all have ended. What is wrong is wrong for all of them; who waits for one that died otherwise is ended."""
    failed, end = 0, math.inf
    while any(child.poll() is None for child in children):
        with contextlib.suppress(KeyboardInterrupt):  # theirs too, and for them to answer
            failed = failed or next((child.returncode for child in children if child.returncode), 0)
            end = min(end, time.monotonic() + _FOLLOW_WITHIN) if failed else end
            for child in children if time.monotonic() > end else ():
                child.kill()
            time.sleep(_LOOK_EVERY)
    return next((abs(child.returncode) for child in children if child.returncode), 0) if not failed else abs(failed)


def _command(verb: str, needs: str = "torch") -> list[str]:
    if importlib.util.find_spec(needs) is None:
        raise SwarmtrainError(
            f"{sys.executable} cannot find {needs}, and this takes it",
            place="this machine",
            hint=f"pip install 'swarmtrain[{'train' if needs == 'torch' else 'data'}]'",
        )
    return [sys.executable, "-m", "swarmtrain.trainer", verb]
