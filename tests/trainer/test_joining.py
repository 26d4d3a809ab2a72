"""A script finds its world by itself under the real torchrun, the real mpirun and mpiexec, or nothing at all, and trains the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds import ROOT, TIMEOUT, audit, deviation, losses, train

pytestmark = pytest.mark.test_all_only("starts ranks without a fork server, by torchrun, MPI and nothing")

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
MPICH = ["mpiexec.mpich", "-np", "2", sys.executable]
FIND = "import os; from swarmtrain import world; print(world.find(os.environ)['MASTER_PORT'])"


def started(folder: Path, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start `command` in `folder` with nothing in its environment that tells of a world."""
    if shutil.which(command[0]) is None and not os.environ.get("CI"):
        pytest.skip(f"needs {command[0]}")
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> dict[int, float]:
    return train(tmp_path_factory.mktemp("once"), config, 1)


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ([sys.executable], 1),
        ([sys.executable, *TORCHRUN], 2),
        (OPEN_MPI, 2),
        (MPICH, 2),
    ],
    ids=["nothing", "torchrun", "openmpi", "mpich"],
)
def test_a_script_finds_its_world(
    tmp_path: Path, config: dict[str, Any], once: dict[int, float], launcher: Sequence[str], size: int
) -> None:
    (tmp_path / "config.yml").write_text(json.dumps(config))
    ended(started(tmp_path, [*launcher, str(ROOT / "training_code.py"), "config.yml"]))
    assert sorted({line["rank"] for line in audit(tmp_path)}) == list(range(size))
    assert deviation(losses(tmp_path), once) < 1e-5


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_two_jobs_on_one_machine_have_ports_of_their_own(tmp_path: Path, launcher: Sequence[str]) -> None:
    """Also where a shell stands between, and where MPI tells its ranks of no job."""
    asking = [*launcher[:-1], "sh", "-c", '"$0" "$@"; exit', sys.executable, "-c", FIND]
    jobs = [ended(started(tmp_path, command)).split() for command in (asking, [*launcher, "-c", FIND])]
    assert [len(ports) for ports in jobs] == [2, 2]
    assert [len(set(ports)) for ports in jobs] == [1, 1]
    assert jobs[0] != jobs[1]
