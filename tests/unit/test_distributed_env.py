"""A process discovers its world from its environment; node lists in Slurm's notation."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from determined import RendezvousInfo

from swarmtrain.protocol.distributed_env import compute_base_port, detect_torchrun_env, expand_hostlist, get_first_host, get_node_name

SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_JOB_NODELIST": "n[03-05]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[01-03,7],gpu-[2-4]x", ["n01", "n02", "n03", "n7", "gpu-2x", "gpu-3x", "gpu-4x"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("login.cluster,n[5]-ib", ["login.cluster", "n5-ib"]),
    ],
)
def test_lists_of_nodes(nodes: str, names: list[str]) -> None:
    assert list(expand_hostlist(nodes)) == names
    assert get_first_host(nodes) == names[0]


@pytest.mark.parametrize("nodes", ["", "n[1-", "n[3-1]", "a,,b", "n[]", "n[1-2]]", "n[x]", "n[0-99999999]"])
def test_invalid_lists_of_nodes(nodes: str) -> None:
    with pytest.raises(ValueError, match=r"invalid (Slurm hostlist|number range)"):
        list(expand_hostlist(nodes))


def test_the_product_of_the_ranges_of_a_hostlist_is_limited() -> None:
    with pytest.raises(ValueError, match=r"has more than 100000 hosts"):
        list(expand_hostlist("n[1-9999]x[1-9999]"))


def test_torchrun_comes_first() -> None:
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert detect_torchrun_env({**SLURM, **OPEN_MPI, **torchrun}) == torchrun


def test_a_task_of_srun() -> None:
    found = detect_torchrun_env({**OPEN_MPI, **SLURM})
    assert found == {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "MASTER_ADDR": "n03", "MASTER_PORT": str(20000 + 4 * 41)}
    assert detect_torchrun_env({**SLURM, "SLURM_STEP_NODELIST": "n05", "SLURM_STEP_NUM_TASKS": "2"})["MASTER_ADDR"] == "n05"
    assert detect_torchrun_env({**SLURM, "MASTER_PORT": "7"})["MASTER_PORT"] == "7"
    assert detect_torchrun_env({**SLURM, "SLURM_JOB_ID": "42"})["MASTER_PORT"] != found["MASTER_PORT"]
    assert detect_torchrun_env({**SLURM, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != found["MASTER_PORT"]


def test_what_a_batch_script_starts_by_itself_is_alone() -> None:
    assert detect_torchrun_env({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"})["WORLD_SIZE"] == "1"


def test_mpi() -> None:
    found = detect_torchrun_env({**OPEN_MPI, "OMPI_MCA_ess_base_jobid": "17"})
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(compute_base_port(17) + 2),
    }
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(ValueError, match="the host of rank 0"):
        detect_torchrun_env(hydra)
    assert detect_torchrun_env({**hydra, "MASTER_ADDR": "b"})["MASTER_ADDR"] == "b"
    assert detect_torchrun_env({**hydra, "SLURM_JOB_NODELIST": "c[2-3]"})["MASTER_ADDR"] == "c2"


def test_without_a_job_of_its_own_an_mpi_world_has_the_port_of_its_launcher() -> None:
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    assert detect_torchrun_env(hydra)["MASTER_PORT"] != str(compute_base_port(0) + 2)
    assert detect_torchrun_env({**hydra, "SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n1"})["MASTER_PORT"] == str(compute_base_port(41) + 2)


def test_the_leader_of_an_mpi_worlds_session_may_be_outside_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getsid", lambda _: 0)
    assert detect_torchrun_env({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})["MASTER_PORT"] == str(
        compute_base_port(os.getppid()) + 2
    )


TRIAL = {"DET_TASK_TYPE": "TRIAL", "DET_TRIAL_ID": "7"}


def test_a_trial_of_determined(tmp_path: Path) -> None:
    """The file is written by Determined's own code, as in its containers."""
    RendezvousInfo(["10.0.0.1", "10.0.0.2"], 1, [1, 1])._to_file(str(tmp_path / "rendezvous.json"))
    found = detect_torchrun_env(TRIAL, tmp_path)
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": str(compute_base_port(7) + 3),
    }
    assert detect_torchrun_env({**TRIAL, "DET_TRIAL_ID": "8"}, tmp_path)["MASTER_PORT"] != found["MASTER_PORT"]
    assert detect_torchrun_env({**TRIAL, **OPEN_MPI}, tmp_path)["MASTER_ADDR"] == "127.0.0.1"
    assert detect_torchrun_env({**TRIAL, "DET_TASK_TYPE": "NOTEBOOK"}, tmp_path)["WORLD_SIZE"] == "1"


def test_a_trial_of_one_container(tmp_path: Path) -> None:
    path = tmp_path / "rendezvous.json"
    RendezvousInfo(["10.0.0.1"], 0, [1])._to_file(str(path))
    assert detect_torchrun_env(TRIAL, tmp_path) == detect_torchrun_env({})
    RendezvousInfo(["10.0.0.1"], 0, [4])._to_file(str(path))
    with pytest.raises(ValueError, match=r"several slots: use python3 -m determined\.launch\.torch_distributed SCRIPT"):
        detect_torchrun_env(TRIAL, tmp_path)
    assert detect_torchrun_env({**TRIAL, "RANK": "3", "WORLD_SIZE": "4"}, tmp_path)["RANK"] == "3"


def test_the_node_name_comes_from_the_most_specific_source() -> None:
    assert get_node_name({"SLURMD_NODENAME": "n03", "SWARMTRAIN_NODE": "node1"}) == "node1"
    assert get_node_name({"SLURMD_NODENAME": "n03"}) == "n03"
    assert get_node_name({}) == socket.gethostname()


def test_without_any_environment_there_is_no_world() -> None:
    assert detect_torchrun_env({}) == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
