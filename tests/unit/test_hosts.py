"""Host and environment files of pdsh, MPI and DeepSpeed users, and a plan made from them as `docker create`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.external_inputs import resolve_external_inputs
from swarmtrain.errors import ConfigError
from swarmtrain.launchers.ssh.process_specs import HostContext, build_process_specs
from swarmtrain.launchers.ssh.run_index import RunRecord
from swarmtrain.planning.inventory import build_offline_inventory
from swarmtrain.planning.plan import build_plan
from swarmtrain.protocol import RENDEZVOUS_SERVICE


def build_ssh_config(**runner: object) -> Config:
    return Config.from_json(json.dumps({"runner": {"runner_type": "ssh", **runner}}))


@pytest.mark.parametrize(
    ("written", "hosts"),
    [
        (["gpu-[08-10] slots=4"], ("gpu-08 slots=4", "gpu-09 slots=4", "gpu-10 slots=4")),
        (["n[1,3-4]"], ("n1", "n3", "n4")),
        (["r[1-2]-n[1-2] slots=0,2"], tuple(f"r{rack}-n{node} slots=0,2" for rack in (1, 2) for node in (1, 2))),
        (["plain", "n[7]"], ("plain", "n7")),
    ],
)
def test_ranges_are_expanded(written: list[str], hosts: tuple[str, ...]) -> None:
    assert build_ssh_config(hosts=written).runner.hosts == hosts


@pytest.mark.parametrize(
    "written",
    ["n[3-1]", "n[]", "n[a-b]", "n[1-99999999]", "n[1", "n[1]]", "n[1-10001]", "n[1-5000,1-5001]", "n[1-999]x[1-999]", "n[1-101]x[1-100]"],
)
def test_an_invalid_range_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"hosts"):
        build_ssh_config(hosts=[written])


def test_ranges_of_several_entries_have_the_limit_of_one() -> None:
    with pytest.raises(ValueError, match=r"the ranges of runner.hosts may stand for at most 10000 hosts"):
        build_ssh_config(hosts=["n[1-5000]", "m[1-5001]"])
    hosts = build_ssh_config(hosts=["n[1-100]x[1-99]", "m[1-100]"], runner_type="ssh").runner.hosts
    assert len(hosts or ()) == 10_000


def test_the_longest_variables_and_arguments_can_start_a_process() -> None:
    """The limits are those of the kernel: one byte more is refused, by the kernel and by the config."""
    runner = build_ssh_config(env={"LONG": "x" * 131_066}, script_args=["x" * 131_071]).runner
    subprocess.run(["/bin/true", *runner.script_args], env=dict(runner.env), check=True)
    for argv, env in ((["/bin/true", "x" * 131_072], {}), (["/bin/true"], {"LONG": "x" * 131_067})):
        with pytest.raises(OSError, match="Argument list too long"):
            subprocess.run(argv, env=env, check=True)


def test_files_and_prefixes_become_part_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# ours\n\ngpu-[1-2] slots=4  # new\ngpu-7 slots=0,2\n")
    (tmp_path / ".deepspeed_env").write_text("# theirs\nNCCL_DEBUG=INFO\nexport PLAIN='two words'\nHASH=a#b\nEMPTY=\n")
    shell = {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring", "PYTHONPATH": "/code", "HOME": "/root", "UCX_TLS": "tcp"}
    given = build_ssh_config(hostsfile="hosts", env_file=".deepspeed_env", env={"EMPTY": "no"})
    runner = resolve_external_inputs(given, tmp_path, shell).runner
    assert runner.hosts == ("gpu-1 slots=4", "gpu-2 slots=4", "gpu-7 slots=0,2")
    assert runner.env == {
        "NCCL_DEBUG": "INFO",
        "NCCL_ALGO": "Ring",
        "PYTHONPATH": "/code",
        "UCX_TLS": "tcp",
        "PLAIN": "two words",
        "HASH": "a#b",
        "EMPTY": "no",
    }
    again = given.model_copy(update={"runner": runner})
    assert resolve_external_inputs(again, Path("/nonexistent"), {"NCCL_LATER": "1"}) == again
    in_container = given.model_copy(update={"runner": given.runner.model_copy(update={"runner_type": "ssh_docker"})})
    assert "PYTHONPATH" not in resolve_external_inputs(in_container, tmp_path, shell).runner.env


@pytest.mark.parametrize(
    ("runner", "file", "problem"),
    [
        ({"hostsfile": "nowhere"}, "", r"runner.hostsfile: .*nowhere: no such file"),
        ({"hostsfile": "file"}, "gpu 1\n", r"runner.hosts.0: 'gpu 1' is not a valid host"),
        ({"hostsfile": "file"}, "a\na\n", r"runner.hosts: names a more than once"),
        ({"env_file": "file"}, "SECRET words\n", r"runner.env_file: 'SECRET words': expected NAME=VALUE"),
        ({"env_file": "file"}, "SWARMTRAIN_RUN=x\n", r"runner.env.*SWARMTRAIN_ are reserved"),
    ],
)
def test_errors_in_such_files_are_reported(runner: dict[str, str], file: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(file)
    with pytest.raises(ConfigError, match=problem):
        resolve_external_inputs(build_ssh_config(**runner), tmp_path, {})


def test_hosts_are_listed_in_one_place() -> None:
    with pytest.raises(ValueError, match="cannot be combined with hosts in the config"):
        build_ssh_config(hosts=["a"], hostsfile="hosts")


def test_a_container_gets_what_it_needs_and_no_value_is_in_its_command_line() -> None:
    docker: dict[str, object] = {
        "docker_container": "registry/train:1",
        "docker_mounts": [["/data", "/data"], ["nas", "/nas"]],
        "docker_sudo": True,
        "cpus": 8.0,
    }
    docker["volumes"] = {"nas": {"type": "nfs", "o": "addr=nas,rw", "device": ":/export"}}
    given = build_ssh_config(runner_type="ssh_docker", hosts=["a slots=0,2", "b slots=1"], env={"TOLD": "quietly"}, docker_config=docker)
    cargo = Cargo((RunFile.from_content("training_code.py", b""),), (RunFile.from_content("TOKEN", b"hush"),))
    plan = build_plan(given, build_offline_inventory(given.runner.host_entries), cargo, run="demo")
    record = RunRecord(
        interpreters={"a": "python3", "b": "python3"},
        nodes={"node0": "a", "node1": "b"},
        address="10.0.0.1",
        coordinator_port=20000,
        cwd="/",
    )
    folder = PurePosixPath("/state/demo")
    there = {name: HostContext(folder, folder, "/", gpus, "1000:1000") for name, gpus in (("a", 4), ("b", 0))}
    found = {spec.name: spec for some in build_process_specs(plan, record, there).values() for spec in some}
    node = found["node0"]
    variables = sorted(node.env)
    options = [word for word in node.prepare_command if word not in variables and word != "--env"]
    assert options == [
        *("sudo", "-n", f"--preserve-env={','.join(node.env)}", "docker", "create", "--rm", "--name", "demo-node0"),
        *("--network", "host", "--ipc", "host", "--user", "1000:1000", "--gpus", '"device=0,2"', "--cpus", "8.0"),
        *("--volume", "/data:/data", "--mount"),
        'type=volume,source=nas,target=/nas,volume-opt=type=nfs,"volume-opt=o=addr=nas,rw",volume-opt=device=:/export',
        *("--volume", "/state/demo/secrets/run-key:/run/secrets/run-key:ro"),
        *("--volume", "/state/demo/config.json:/etc/swarmtrain/config.json:ro"),
        *("--volume", "/state/demo/secrets/TOKEN:/run/secrets/TOKEN:ro"),
        *("--volume", "/state/demo/code/training_code.py:/workspace/training_code.py:ro"),
        *("--label", "swarmtrain.run=demo"),
        *("--entrypoint", "python3", "registry/train:1", "-u", "-m", "swarmtrain.entrypoint", "node"),
    ]
    assert (node.env["TOLD"], node.env["HOME"]) == ("quietly", "/tmp")
    assert not [word for word in node.prepare_command if "quietly" in word or "hush" in word]
    assert node.argv == ["sudo", "-n", "docker", "start", "--attach", "demo-node0"]
    assert node.cleanup_command == ["sudo", "-n", "docker", "rm", "--force", "demo-node0"]
    assert "--gpus" not in found["node1"].prepare_command
    assert found[RENDEZVOUS_SERVICE].env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert [word for word in found[RENDEZVOUS_SERVICE].prepare_command if word.startswith("/state")] == [
        "/state/demo/secrets/run-key:/run/secrets/run-key:ro"
    ]
    many_files = tuple(RunFile.from_content(f"src/file{index}.py", b"") for index in range(100))
    plan = build_plan(given, build_offline_inventory(given.runner.host_entries), Cargo((*cargo.code, *many_files)), run="demo")
    volumes = [word for word in build_process_specs(plan, record, there)["b"][0].prepare_command if word.startswith("/state")]
    assert volumes == [
        "/state/demo/secrets/run-key:/run/secrets/run-key:ro",
        "/state/demo/config.json:/etc/swarmtrain/config.json:ro",
        "/state/demo/code:/workspace",
    ]
    privileged = given.runner.docker_config.model_copy(update={"privileged": True})
    runner = given.runner.model_copy(update={"docker_config": privileged})
    plan = build_plan(given.model_copy(update={"runner": runner}), build_offline_inventory(given.runner.host_entries), cargo, run="demo")
    assert "--privileged" in build_process_specs(plan, record, there)["b"][0].prepare_command
    assert "--privileged" not in node.prepare_command
