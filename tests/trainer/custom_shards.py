"""A custom script in which each rank reads its own shard; shards have unequal lengths. A stop can be requested at a step (STOP_STEP)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import swarmtrain.trainer

SHARD_LENGTHS = 5, 2, 4
"""Number of batches in each rank's shard."""
EPOCHS = 2


class Shard:
    """The shard that rank `rank` reads."""

    def __init__(self, rank: int, length: int) -> None:
        self._rank, self._length = rank, length

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for number in range(self._length):
            changed = 0.1 * torch.randn(3, 4) if "AUGMENTED" in os.environ else 0
            yield 10 * self._rank + number, build_batch(self._rank, number) + changed


def build_batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + number))


def main() -> None:
    stop_step, lengths = int(os.environ.get("STOP_STEP", "0")), json.loads(os.environ.get("LENGTHS", json.dumps(SHARD_LENGTHS)))
    with swarmtrain.trainer.run(trainer={"save_dir": "run", "save_interval": None}, logger={"log_interval": 1}) as run:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.register_for_checkpointing(model=model, optimizer=optimizer)
        with Path(f"seen-{run.rank}.jsonl").open("a") as file:
            for batch_id, inputs in run.steps(Shard(run.rank, lengths[run.rank]), epochs=EPOCHS):
                loss = (model(inputs) - 1).square().mean() * run.loss_weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=run.sum(loss.detach() / run.world_size))
                file.write(json.dumps({"step": run.step, "epoch": run.epoch, "name": batch_id, "weight": run.loss_weight}) + "\n")
                file.flush()
                if run.step == stop_step and run.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                run.save_if_due()
                if run.stop_requested:
                    run.save_and_exit()
        if run.rank == 0:
            Path("weights.json").write_text(json.dumps([parameter.tolist() for parameter in model.parameters()]))


if __name__ == "__main__":
    main()
