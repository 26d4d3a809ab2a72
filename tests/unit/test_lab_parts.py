"""The parts of the lab that need no lab: names, subnets, rates, paths, and how a process is identified."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.errors import LabError
from swarmtrain.lab import Lab, base_image, cpu_share, network, prerequisites, state


def test_a_lab_keeps_its_subnet_unless_that_is_taken() -> None:
    first = state.choose_subnet("lab", [])
    assert state.choose_subnet("lab", []) == first
    assert state.choose_subnet("lab", ["10.0.0.0/16", "192.168.1.1"]) == first
    second = state.choose_subnet("lab", [first])
    assert second != first
    assert second.startswith("10.77.")
    assert state.choose_subnet("lab", [f"{first.split('/')[0]}"]) == second, "a route to one address takes its whole network"


def test_no_free_subnet_is_an_error() -> None:
    with pytest.raises(LabError, match=r"10\.77\.0\.0/16"):
        state.choose_subnet("lab", ["10.0.0.0/8"])


def test_addresses_do_not_collide() -> None:
    nodes = tuple(f"node{index}" for index in range(state.MAX_NODES))
    lab = state.LabDescription("lab", "10.77.3.0/24", nodes, "/srv/shared")
    addresses = {lab.get_node_address(node) for node in nodes} | {lab.bridge_address}
    assert lab.get_node_address("node0") == "10.77.3.10"
    assert len(addresses) == state.MAX_NODES + 1
    assert all(address.startswith("10.77.3.") for address in addresses)


@pytest.mark.parametrize("name", ["", "Lab", "a/b", "..", "-a", "a" * 31, "a b", "ü"])
def test_names_that_cannot_be_part_of_a_path_are_refused(name: str) -> None:
    with pytest.raises(LabError, match="is not a valid lab name"):
        Lab(name)


@pytest.mark.parametrize("directory", ["/mnt/disk/lab", "/run/lab"])
def test_a_directory_that_machines_cannot_see_is_refused(directory: str) -> None:
    with pytest.raises(LabError, match="have their own"):
        state.check_lab_folder(Path(directory))


def test_a_socket_path_that_the_kernel_would_refuse_is_refused_first() -> None:
    state.check_lab_folder(Path("/srv/" + "x" * 80))
    with pytest.raises(LabError, match="107 bytes"):
        state.check_lab_folder(Path("/srv/" + "x" * 90))


def test_rates() -> None:
    assert network.parse_rate("1gbit") == 1e9
    assert network.parse_rate("2.5mbit") == 2.5e6
    for wrong in ("1", "gbit", "1 gbit", "1GB", "0mbit", "-1mbit"):
        with pytest.raises(LabError, match="is not a valid rate"):
            network.parse_rate(wrong)


def test_a_reused_pid_is_not_taken_for_ours(tmp_path: Path) -> None:
    own = Path("/proc/self/stat").read_text()
    record = tmp_path / "pid"
    record.write_text(own)
    assert state.LabDaemon(record).pid == os.getpid()
    before, _, after = own.rpartition(")")
    fields = after.split()
    fields[19] = str(int(fields[19]) - 1)
    record.write_text(f"{before}) {' '.join(fields)}")
    assert state.LabDaemon(record).pid is None


def test_a_process_that_died_is_not_alive(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    record = tmp_path / "pid"
    record.write_text(Path(f"/proc/{process.pid}/stat").read_text())
    daemon = state.LabDaemon(record)
    assert daemon.pid == process.pid
    daemon.kill()
    assert daemon.pid is None, "a zombie that its parent has not fetched is dead too"
    process.wait()


def test_missing_programs_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match="docker-registry") as caught:
        prerequisites.check_machine_prerequisites(None, ["swarm"])
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("apt-get install -y docker-registry docker.io hostname mmdebstrap mount")


def test_a_user_who_is_not_root_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="root") as caught:
        prerequisites.check_machine_prerequisites(None, ["swarm"])
    assert "sudo" in str(caught.value.hint)


def test_an_engine_directory_without_an_engine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(LabError, match="does not contain dockerd"):
        prerequisites.check_machine_prerequisites(tmp_path, ["swarm"])


def test_a_lab_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARMTRAIN_LAB_DIR", str(tmp_path))
    with pytest.raises(LabError, match="unknown lab; this machine has no labs"):
        Lab("nowhere").build_client_environment()


def test_the_environment_of_a_command_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMTRAIN_LAB_DIR", str(tmp_path))
    (tmp_path / "lab").mkdir()
    state.write_lab_description(tmp_path / "lab", state.LabDescription("lab", "10.77.3.0/24", ("node0",), "/srv/shared"))
    here = {"HOME": "/root", "DOCKER_HOST": "tcp://elsewhere:2376", "DOCKER_CONTEXT": "elsewhere", "DOCKER_TLS_VERIFY": "1"}
    cores = str(len(os.sched_getaffinity(0)))
    expected = {"HOME": "/root", "DOCKER_HOST": "unix:///var/run/docker.sock", "SWARMTRAIN_CORES": cores}
    assert Lab("lab").build_node_environment("node0", here) == expected
    with pytest.raises(LabError, match="unknown node"):
        Lab("lab").build_node_environment("node1", here)


@pytest.mark.parametrize(("cores", "nodes", "share"), [(2, 1, 2), (2, 3, 1), (8, 3, 2), (64, 2, 32)])
def test_the_nodes_of_a_lab_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, nodes: int, share: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    description = state.LabDescription("lab", "10.77.3.0/24", tuple(f"node{number}" for number in range(nodes)), "/srv/shared")
    assert cpu_share.compute_cores_per_node(description) == share
    cpu_share.write_runc_wrapper(tmp_path, description)
    config = tmp_path / "config.json"
    for command, expected in (("create", [f"SWARMTRAIN_CORES={share}", "PATH=/bin"]), ("delete", ["PATH=/bin"])):
        config.write_text('{"process":{"args":["sh","-c","echo \\"env\\":[\\"A\\"]"],"env":["PATH=/bin"]},"env":["HOOK=1"]}')
        arguments = ["--root", "/run", command, "--bundle", str(tmp_path), "container"]
        done = subprocess.run([str(tmp_path / "runc"), *arguments], capture_output=True, text=True, check=False)
        assert "runc-of-this-machine" in done.stderr  # no such program exists here
        assert json.loads(config.read_text())["process"]["env"] == expected


def test_containers_of_a_lab_with_simulated_gpus_know_their_number(tmp_path: Path) -> None:
    description = state.LabDescription("lab", "10.77.3.0/24", ("node0",), "/srv/shared", gpus=2)
    cpu_share.write_runc_wrapper(tmp_path, description)
    (tmp_path / "config.json").write_text('{"process":{"env":["PATH=/bin"]}}')
    subprocess.run([str(tmp_path / "runc"), "create", "--bundle", str(tmp_path), "container"], capture_output=True, check=False)
    environment = json.loads((tmp_path / "config.json").read_text())["process"]["env"]
    assert environment == [cpu_share.format_cores_assignment(description), "SWARMTRAIN_SIMULATED_GPUS=2", "PATH=/bin"]


def test_a_lab_of_an_older_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text('{"name": "lab", "subnet": "10.77.3.0/24", "nodes": ["node0"], "shared": "/srv/shared"}')
    found = state.read_lab_description(tmp_path)
    assert found is not None
    assert not found.bare


def test_only_sources_of_the_suite_are_used(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("# deb nowhere bookworm main\ndeb [signed-by=/key] somewhere bookworm main\n")
    for name, text in {
        "debian.sources": "Types: deb\nURIs: somewhere\nSuites: bookworm bookworm-updates\nComponents: main\n",
        "other.list": "deb elsewhere cloud-sdk-bookworm main\n",
        "older.sources": "Types: deb\nSuites: bullseye\n",
        "notes.txt": "deb nowhere bookworm main\n",
    }.items():
        (tmp_path / "sources.list.d" / name).write_text(text)
    assert [file.name for file in base_image.find_apt_sources("bookworm", tmp_path)] == ["sources.list", "debian.sources"]
    assert base_image.find_apt_sources("trixie", tmp_path) == []


class EngineThatRefusesImports:
    """A Docker engine without images, whose disk is full. It records the files to import."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def inspect_image(self, image: str) -> dict[str, str]:
        raise OSError(f"no such image: {image}")

    def import_image_from_file(self, filename: str, repository: str, tag: str) -> str:
        self.files.append(filename)
        return f'{{"error": "{repository}:{tag}: no space left on device"}}\n'


@pytest.mark.parametrize("with_compiler", [False, True])
def test_a_base_image_is_imported_from_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_compiler: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    engine: Any = EngineThatRefusesImports()
    with pytest.raises(LabError, match="mmdebstrap") as caught:
        base_image.create_base_image(engine, print, with_compiler=with_compiler)
    assert caught.value.hint == "apt-get install -y mmdebstrap"
    packages = f"python3-python3-venv-ca-certificates-libgomp1{'-g++-python3-dev' if with_compiler else ''}"
    tar = tmp_path / "swarmtrain" / f"base-bookworm-{packages}.tar"
    tar.parent.mkdir()
    tar.touch()
    name = f"swarmtrain-base:bookworm{'-compiler' if with_compiler else ''}"
    with pytest.raises(LabError, match=f"image {re.escape(name)}: .*no space left on device") as caught:
        base_image.create_base_image(engine, print, with_compiler=with_compiler)
    assert (engine.files, caught.value.hint) == ([str(tar)], f"rm {tar}")
