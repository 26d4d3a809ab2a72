"""Plain PyTorch training loop with swarmtrain's model: fused AdamW, gradient clipping, and DistributedDataParallel for several ranks."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.loops.step_control import StepControl
from benchmarks.loops.token_data import open_token_windows
from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.trainer import Transformer


def main() -> None:
    config = Config.from_json(sys.argv[1])
    architecture, step_control = config.transformer_architecture, StepControl()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    model: torch.nn.Module = Transformer(architecture, config.trainer.seed).init_weights()
    if size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    samples, generator = open_token_windows(config.data.data_prefixes[0], architecture.sequence_length), np.random.default_rng(rank)
    while True:
        step_control.step()
        batch = torch.from_numpy(samples[generator.integers(len(samples), size=config.topology.samples_per_step // size)].astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=architecture.precision is Precision.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()


if __name__ == "__main__":
    main()
