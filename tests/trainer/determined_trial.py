"""training_code.py as a Determined trial: off-cluster, or with a master if DET_MASTER names one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(sys.prefix) / "determined"))  # where the Makefile installs it

import determined as det
from determined import core

import training_code


class FilePreemptContext(core.DummyPreemptContext):
    """Determined's off-cluster preemption context; the file `make-room` requests preemption."""

    def should_preempt(self, auto_ack: bool = True) -> bool:
        return super().should_preempt(auto_ack) or Path("make-room").exists()

    def acknowledge_preemption_signal(self) -> None:
        Path("acknowledged").touch()


def main() -> None:
    if "DET_MASTER" in os.environ:
        det._info._info = build_cluster_info()
    else:
        core.DummyPreemptContext = FilePreemptContext
    training_code.main()


def build_cluster_info() -> det.ClusterInfo:
    """Return what Determined writes to /run/determined/info for a trial's container."""
    experiment_config = {"checkpoint_storage": {"type": "directory", "container_path": str(Path.cwd())}}
    trial = det.TrialInfo(7, 3, 0, {}, experiment_config, 0, 1, False, None)
    rendezvous = det.RendezvousInfo(["127.0.0.1"], 0, [2])
    master, token, allocation = (os.environ[f"DET_{name}"] for name in ("MASTER", "SESSION_TOKEN", "ALLOCATION_ID"))
    return det.ClusterInfo(master, "c", "a", [0, 1], "t", allocation, token, "TRIAL", trial_info=trial, rendezvous_info=rendezvous)
