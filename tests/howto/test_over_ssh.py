"""The SSH page, with hosts behind real sshds."""

from __future__ import annotations

import sys
from pathlib import Path

import page
from conftest import OpenShell
from page_runner import PageRunner

sys.path.insert(0, str(page.ROOT / "tests" / "launchers"))

from ssh_hosts import HOST_NAMES, start_hosts  # lies in the folder of the launcher's tests


def test_over_ssh(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    with start_hosts() as hosts:
        env = {
            **installed_environment,
            **hosts.lab.build_client_environment(installed_environment),
            "PYTHONPATH": str(page.ROOT),
            "OMP_NUM_THREADS": "1",
        }
        PageRunner([open_shell(tmp_path, env)]).run_steps(page.read_page("docs/how-to/over-ssh.md"))
        assert {name: hosts.list_programs(name) for name in HOST_NAMES} == {name: [] for name in HOST_NAMES}
