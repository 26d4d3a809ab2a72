"""training_code.py on a disk that takes its time from the second checkpoint on, or is full on rank 1: SLOW or FULL says which."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import training_code
from swarmtrain.trainer.checkpoint.storage import Writer


def main() -> None:
    sound = Writer.write

    def write(writer: Writer) -> dict[str, dict[str, Any]]:
        if "step-00000003" not in writer.folder.name:
            time.sleep(float(os.environ.get("SLOW", "0")))
            if os.environ.get("FULL") and os.environ["RANK"] == "1":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(writer.folder / writer.name))
        return sound(writer)

    Writer.write = write  # type: ignore[method-assign]
    training_code.main()
