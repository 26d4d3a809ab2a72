"""A plain DistributedDataParallel script with the five lines; tests stop and restart its worlds."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import swarmtrain.trainer

EPOCHS, SAMPLES, BATCH = 3, 44, 12


class SeenSteps:
    """A custom object that is saved in checkpoints: the steps it has seen."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "pair": (1, None), 3: torch.zeros(0)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["pair"] == (1, None), state
        assert state[3].shape == (0,), state  # type: ignore[call-overload]
        self.steps = state["steps"]  # type: ignore[assignment]


def main() -> None:
    kill_step, stop_step = int(os.environ.get("KILL_STEP", "0")), int(os.environ.get("STOP_STEP", "0"))
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 1, generator=generator))
    trainer = {"save_dir": "run", "save_interval": 4, "save_in_background": False}
    with swarmtrain.trainer.run(trainer=trainer, logger={"log_interval": 1}) as run:
        torch.manual_seed(1)
        dropped = nn.Dropout(0.25 if "DROPOUT" in os.environ else 0.0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), dropped, nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        seen_steps = SeenSteps()
        loader = DataLoader(data, batch_size=BATCH // run.world_size, shuffle=True)
        run.register_for_checkpointing(model=model, optimizer=optimizer, schedule=schedule, seen=seen_steps)
        with Path(f"seen-{run.rank}.jsonl").open("a") as file:
            for ids, inputs, targets in run.steps(loader, epochs=EPOCHS):
                loss = nn.functional.mse_loss(model(inputs), targets) * run.loss_weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                seen_steps.steps.append(run.step)
                run.log(loss=run.sum(loss.detach() / run.world_size), lr=schedule.get_last_lr()[0])
                # Batches of weight 0 only keep the ranks in step.
                file.write(json.dumps({"step": run.step, "epoch": run.epoch, "ids": ids.tolist() if run.loss_weight else []}) + "\n")
                file.flush()
                if run.step == stop_step and run.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                run.save_if_due()
                if run.step == kill_step and run.rank == run.world_size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.stop_requested:
                    run.save_and_exit()
        if run.rank == 0:
            assert seen_steps.steps == [*range(1, 13)], seen_steps.steps
            Path("weights.json").write_text(json.dumps([parameter.tolist() for parameter in model.parameters()]))
    sys.stdout.write("the end\n")


if __name__ == "__main__":
    main()
