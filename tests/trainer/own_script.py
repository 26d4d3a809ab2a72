"""A training script of a user's own, as torchrun starts it: its checkpoint is a file with a step's number."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics

import swarmtrain.trainer

LAST, KILLED_AT, SAVED = 20, 14, Path("saved")


def main() -> None:
    if "JOINS" in os.environ:
        dist.init_process_group("gloo")
    with swarmtrain.trainer.run(logger={"log_dir": "logs", "log_interval": 4, "use_csv": True, "log_ranks": [1]}) as run:
        found = run.step
        if SAVED.exists():
            run.step = int(SAVED.read_text())
        hits = torchmetrics.classification.BinaryAccuracy()
        for step in range(run.step + 1, LAST + 1):
            mine = 10 * step + run.rank
            hits.update(torch.tensor([1, run.rank]), torch.tensor([1, 1]))
            buffer = torch.tensor(float(mine), requires_grad=True)
            run.log(
                loss=buffer,
                tokens=run.sum(mine),
                least=run.min(torch.tensor(mine)),
                most=run.max(mine),
                final=run.last(mine),
                each=run.cat(torch.tensor([mine, -mine])),
                accuracy=hits,
                found=found,
            )
            buffer.data.zero_()  # it was logged as it was
            if step % 5 == 0:
                if run.rank == 0:
                    run.log(step=step, validation_loss=step / 2, nothing=float("nan"))
                if run.rank == 1:
                    run.log(step=step)
                SAVED.write_text(str(step))
            if step == KILLED_AT and "DIES" in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if "LEAVES" in os.environ:
                if step == 3 and run.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if run.asked_to_leave:
                    SAVED.write_text(str(step))
                    sys.exit(75)
    if "JOINS" in os.environ:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
