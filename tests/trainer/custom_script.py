"""A custom training script, as started by torchrun. Its checkpoint is a file with a step number."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics

import swarmtrain.trainer

LAST_STEP, KILL_STEP, STATE_FILE = 20, 14, Path("saved")


def main() -> None:
    if "JOINS" in os.environ:
        dist.init_process_group("gloo")
    with swarmtrain.trainer.run(logger={"log_dir": "logs", "log_interval": 4, "use_csv": True, "log_ranks": [1]}) as run:
        initial_step = run.step
        if STATE_FILE.exists():
            run.step = int(STATE_FILE.read_text())
        hits = torchmetrics.classification.BinaryAccuracy()
        for step in range(run.step + 1, LAST_STEP + 1):
            value = 10 * step + run.rank
            hits.update(torch.tensor([1, run.rank]), torch.tensor([1, 1]))
            buffer = torch.tensor(float(value), requires_grad=True)
            run.log(
                loss=buffer,
                tokens=run.sum(value),
                least=run.min(torch.tensor(value)),
                most=run.max(value),
                final=run.last(value),
                each=run.cat(torch.tensor([value, -value])),
                accuracy=hits,
                found=initial_step,
            )
            buffer.data.zero_()  # the logged value must not change
            if step % 5 == 0:
                if run.rank == 0:
                    run.log(step=step, validation_loss=step / 2, nothing=float("nan"))
                if run.rank == 1:
                    run.log(step=step)
                STATE_FILE.write_text(str(step))
            if step == KILL_STEP and "KILL_STEP" in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if "STOP_STEP" in os.environ:
                if step == 3 and run.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if run.stop_requested:
                    STATE_FILE.write_text(str(step))
                    sys.exit(75)
    if "JOINS" in os.environ:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
