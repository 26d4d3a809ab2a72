"""training_code.py on a disk that takes its time from the second checkpoint on, or is full on rank 1: SLOW or FULL says which.

PACE is the seconds that each step takes at least, FIRST those between two checkpoints of `auto`. The file `memory` has a
line for each part that is begun, with the bytes that the process then has, and one for each that is written.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import training_code
from swarmtrain.trainer import loop
from swarmtrain.trainer.checkpoint import rhythm
from swarmtrain.trainer.checkpoint.storage import Writer


def main() -> None:
    sound, made = Writer.write, loop.make_step

    def write(writer: Writer) -> dict[str, dict[str, Any]]:
        _note(f"begin {int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGESIZE')}")
        if "step-00000003" not in writer.folder.name:
            time.sleep(float(os.environ.get("SLOW", "0")))
            if os.environ.get("FULL") and os.environ["RANK"] == "1":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(writer.folder / writer.name))
        files = sound(writer)
        _note("end")
        return files

    def paced(*args: Any, **options: Any) -> Any:
        time.sleep(float(os.environ.get("PACE", "0")))
        return made(*args, **options)

    rhythm.FIRST = float(os.environ.get("FIRST", rhythm.FIRST))
    Writer.write = write  # type: ignore[method-assign]
    loop.make_step = paced
    training_code.main()


def _note(line: str) -> None:
    with Path("memory").open("a") as file:
        file.write(line + "\n")
