"""The launchers' contract (tests/contract) for launchers that need engines: a swarm, one of its engines, two engines behind SSH."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from contract import RUN, Contract, LabTarget, LaunchTarget, activate_target  # lies in the folder of the contract's own tests


class SwarmTarget(LabTarget):
    kind = "swarm"

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab)
        self.shared = lab.shared_disk

    def list_leftovers(self) -> list[str]:
        engine = DockerEngine(self.lab.get_docker_host("node0"))
        named = [
            f"{kind} {item['Spec']['Name']}" for kind in ("services", "configs", "secrets") for item in engine.list_objects(f"/{kind}")
        ]
        named += [
            f"network {item['Name']}"
            for item in engine.list_objects("/networks")
            if item["Name"].startswith((RUN, "bad", "brief", "never"))
        ]
        containers = [each for node in ("node0", "node1") for each in self.run_docker(node, "ps", "--format", "container {{.Names}}")]
        return [*named, *containers, *super().list_leftovers()]

    def is_in_container(self, node: str) -> bool:
        return len(self.run_docker(node, "ps", "-q", "--filter", f"name={RUN}_{node}.")) == 1

    def kill_node(self, node: str) -> None:
        self.run_docker(node, "kill", *self.run_docker(node, "ps", "-q", "--filter", f"name={RUN}_{node}."))


class TestSwarm(Contract):
    kind = "swarm"

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchTarget]:
        with activate_target(SwarmTarget(tmp_path_factory.mktemp("swarm"), lab)) as place:
            yield place
        for path in lab.shared_disk.glob(f"{RUN}.*"):
            path.unlink()


class DockerTarget(LabTarget):
    kind = "docker"
    invalid_options = ("-o", "runner.docker_config.docker_container=registry.lab:5000/no-such:1")

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab)
        self.shared = lab.shared_disk
        self.env |= {"DOCKER_HOST": lab.get_docker_host("node2")}

    def list_leftovers(self) -> list[str]:
        names = (RUN, "bad", "brief", "never")
        kinds = (("ps", "-a", "--format", "{{.Names}}"), ("network", "ls", "--format", "{{.Name}}"))
        found = [name for kind in kinds for name in self.run_docker("node2", *kind)]
        return [*(name for name in found if name.startswith(names)), *super().list_leftovers()]

    def is_in_container(self, node: str) -> bool:
        return len(self.run_docker("node2", "ps", "-q", "--filter", f"name={RUN}-{node}")) == 1


class TestDocker(Contract):
    kind = "docker"
    test_a_machine_dies = None  # there is only one machine

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchTarget]:
        with activate_target(DockerTarget(tmp_path_factory.mktemp("docker"), lab)) as place:
            yield place
        for path in lab.shared_disk.glob(f"{RUN}.*"):
            path.unlink()


class SshDockerTarget(LabTarget):
    kind = "ssh_docker"

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab)
        self.shared = lab.shared_disk
        self.env |= {"DOCKER_HOST": f"unix://{folder}/no.sock"}  # the machine that deploys needs no engine

    def list_leftovers(self) -> list[str]:
        files = [file for node in ("node0", "node1") for file in self.list_run_files(self.lab.get_node_disk(node) / "state")]
        containers = [each for node in ("node0", "node1") for each in self.run_docker(node, "ps", "-a", "--format", "{{.Names}}")]
        return [*files, *containers, *super().list_leftovers()]

    def is_in_container(self, node: str) -> bool:
        return f"{RUN}-{node}" in self.run_docker(node, "ps", "--format", "{{.Names}}")

    def kill_node(self, node: str) -> None:
        self.run_docker(node, "kill", f"{RUN}-{node}")


@pytest.mark.test_all_only("the gate has ssh, and docker; this is both")
class TestSshDocker(Contract):
    kind = "ssh_docker"

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchTarget]:
        with activate_target(SshDockerTarget(tmp_path_factory.mktemp("ssh_docker"), lab)) as place:
            yield place
        for path in lab.shared_disk.glob(f"{RUN}.*"):
            path.unlink()
