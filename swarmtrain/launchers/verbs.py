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
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

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


def share(verb: str, question: Mapping[str, Any], ranks: int = 1) -> int:
    """Do `verb` on so many ranks of this machine, with its GPUs if it has any, and return the exit code: that of the first that failed.

    The first rank has the terminal; what another says is shown if the first was not at fault. Raises SwarmtrainError if torch is
    not here.
    """
    argv = _command(verb)
    if ranks == 1:
        process.become(argv, env=os.environ, stdin=_file(question))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **meeting}
    said = [None, *(tempfile.TemporaryFile() for _ in range(1, ranks))]  # noqa: SIM115  # gone with this process
    children = [
        process.start(
            argv, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdin=_file(question), stderr=mouth, die_with_parent=True
        )
        for rank, mouth in enumerate(said)
    ]
    failed = _first_that_fails(children)
    if failed is not None and (mouth := said[failed]) is not None:
        mouth.seek(0)
        sys.stderr.write(mouth.read().decode(errors="replace"))
    return 0 if failed is None else abs(children[failed].returncode)


def _first_that_fails(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Return the number of the first that fails, when all have ended; who waits for it is ended."""
    failed, end = None, math.inf
    while any(child.poll() is None for child in children):
        with contextlib.suppress(KeyboardInterrupt):  # theirs too, and for them to answer
            if failed is None and (found := [number for number, child in enumerate(children) if child.returncode]):
                failed, end = found[0], time.monotonic() + _FOLLOW_WITHIN
            for child in children if time.monotonic() > end else ():
                child.kill()
            time.sleep(_LOOK_EVERY)
    return next((number for number, child in enumerate(children) if child.returncode), None) if failed is None else failed


def _file(question: Mapping[str, Any]) -> IO[bytes]:
    """Return a file of `question`, to be read: a command line has no room for many prompts, and everybody can see it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115  # whoever is started has it
    file.write(json.dumps(question).encode())
    file.seek(0)
    return file


def _command(verb: str, needs: str = "torch") -> list[str]:
    if importlib.util.find_spec(needs) is None:
        raise SwarmtrainError(
            f"{sys.executable} cannot find {needs}, and this takes it",
            place="this machine",
            hint=f"pip install 'swarmtrain[{'train' if needs == 'torch' else 'data'}]'",
        )
    return [sys.executable, "-m", "swarmtrain.trainer", verb]
