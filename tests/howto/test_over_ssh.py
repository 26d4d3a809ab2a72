"""The page on SSH, with hosts behind real sshds."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import page
import pytest
from reader import Reader, Shell

from swarmtrain.errors import LabError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "launchers"))

from hosts import NAMES, Hosts  # noqa: E402  # lies beside the launcher's tests


def test_over_ssh(tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("sshd", path="/usr/sbin:/usr/bin"):
        assert os.environ.get("CI") != "true", "hosts need root and openssh-server"
        pytest.skip("hosts need root and openssh-server")
    (tmp_path / "hosts").mkdir()
    hosts = Hosts(tmp_path / "hosts")
    path = f"{hosts.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    folder = tmp_path / "project"
    folder.mkdir()
    try:
        hosts.up()
        shell = Shell(folder, tmp_path / "shell" / "transcript", env)
        try:
            Reader([shell]).follow(page.read("docs/how-to/over-ssh.md"))
        finally:
            shell.close()
        assert {name: hosts.programs(name) for name in NAMES} == {name: [] for name in NAMES}
    except LabError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"this machine can host no hosts: {error}")
    finally:
        hosts.down()
