"""Imported by the forkserver, once, so that every rank forked from it has these modules already.

The import has an effect, which is its purpose: the forkserver must die with the agent. Its ranks hold the pipe open
by which Python would tell it that nobody needs it any more, so it would outlive a killed agent, and they with it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from types import TracebackType

from swarmtrain.process import die_with_parent_now

die_with_parent_now()


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say nothing of a rank that was only being started when its agent ended, and found the agent's semaphores gone."""
    frames = traceback.extract_tb(trace)
    if not (isinstance(error, FileNotFoundError) and frames and "multiprocessing" in frames[-1].filename):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _tell

for _module in ("torch", "torch.distributed", "swarmtrain.entrypoint.rank", "swarmtrain.trainer"):
    with contextlib.suppress(ImportError):  # the rank that needs it will say so, with the user's own traceback
        importlib.import_module(_module)
