"""Imported by the forkserver, once, so that every rank forked from it has these modules already.

The import has an effect, which is its purpose: the forkserver must die with the agent. Its ranks hold the pipe open
by which Python would tell it that nobody needs it any more, so it would outlive a killed agent, and they with it.
"""

from __future__ import annotations

import contextlib
import importlib

from swarmtrain.process import die_with_parent_now

die_with_parent_now()

for _module in ("torch", "torch.distributed", "swarmtrain.entrypoint.rank", "swarmtrain.trainer"):
    with contextlib.suppress(ImportError):  # the rank that needs it will say so, with the user's own traceback
        importlib.import_module(_module)
