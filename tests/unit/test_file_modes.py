"""Files with the values of runner.env are readable by their owner only: users put tokens there."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.inventory import build_offline_inventory
from swarmtrain.launchers.common.local_run_folder import LocalRunFolder, LocalRunRecord
from swarmtrain.launchers.planner import read_inventory
from swarmtrain.launchers.slurm import SlurmLauncher
from swarmtrain.launchers.ssh import _build_run_files
from swarmtrain.launchers.ssh.run_index import SshRunRecord
from swarmtrain.plan import Plan, build_plan
from swarmtrain.remote.remote_agent import RemoteAgent

VALUE = "value-of-a-variable"


def build_demo_plan(**runner: Any) -> Plan:
    config = Config.from_json(json.dumps({"runner": {"env": {"NOTE": VALUE}, **runner}}))
    inventory = build_offline_inventory(config.runner.host_entries) if config.runner.hosts else read_inventory(config)
    return build_plan(config, inventory, Cargo((RunFile.from_content("training_code.py", b""),)), run="demo")


def list_modes_of_files_with_value(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file() and VALUE in path.read_text(encoding="utf-8")]
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}


def test_the_configs_of_a_local_run_are_private() -> None:
    folder = LocalRunFolder("demo")
    folder.save_deployment(build_demo_plan(runner_type="local"), LocalRunRecord())
    assert list_modes_of_files_with_value(folder.path) == {"deployed.json": 0o600, "config.json": 0o600}


def test_the_configs_and_scripts_of_a_slurm_run_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SlurmLauncher.write_deployment_file(build_demo_plan(runner_type="slurm"), tmp_path / "job.sbatch")
    modes = list_modes_of_files_with_value(tmp_path)
    assert modes == dict.fromkeys(("job.sbatch", "job.sh", "deployed.json", "config.json"), 0o600)


@pytest.mark.parametrize("runner_type", ["ssh", "ssh_docker"])
def test_the_files_of_a_run_over_ssh_are_private(runner_type: str, tmp_path: Path) -> None:
    plan = build_demo_plan(runner_type=runner_type, hosts=["a"], docker_config={"docker_container": "registry/train:1"})
    record = SshRunRecord({"a": "python3"}, {"node0": "a"}, "10.0.0.1", 20000, 20001, "/", 90.0)
    agent = RemoteAgent(tmp_path / "runs")
    agent.lock_run("demo", "test")
    agent.write_files("demo", _build_run_files(plan, record, b"key"))
    folder = tmp_path / "runs" / "demo"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    config_mode = 0o600 if runner_type == "ssh" else 0o644  # a container's user must be able to read it
    assert list_modes_of_files_with_value(folder) == {"deployed.json": 0o600, "config.json": config_mode}
    assert stat.S_IMODE((folder / "secrets" / "run-key").stat().st_mode) == 0o600
