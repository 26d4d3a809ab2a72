"""Module that the node's forkserver preloads once, so that every agent and rank forked from it has torch imported already.

The import has an intended side effect: it makes the forkserver die with the supervisor. Otherwise the forkserver would outlive a killed
supervisor: it exits when a pipe to the supervisor closes, but processes forked from it keep this pipe open.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from pathlib import Path

from swarmtrain.process import set_parent_death_signal, set_process_name
from swarmtrain.protocol import NodeEnv

_TRAINER_IMPORT_PATTERN = re.compile(rb"\bswarmtrain(\.|\s+import\s.*\b)trainer\b|\btraining_code\b")

set_parent_death_signal()
set_process_name("torch-preloaded")


def _list_modules_to_preload() -> tuple[str, ...]:
    """Return the modules to preload. The trainer takes as long to import as torch, so it is included only if the script uses it."""
    base_modules = "swarmtrain.entrypoint.supervisor.rank_agent", "swarmtrain.entrypoint.supervisor.rendezvous_handler"
    try:
        trainer_import = _TRAINER_IMPORT_PATTERN.search(Path(NodeEnv.from_env(os.environ).script).read_bytes())
    except OSError:
        trainer_import = None  # the rank reports the error in it
    return (*base_modules, "swarmtrain.trainer") if trainer_import else base_modules


for _module in _list_modules_to_preload():
    with contextlib.suppress(ImportError):  # the rank that imports it reports the error, with a traceback of the user's script
        _imported = importlib.import_module(_module)
        for _name in getattr(_imported, "__all__", ()):  # some packages import lazily
            getattr(_imported, _name)

# Imported objects are never garbage, and scanning them would copy their memory pages in each process.
gc.freeze()
