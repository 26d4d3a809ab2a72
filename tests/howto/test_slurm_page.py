"""The page on Slurm, on a Slurm of three machines."""

from __future__ import annotations

import sys
from pathlib import Path

import page
from conftest import OpenShell
from reader import Reader

sys.path.insert(0, str(page.ROOT / "tests" / "launchers"))

from hosts import machines  # lies beside the launcher's tests


def test_slurm(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    with machines(("n01", "n02", "n03"), part="slurm") as lab:
        env = {name: value for name, value in installed.items() if not name.startswith("SLURM_")}
        env |= {**lab.env(installed), "PYTHONPATH": str(page.ROOT), "OMP_NUM_THREADS": "1"}
        Reader([open_shell(tmp_path, env)]).follow(page.read("docs/how-to/slurm.md"))
