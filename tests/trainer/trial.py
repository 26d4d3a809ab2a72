"""training_code.py as a trial of Determined: off its cluster, or, where DET_MASTER names one, with a master."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(sys.prefix) / "determined"))  # where the Makefile has put it

import determined as det
from determined import core

import training_code


class Told(core.DummyPreemptContext):
    """Determined's own off-cluster context, which is told to make room by a file."""

    def should_preempt(self, auto_ack: bool = True) -> bool:
        return super().should_preempt(auto_ack) or Path("make-room").exists()

    def acknowledge_preemption_signal(self) -> None:
        Path("acknowledged").touch()


def main() -> None:
    if "DET_MASTER" in os.environ:
        det._info._info = cluster()
    else:
        core.DummyPreemptContext = Told
    training_code.main()


def cluster() -> det.ClusterInfo:
    """Return what Determined leaves in /run/determined/info for a trial's container."""
    told = {"checkpoint_storage": {"type": "directory", "container_path": str(Path.cwd())}}
    trial = det.TrialInfo(7, 3, 0, {}, told, 0, 1, False, None)
    place = det.RendezvousInfo(["127.0.0.1"], 0, [2])
    master, token, allocation = (os.environ[f"DET_{name}"] for name in ("MASTER", "SESSION_TOKEN", "ALLOCATION_ID"))
    return det.ClusterInfo(master, "c", "a", [0, 1], "t", allocation, token, "TRIAL", trial_info=trial, rendezvous_info=place)
