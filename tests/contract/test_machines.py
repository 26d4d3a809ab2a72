"""The contract on everything that needs no engine: this machine, machines of a lab behind real sshds, a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import ROOT, RUN, Contract, Place, entered
from features import EVERYWHERE

from swarmtrain.lab import Lab

sys.path.insert(0, str(ROOT / "tests" / "launchers"))

from hosts import Hosts, hosts_up, machines  # lies beside the launcher's tests

NODES = ("node0", "node1")


class LocalPlace(Place):
    kind = "local"
    missing = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "no-torch").mkdir()
        (folder / "no-torch" / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
        self.env_missing = {"PYTHONPATH": f"{folder / 'no-torch'}:{ROOT}"}


class TestLocal(Contract):
    kind = "local"
    test_a_machine_dies = None  # there is one

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with entered(LocalPlace(tmp_path_factory.mktemp("local"))) as place:
            yield place


class SshPlace(Place):
    kind = "pdsh"

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder)
        self.hosts = hosts
        self.env |= hosts.lab.env()

    def left(self) -> list[str]:
        programs = [f"{name}: {program}" for name in self.hosts.names for program in self.hosts.programs(name)]
        return [*programs, *(file for name in self.hosts.names for file in self.files(self.hosts.state(name))), *super().left()]

    def kill_machine(self, node: str) -> None:
        self.hosts.kill(node)

    def mend(self) -> None:
        self.hosts.mend()


class SshDockerPlace(SshPlace):
    """`docker` on the hosts is a stand-in: tests/launchers/docker_stand_in.py. Where an image has python, it has the tests' own."""

    kind = "pdsh_docker"

    def left(self) -> list[str]:
        folders = [self.hosts.state(name) / "containers" for name in self.hosts.names]
        return [*super().left(), *(str(path) for folder in folders for path in folder.glob("*-*"))]

    def in_container(self, node: str) -> bool:
        return (self.hosts.state(node) / "containers" / f"{RUN}-{node}").exists()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_up(NODES) as made:
        yield made


class TestSsh(Contract):
    kind = "pdsh"
    __test__ = EVERYWHERE

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with entered(SshPlace(tmp_path_factory.mktemp("pdsh"), hosts)) as place:
            yield place


class TestSshDocker(Contract):
    kind = "pdsh_docker"
    __test__ = EVERYWHERE

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        mounted = Path("/mnt/shared")  # what the config mounts must be there, though the stand-in mounts nothing
        made = not mounted.exists()
        mounted.mkdir(parents=True, exist_ok=True)
        try:
            with entered(SshDockerPlace(tmp_path_factory.mktemp("pdsh_docker"), hosts)) as place:
                yield place
        finally:
            if made:
                mounted.rmdir()


class SlurmPlace(Place):
    kind = "slurm"

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder)
        self.lab, self.dead = lab, ""
        self.env |= lab.env()

    def left(self) -> list[str]:
        jobs = subprocess.run(["squeue", "--noheader"], check=True, capture_output=True, text=True).stdout.splitlines()
        return [*jobs, *super().left()]

    def kill_machine(self, node: str) -> None:
        self.lab.kill(node, say=print)
        self.dead = node

    def mend(self) -> None:
        if self.dead:
            self.lab.start(self.dead, say=print)
            self.dead = ""


class TestSlurm(Contract):
    kind = "slurm"
    __test__ = EVERYWHERE

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with machines(NODES, part="slurm") as lab, entered(SlurmPlace(tmp_path_factory.mktemp("slurm"), lab)) as place:
            yield place

    def test_in_apptainer_it_is_rendered(self, place: Place) -> None:
        place("generate", "contract.yml", "--name", "rendered", "-o", "runner.slurm.apptainer.image=/images/train.sif")
        assert "apptainer exec" in (place.project / "compose" / "generated.sbatch").read_text()
