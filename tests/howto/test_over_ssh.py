"""The page on SSH, with hosts behind real sshds."""

from __future__ import annotations

import sys
from pathlib import Path

import page
from conftest import OpenShell
from reader import Reader

sys.path.insert(0, str(page.ROOT / "tests" / "launchers"))

from hosts import NAMES, hosts_up  # lies beside the launcher's tests


def test_over_ssh(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    with hosts_up() as hosts:
        env = {**installed, **hosts.lab.env(installed), "PYTHONPATH": str(page.ROOT), "OMP_NUM_THREADS": "1"}
        Reader([open_shell(tmp_path, env)]).follow(page.read("docs/how-to/over-ssh.md"))
        assert {name: hosts.programs(name) for name in NAMES} == {name: [] for name in NAMES}
