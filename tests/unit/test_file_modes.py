"""Files with paths, arguments, environment values or keys of a run are readable by their owner only."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.atomic_file import create_private_folder
from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.launchers.common.container_logs import ContainerLogLine
from swarmtrain.launchers.common.history_store import RecordedRun, build_operation_event, resolve_run_folder
from swarmtrain.launchers.common.log_recorder import record_log_lines
from swarmtrain.launchers.planner import read_inventory
from swarmtrain.launchers.slurm import SlurmLauncher
from swarmtrain.launchers.ssh import _build_run_files
from swarmtrain.launchers.ssh.host_connections import StateDirectoryHost
from swarmtrain.launchers.ssh.run_index import RunRecord
from swarmtrain.planning.inventory import build_offline_inventory
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.remote.process_spec import ProcessSpec
from swarmtrain.remote.remote_agent import RemoteAgent
from swarmtrain.render.stack_document import render_stack, write_stack

VALUE = "value-of-a-variable"


def build_demo_plan(**runner: Any) -> Plan:
    config = Config.from_json(json.dumps({"runner": {"env": {"NOTE": VALUE}, **runner}}))
    inventory = build_offline_inventory(config.runner.host_entries) if config.runner.hosts else read_inventory(config)
    return build_plan(config, inventory, Cargo((RunFile.from_content("training_code.py", b""),)), run="demo")


def list_modes_of_files_with_value(folder: Path) -> dict[str, int]:
    files = [path for path in folder.rglob("*") if path.is_file() and VALUE in path.read_text(encoding="utf-8")]
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}


def write_local_run() -> None:
    """Write the files of a local run, without its processes."""
    host = StateDirectoryHost()
    host.call_agent("lock_run", run="demo", owner="test")
    host.call_agent("write_files", run="demo", files=_build_run_files(build_demo_plan(runner_type="local"), RunRecord(), b"key"))


def test_the_configs_of_a_local_run_are_private() -> None:
    write_local_run()
    assert list_modes_of_files_with_value(resolve_run_folder("demo")) == {"deployed.json": 0o600, "config.json": 0o600}


def list_readable_by_others(folder: Path) -> list[str]:
    """Return the files and folders below `folder` that another user could read if they could enter their parent folders."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if stat.S_IMODE(path.lstat().st_mode) & 0o077)


def record_a_run(run: RecordedRun) -> None:
    """Write every kind of file that a launcher records of a run."""
    run.save_config(build_demo_plan(runner_type="local").config)
    run.save_git_diff("diff")
    run.record_operation(build_operation_event("up"))
    run.save_summary({"step": 1})
    record_log_lines(run, [ContainerLogLine("node0", "2026-01-01T00:00:00.000000000Z", "task", "text")])


def test_the_records_of_a_run_are_private(isolated_state: Path) -> None:
    record_a_run(RecordedRun("demo", RunIdentity("id")))
    names = {path.name for path in (isolated_state / "swarmtrain/demo/history/id").iterdir()}
    assert names == {"config.json", "code.diff", "events.jsonl", "summary.json", "identity.json", "node0.log", "history.lock"}
    assert list_readable_by_others(isolated_state) == []


def test_the_folder_of_a_local_run_is_private(isolated_state: Path) -> None:
    write_local_run()
    # The folder of the run is private, so that others cannot reach the code and the ranks' own files in it.
    assert list_readable_by_others(isolated_state) == [f"swarmtrain/demo/{name}" for name in ("code", "code/training_code.py", "logs")]


def test_the_output_of_a_process_is_private(tmp_path: Path) -> None:
    spec = ProcessSpec("node0", ["sh", "-c", "echo out; echo err >&2"], {}, "/", str(tmp_path / "out"), str(tmp_path / "log"), "")
    spec.save(tmp_path / "node0.spec")
    subprocess.run([sys.executable, "-m", "swarmtrain.remote.process_keeper", str(tmp_path / "node0.spec")], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"node0.spec", "node0.state", "out", "log"}
    assert list_readable_by_others(tmp_path) == []


def test_a_folder_of_an_earlier_version_becomes_private(tmp_path: Path) -> None:
    for name, mode in (("earlier", 0o755), ("shared", 0o2775)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        create_private_folder(tmp_path / name)
    assert list_readable_by_others(tmp_path) == ["shared"]  # other users may write to it: its owner shares it on purpose


def test_a_stack_file_and_its_folder_are_private(tmp_path: Path) -> None:
    plan = build_demo_plan(runner_type="swarm", hosts=["a"], docker_config={"docker_container": "a/b:1"})
    write_stack(render_stack(plan), tmp_path / "stack.yml")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"stack.yml": 0o600, "generated": 0o700}


def test_the_configs_and_scripts_of_a_slurm_run_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SlurmLauncher.write_deployment_file(build_demo_plan(runner_type="slurm"), tmp_path / "job.sbatch")
    modes = list_modes_of_files_with_value(tmp_path)
    assert modes == dict.fromkeys(("job.sbatch", "job.sh", "deployed.json", "config.json"), 0o600)


@pytest.mark.parametrize("runner_type", ["ssh", "ssh_docker"])
def test_the_files_of_a_run_over_ssh_are_private(runner_type: str, tmp_path: Path) -> None:
    plan = build_demo_plan(runner_type=runner_type, hosts=["a"], docker_config={"docker_container": "registry/train:1"})
    record = RunRecord(interpreters={"a": "python3"}, nodes={"node0": "a"}, address="10.0.0.1", coordinator_port=20000, cwd="/")
    agent = RemoteAgent(tmp_path / "runs")
    agent.lock_run("demo", "test")
    agent.write_files("demo", _build_run_files(plan, record, b"key"))
    folder = tmp_path / "runs" / "demo"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    config_mode = 0o600 if runner_type == "ssh" else 0o644  # a container's user must be able to read it
    assert list_modes_of_files_with_value(folder) == {"deployed.json": 0o600, "config.json": config_mode}
    assert stat.S_IMODE((folder / "secrets" / "run-key").stat().st_mode) == 0o600
