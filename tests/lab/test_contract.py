"""The contract of all launchers (tests/contract) on what needs engines: a swarm, one of its engines alone, and two of them behind SSH."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtrain.lab import Lab
from swarmtrain.launchers.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from contract import RUN, Contract, LabPlace, Place, entered  # lies beside the contract's own tests


class SwarmPlace(LabPlace):
    kind = "swarm"

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab)
        self.shared = lab.shared

    def left(self) -> list[str]:
        engine = Engine(self.lab.docker_host("node0"))
        named = [f"{kind} {item['Spec']['Name']}" for kind in ("services", "configs", "secrets") for item in engine.listing(f"/{kind}")]
        named += [
            f"network {item['Name']}" for item in engine.listing("/networks") if item["Name"].startswith((RUN, "bad", "brief", "never"))
        ]
        containers = [each for node in ("node0", "node1") for each in self.docker(node, "ps", "--format", "container {{.Names}}")]
        return [*named, *containers, *super().left()]

    def in_container(self, node: str) -> bool:
        return len(self.docker(node, "ps", "-q", "--filter", f"name={RUN}_{node}.")) == 1

    def kill_node(self, node: str) -> None:
        self.docker(node, "kill", *self.docker(node, "ps", "-q", "--filter", f"name={RUN}_{node}."))


class TestSwarm(Contract):
    kind = "swarm"

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with entered(SwarmPlace(tmp_path_factory.mktemp("swarm"), lab)) as place:
            yield place
        for path in lab.shared.glob(f"{RUN}.*"):
            path.unlink()


class DockerPlace(LabPlace):
    kind = "docker"
    missing = ("-o", "runner.docker_config.docker_container=registry.lab:5000/no-such:1")

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab)
        self.shared = lab.shared
        self.env |= {"DOCKER_HOST": lab.docker_host("node2")}

    def left(self) -> list[str]:
        names = (RUN, "bad", "brief", "never")
        kinds = (("ps", "-a", "--format", "{{.Names}}"), ("network", "ls", "--format", "{{.Name}}"))
        found = [name for kind in kinds for name in self.docker("node2", *kind)]
        return [*(name for name in found if name.startswith(names)), *super().left()]

    def in_container(self, node: str) -> bool:
        return len(self.docker("node2", "ps", "-q", "--filter", f"name={RUN}-{node}")) == 1


class TestDocker(Contract):
    kind = "docker"
    test_a_machine_dies = None  # there is one

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with entered(DockerPlace(tmp_path_factory.mktemp("docker"), lab)) as place:
            yield place
        for path in lab.shared.glob(f"{RUN}.*"):
            path.unlink()


class SshDockerPlace(LabPlace):
    kind = "pdsh_docker"

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab)
        self.shared = lab.shared
        self.env |= {"DOCKER_HOST": f"unix://{folder}/no.sock"}  # where one deploys, no engine is needed

    def left(self) -> list[str]:
        files = [file for node in ("node0", "node1") for file in self.files(self.lab.own_disk(node) / "state")]
        containers = [each for node in ("node0", "node1") for each in self.docker(node, "ps", "-a", "--format", "{{.Names}}")]
        return [*files, *containers, *super().left()]

    def in_container(self, node: str) -> bool:
        return f"{RUN}-{node}" in self.docker(node, "ps", "--format", "{{.Names}}")

    def kill_node(self, node: str) -> None:
        self.docker(node, "kill", f"{RUN}-{node}")


class TestSshDocker(Contract):
    kind = "pdsh_docker"

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, lab: Lab, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with entered(SshDockerPlace(tmp_path_factory.mktemp("pdsh_docker"), lab)) as place:
            yield place
        for path in lab.shared.glob(f"{RUN}.*"):
            path.unlink()
