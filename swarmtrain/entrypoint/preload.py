"""Imported by the node's server, once, so that every agent and rank forked from it has these modules already.

The import has an effect, which is its purpose: the server must die with the supervisor. What is forked from it holds the
pipe open by which Python would tell it that nobody needs it any more, so it would outlive a killed supervisor.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

from swarmtrain.process import die_with_parent_now, rename
from swarmtrain.wire import NodeEnv

_TRAINER = re.compile(rb"\bswarmtrain(\.|\s+import\s.*\b)trainer\b|\btraining_code\b")

die_with_parent_now()
rename("torch is here")


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say nothing of a rank that was only being started when its agent ended, and found the agent's semaphores gone."""
    frames = traceback.extract_tb(trace)
    if not (isinstance(error, FileNotFoundError) and frames and "multiprocessing" in frames[-1].filename):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _tell


def _modules() -> tuple[str, ...]:
    """The trainer takes as long to import as torch: a script that does not know it is not made to wait."""
    always = "torch.distributed.launcher.api", "swarmtrain.entrypoint.agent"
    try:
        known = _TRAINER.search(Path(NodeEnv.from_env(os.environ).script).read_bytes())
    except OSError:
        known = None  # the rank says what is wrong with it
    return (*always, "swarmtrain.trainer") if known else always


for _module in _modules():
    with contextlib.suppress(ImportError):  # the rank that needs it will say so, with the user's own traceback
        _imported = importlib.import_module(_module)
        for _name in getattr(_imported, "__all__", ()):  # some import what they have when it is asked for
            getattr(_imported, _name)

# What is imported is never garbage, and to look through it would copy all of its pages in each process.
gc.freeze()
