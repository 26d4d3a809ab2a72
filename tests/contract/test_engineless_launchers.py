"""The contract for launchers that need no engine: this machine, machines of a lab behind real sshds, a real Slurm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import ROOT, Contract, LabTarget, LaunchTarget, activate_target

from swarmtrain import process

sys.path.insert(0, str(ROOT / "tests" / "launchers"))

from ssh_hosts import Hosts, start_hosts, start_lab  # lies in the folder of the launcher's tests

NODES = ("node0", "node1")


class LocalTarget(LaunchTarget):
    kind = "local"
    invalid_options = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "no-torch").mkdir()
        (folder / "no-torch" / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
        self.invalid_env = {"PYTHONPATH": f"{folder / 'no-torch'}:{ROOT}"}


class TestLocal(Contract):
    kind = "local"
    test_a_machine_dies = None  # there is only one machine

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchTarget]:
        with activate_target(LocalTarget(tmp_path_factory.mktemp("local"))) as place:
            yield place


class SshTarget(LabTarget):
    kind = "ssh"

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder, hosts.lab)
        self.hosts = hosts

    def list_leftovers(self) -> list[str]:
        programs = [f"{name}: {program}" for name in NODES for program in self.hosts.list_programs(name)]
        return [
            *programs,
            *(file for name in NODES for file in self.list_run_files(self.hosts.get_state_dir(name))),
            *super().list_leftovers(),
        ]


class TestSsh(Contract):
    kind = "ssh"

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchTarget]:
        with start_hosts(NODES) as hosts, activate_target(SshTarget(tmp_path_factory.mktemp("ssh"), hosts)) as place:
            yield place


class SlurmTarget(LabTarget):
    kind = "slurm"

    def list_leftovers(self) -> list[str]:
        return [*process.run_command(["squeue", "--noheader"]).splitlines(), *super().list_leftovers()]

    def restart_machines(self) -> None:
        """Leave the machine off: if it is back before Slurm has noticed, srun ends the job's step."""


class TestSlurm(Contract):
    kind = "slurm"

    @pytest.fixture(scope="class")
    @classmethod
    def target(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchTarget]:
        with start_lab(NODES, part="slurm") as lab, activate_target(SlurmTarget(tmp_path_factory.mktemp("slurm"), lab)) as place:
            yield place

    def test_in_apptainer_it_is_rendered(self, target: LaunchTarget) -> None:
        target("generate", "contract.yml", "--name", "rendered", "-o", "runner.slurm.apptainer.image=/images/train.sif")
        assert "apptainer exec" in (target.project / "compose" / "generated.sbatch").read_text()
