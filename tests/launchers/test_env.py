"""`swarmtrain env` on three hosts behind real sshds: versions and backends are tested, and nothing is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ssh_hosts import HOST_NAMES, Hosts, start_hosts

from swarmtrain import __version__

pytestmark = pytest.mark.test_all_only("starts hosts behind sshds, and torch on each of them")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts() as hosts:
        yield hosts


def run_env(hosts: Hosts, folder: Path, *options: str, code: int = 0) -> str:
    """Return stdout of `swarmtrain env` for the three hosts."""
    (folder / "config.yml").write_text('runner: {runner_type: ssh, hosts: ["gpu-[0-2] slots=1"]}\n')
    env = {**os.environ, "PATH": f"{hosts.bin}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "swarmtrain", "env", "config.yml", *(word for option in options for word in ("-o", option))]
    completed = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert completed.returncode == code, completed.stdout + completed.stderr
    assert {name: hosts.list_programs(name) for name in HOST_NAMES} == {name: [] for name in HOST_NAMES}
    return completed.stdout


def test_versions_and_backends_are_tested(hosts: Hosts, tmp_path: Path) -> None:
    output = run_env(hosts, tmp_path, f"runner.python={sys.executable}")
    rows = [line.split() for line in output.splitlines()[1:4]]
    assert [row[0] for row in rows] == list(HOST_NAMES)
    assert {(row[3], row[4]) for row in rows} == {(__version__, "0")}
    assert all("gloo" in row[5] for row in rows)
    assert "gloo: all-reduce over 3 processes returned the correct sum 6" in output
    output = run_env(hosts, tmp_path, f"runner.python={sys.executable}", "runner.interface=nowhere0", code=1)
    assert "error: backend gloo: gpu-0: no interface nowhere0" in output


def test_commands_that_install_what_is_missing_are_printed(hosts: Hosts, tmp_path: Path) -> None:
    report = run_env(hosts, tmp_path, "runner.python=/usr/bin/python3", "runner.env={PYTHONPATH: /nowhere}", code=1)
    assert "error: host gpu-2: /usr/bin/python3: cannot import torch" in report
    assert "all-reduce" not in report
    assert "hint: run on that host: uv venv --allow-existing /opt/swarmtrain && uv pip install --python /opt/swarmtrain " in report
    assert f"'swarmtrain[train]=={__version__}' torch==" in report
    assert "; then set runner.python: /opt/swarmtrain/bin/python3" in report
    output = run_env(hosts, tmp_path, "runner.python=/opt/training/bin/python3", code=1)
    assert "/opt/training/bin/python3 is not on gpu-0, or run on that host: uv venv --allow-existing /opt/training && uv pip" in output
    assert "then set runner.python" not in output


def test_without_hosts_this_machine_is_checked(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (tmp_path / "project" / "config.yml").write_text("runner: {runner_type: ssh}\n")
    argv = [sys.executable, "-m", "swarmtrain", "env", "config.yml", "--json"]
    completed = subprocess.run(argv, cwd=tmp_path / "project", env=env, capture_output=True, text=True, check=False, timeout=240)
    report = json.loads(completed.stdout)
    assert report["ok"], completed.stderr
    assert report["backend"] == "gloo"
    assert [facts["swarmtrain"] for facts in report["hosts"].values()] == [__version__]
