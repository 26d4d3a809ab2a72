"""Plain PyTorch training loop with swarmtrain's model; with DistributedDataParallel for several ranks."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.loops.step_control import StepControl
from benchmarks.loops.token_data import open_token_windows
from swarmtrain.config import Config
from swarmtrain.trainer.speed.plain_loop import build_plain_step


def main() -> None:
    config, step_control = Config.from_json(sys.argv[1]), StepControl()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    if size > 1:
        dist.init_process_group("gloo")
    samples = open_token_windows(config.data.data_prefixes[0], config.transformer_architecture.sequence_length)
    generator, batch_size = np.random.default_rng(rank), config.topology.samples_per_step // size

    def load_batch() -> torch.Tensor:
        return torch.from_numpy(samples[generator.integers(len(samples), size=batch_size)].astype(np.int64))

    run_step = build_plain_step(config, torch.device("cpu"), load_batch)
    while True:
        step_control.step()
        run_step()


if __name__ == "__main__":
    main()
