"""The Slurm page, on a Slurm of three machines."""

from __future__ import annotations

import sys
from pathlib import Path

import page
from conftest import OpenShell
from page_runner import PageRunner

sys.path.insert(0, str(page.ROOT / "tests" / "launchers"))

from ssh_hosts import start_lab  # lies in the folder of the launcher's tests


def test_slurm(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    with start_lab(("n01", "n02", "n03"), part="slurm") as lab:
        env = {name: value for name, value in installed_environment.items() if not name.startswith("SLURM_")}
        env |= {**lab.build_client_environment(installed_environment), "PYTHONPATH": str(page.ROOT), "OMP_NUM_THREADS": "1"}
        PageRunner([open_shell(tmp_path, env)]).run_steps(page.read_page("docs/how-to/slurm.md"))
