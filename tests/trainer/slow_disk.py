"""training_code.py on a disk that is slow (SLOW: seconds) or full on rank 1 (FULL), from the second checkpoint on.

PACE is the minimum duration of a step and FIRST the minimum interval between `auto` checkpoints, both in seconds. The file
`memory` gets a line when the write of a part starts, with the resident bytes of the process, and one when it ends.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import training_code
from swarmtrain.trainer import Run
from swarmtrain.trainer.checkpoint import save_interval
from swarmtrain.trainer.checkpoint.storage.tensor_storage import TensorStorageWriter
from swarmtrain.trainer.data.samples import GlobalBatch


def main() -> None:
    original_write, forward_backward = TensorStorageWriter.write_staged_shards, Run.forward_backward

    def write(writer: TensorStorageWriter) -> dict[str, dict[str, Any]]:
        _write_note(f"begin {int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGESIZE')}")
        if "step-00000003" not in writer.folder.name:
            time.sleep(float(os.environ.get("SLOW", "0")))
            if os.environ.get("FULL") and os.environ["RANK"] == "1":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(writer.folder / writer.file_name))
        files = original_write(writer)
        _write_note("end")
        return files

    def run_slowly(run: Run, batch: GlobalBatch) -> Any:
        time.sleep(float(os.environ.get("PACE", "0")))
        return forward_backward(run, batch)

    save_interval.MIN_AUTO_INTERVAL_SECONDS = float(os.environ.get("FIRST", save_interval.MIN_AUTO_INTERVAL_SECONDS))
    TensorStorageWriter.write_staged_shards = write  # type: ignore[method-assign]
    Run.forward_backward = run_slowly  # type: ignore[method-assign]
    training_code.main()


def _write_note(line: str) -> None:
    with Path("memory").open("a") as file:
        file.write(line + "\n")
