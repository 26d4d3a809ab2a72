"""A plain script over DistributedDataParallel with the five lines; tests start it in worlds that end and begin again."""

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


class Seen:
    """An object of one's own that is kept: what it was shown."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, object]:
        return {"steps": self.steps, "pair": (1, None), 3: torch.zeros(0)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["pair"] == (1, None), state
        assert state[3].shape == (0,), state  # type: ignore[call-overload]
        self.steps = state["steps"]  # type: ignore[assignment]


def main() -> None:
    dies, leaves = int(os.environ.get("DIES", "0")), int(os.environ.get("LEAVES", "0"))
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 1, generator=generator))
    trainer = {"save_dir": "run", "save_interval": 4, "save_in_background": False}
    with swarmtrain.trainer.run(trainer=trainer, logger={"log_interval": 1}) as run:
        torch.manual_seed(1)
        dropped = nn.Dropout(0.25 if "DROPOUT" in os.environ else 0.0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), dropped, nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        seen = Seen()
        loader = DataLoader(data, batch_size=BATCH // run.size, shuffle=True)
        run.keep(model=model, optimizer=optimizer, schedule=schedule, seen=seen)
        with Path(f"seen-{run.rank}.jsonl").open("a") as file:
            for ids, inputs, wanted in run.steps(loader, epochs=EPOCHS):
                loss = nn.functional.mse_loss(model(inputs), wanted) * run.weight
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                seen.steps.append(run.step)
                run.log(loss=run.sum(loss.detach() / run.size), lr=schedule.get_last_lr()[0])
                # What weighs nothing is there to keep the ranks together.
                file.write(json.dumps({"step": run.step, "epoch": run.epoch, "ids": ids.tolist() if run.weight else []}) + "\n")
                file.flush()
                if run.step == leaves and run.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                run.save_if_due()
                if run.step == dies and run.rank == run.size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if run.asked_to_leave:
                    run.leave()
        if run.rank == 0:
            assert seen.steps == [*range(1, 13)], seen.steps
            Path("weights.json").write_text(json.dumps([parameter.tolist() for parameter in model.parameters()]))
    sys.stdout.write("the end\n")


if __name__ == "__main__":
    main()
