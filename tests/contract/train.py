"""Counts steps until the file `enough` exists. Saves when a stop is requested, and resumes from there. A step takes 20 ms."""

import datetime
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from swarmtrain.protocol import Event
from swarmtrain.protocol.coordinator_client import CoordinatorClient

shared = Path("shared")
state, stop_file = (shared / f"{os.environ['SWARMTRAIN_RUN']}.{name}" for name in ("state", "enough"))
stop_requests = []
signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(1))
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
step = int(state.read_text()) if state.exists() else 0
secret = Path(os.environ["TOKEN_FILE"]).read_text()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts at {step}, its secret has {len(secret)} characters", flush=True)
while True:
    flag = torch.tensor([len(stop_requests), dist.get_rank() == 0 and stop_file.exists()])
    dist.all_reduce(flag)
    if flag[1]:
        break
    if flag[0]:
        if dist.get_rank() == 0:
            state.with_suffix(".new").write_text(str(step))
            state.with_suffix(".new").replace(state)
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if dist.get_rank() == 0 and step % 5 == 0:
        CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"]).post_event(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
