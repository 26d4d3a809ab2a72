"""The contract on everything that needs no engine: this machine, machines of a lab behind real sshds, a real Slurm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import ROOT, Contract, LabPlace, Place, entered

from swarmtrain import process

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


class SshPlace(LabPlace):
    kind = "pdsh"

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder, hosts.lab)
        self.hosts = hosts

    def left(self) -> list[str]:
        programs = [f"{name}: {program}" for name in NODES for program in self.hosts.programs(name)]
        return [*programs, *(file for name in NODES for file in self.files(self.hosts.state(name))), *super().left()]


class TestSsh(Contract):
    kind = "pdsh"

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with hosts_up(NODES) as hosts, entered(SshPlace(tmp_path_factory.mktemp("pdsh"), hosts)) as place:
            yield place


class SlurmPlace(LabPlace):
    kind = "slurm"

    def left(self) -> list[str]:
        return [*process.run(["squeue", "--noheader"]).splitlines(), *super().left()]

    def mend(self) -> None:
        """Leave it dead: if a machine is back before Slurm has missed it, srun ends the job's step."""


class TestSlurm(Contract):
    kind = "slurm"

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with machines(NODES, part="slurm") as lab, entered(SlurmPlace(tmp_path_factory.mktemp("slurm"), lab)) as place:
            yield place

    def test_in_apptainer_it_is_rendered(self, place: Place) -> None:
        place("generate", "contract.yml", "--name", "rendered", "-o", "runner.slurm.apptainer.image=/images/train.sif")
        assert "apptainer exec" in (place.project / "compose" / "generated.sbatch").read_text()
