"""training_code.py in a world whose rank 0 has another device type than the other ranks."""

from __future__ import annotations

import os

import torch

import training_code
from swarmtrain.trainer import runtime


def main() -> None:
    if os.environ["RANK"] == "0":
        runtime._select_device = lambda local_rank: torch.device("meta")  # type: ignore[assignment]
    training_code.main()
