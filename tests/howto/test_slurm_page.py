"""The page on Slurm, on a Slurm of three nodes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from reader import Reader

from swarmtrain.lab import slurm


def test_slurm(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    if (os.geteuid() or slurm.missing()) and os.environ.get("CI") != "true":
        pytest.skip("needs root, slurmctld, slurmd, munge and slurm-client")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short enough for a socket
    try:
        with slurm.cluster(folder) as conf:
            env = {name: value for name, value in installed.items() if not name.startswith("SLURM_")}
            shell = open_shell(tmp_path, {**env, "SLURM_CONF": str(conf), "PYTHONPATH": str(page.ROOT), "OMP_NUM_THREADS": "1"})
            Reader([shell]).follow(page.read("docs/how-to/slurm.md"))
    finally:
        shutil.rmtree(folder)
