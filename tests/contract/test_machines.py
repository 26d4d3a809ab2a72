"""The contract on everything that needs no engine: this machine, three hosts behind real sshds, a real Slurm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract import ROOT, RUN, Contract, Place, entered
from features import EVERYWHERE
from processes import below

from swarmtrain.errors import LabError
from swarmtrain.lab import slurm

sys.path.insert(0, str(ROOT / "tests" / "launchers"))

from hosts import Hosts  # lies beside the launcher's tests

NODES = ("node0", "node1")
CI = os.environ.get("CI") == "true"


def needs(*lacking: str) -> None:
    """Skip, or fail in CI, if this machine lacks something."""
    if lacking:
        assert not CI, f"this machine lacks {', '.join(lacking)}"
        pytest.skip(f"this machine lacks {', '.join(lacking)}")


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
        self.env |= {"PATH": f"{hosts.bin}:{os.environ['PATH']}"}

    def left(self) -> list[str]:
        programs = [f"{name}: {program}" for name in self.hosts.names for program in self.hosts.programs(name)]
        return [*programs, *(file for name in self.hosts.names for file in self.files(self.hosts.folder / name)), *super().left()]

    def kill_machine(self, node: str) -> None:
        self.hosts.kill(node)

    def mend(self) -> None:
        self.hosts.mend()


class SshDockerPlace(SshPlace):
    """`docker` on the hosts is a stand-in: tests/launchers/docker_stand_in.py. Where an image has python, it has the tests' own."""

    kind = "pdsh_docker"

    def left(self) -> list[str]:
        folders = [self.hosts.folder / name / "containers" for name in self.hosts.names]
        return [*super().left(), *(str(path) for folder in folders for path in folder.glob("*-*"))]

    def in_container(self, node: str) -> bool:
        return (self.hosts.folder / node / "containers" / f"{RUN}-{node}").exists()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    needs(*(["root"] if os.geteuid() else []), *([] if shutil.which("sshd", path="/usr/sbin:/usr/bin") else ["openssh-server"]))
    made = Hosts(tmp_path_factory.mktemp("hosts"), NODES)
    try:
        made.up()
        yield made
    except LabError as error:
        needs(f"what hosts take: {error}")
    finally:
        made.down()


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

    def __init__(self, folder: Path, conf: Path) -> None:
        super().__init__(folder)
        self.env |= {"SLURM_CONF": str(conf)}

    def left(self) -> list[str]:
        jobs = subprocess.run(["squeue", "--noheader"], check=True, capture_output=True, text=True).stdout.splitlines()
        return [*jobs, *super().left()]

    def kill_machine(self, node: str) -> None:
        """What Slurm has of it dies too; it stays dead."""
        tasks = [pid for pid in below(self.home) if f"SLURMD_NODENAME={node}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()]
        parents = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in tasks}
        stepds = [pid for pid in parents - {1} if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")]
        wanted = f"-N\0{node}\0".encode()
        slurmds = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if wanted in path.read_bytes()]
        for pid in [*slurmds, *stepds, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class TestSlurm(Contract):
    kind = "slurm"
    __test__ = EVERYWHERE

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        needs(*slurm.missing(), *(["root"] if os.geteuid() else []))
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short enough for a socket
        try:
            with slurm.cluster(folder, NODES) as conf, entered(SlurmPlace(tmp_path_factory.mktemp("slurm"), conf)) as place:
                yield place
        finally:
            shutil.rmtree(folder)

    def test_in_apptainer_it_is_rendered(self, place: Place) -> None:
        place("generate", "contract.yml", "--name", "rendered", "-o", "runner.slurm.apptainer.image=/images/train.sif")
        assert "apptainer exec" in (place.project / "compose" / "generated.sbatch").read_text()
