"""A script discovers its world under the real torchrun, mpirun and mpiexec, or without a launcher, and trains the same."""

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
from worlds import ROOT, TIMEOUT_SECONDS, compute_deviation, read_audit, read_losses, run_training

pytestmark = pytest.mark.test_all_only("starts ranks without a fork server, by torchrun, MPI and nothing")

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
MPICH = ["mpiexec.mpich", "-np", "2", sys.executable]
FIND_PORT_SCRIPT = (
    "import os; from swarmtrain.protocol import distributed_env; print(distributed_env.detect_torchrun_env(os.environ)['MASTER_PORT'])"
)


def start_job(folder: Path, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start `command` in `folder` without a world in its environment."""
    if shutil.which(command[0]) is None and not os.environ.get("CI"):
        pytest.skip(f"needs {command[0]}")
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_output(process: subprocess.Popen[str]) -> str:
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def single_run_losses(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> dict[int, float]:
    return run_training(tmp_path_factory.mktemp("once"), config, 1)


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
def test_a_script_discovers_its_world(
    tmp_path: Path, config: dict[str, Any], single_run_losses: dict[int, float], launcher: Sequence[str], size: int
) -> None:
    (tmp_path / "config.yml").write_text(json.dumps(config))
    wait_for_output(start_job(tmp_path, [*launcher, str(ROOT / "training_code.py"), "config.yml"]))
    assert sorted({line["rank"] for line in read_audit(tmp_path)}) == list(range(size))
    assert compute_deviation(read_losses(tmp_path), single_run_losses) < 1e-5


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_two_jobs_on_one_machine_have_ports_of_their_own(tmp_path: Path, launcher: Sequence[str]) -> None:
    """Also with a shell in between, and if MPI gives its ranks no job."""
    asking = [*launcher[:-1], "sh", "-c", '"$0" "$@"; exit', sys.executable, "-c", FIND_PORT_SCRIPT]
    jobs = [wait_for_output(start_job(tmp_path, command)).split() for command in (asking, [*launcher, "-c", FIND_PORT_SCRIPT])]
    assert [len(ports) for ports in jobs] == [2, 2]
    assert [len(set(ports)) for ports in jobs] == [1, 1]
    assert jobs[0] != jobs[1]
