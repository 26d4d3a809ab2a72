"""Detect the rank and world size of a process from its environment: torchrun, Slurm, MPI, a Determined trial, or none, in this order.

    detect_torchrun_env(os.environ) → RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun would set them

Standard library only, without network access: all processes of a world derive the same addresses without communication.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS_PER_JOB, _PORT_SETS = 20000, 4, 2500
_PORT_STRIDE_PER_STEP = 997
_MAX_HOSTS = 100_000
_DETERMINED_INFO_FOLDER = Path("/run/determined/info")

# MPI variables for rank, world size and local rank of OpenMPI; of MPICH, Intel MPI and others that use Hydra; of MVAPICH.
_MPI_RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
_MPI_JOB_ID_VARIABLES = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")


def detect_torchrun_env(environ: Mapping[str, str], determined_info_folder: Path = _DETERMINED_INFO_FOLDER) -> dict[str, str]:
    """Return torchrun's environment variables for this process; those already in `environ` are kept.

    `determined_info_folder`: folder in which the container of a Determined trial finds its cluster information.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world_variables = {name: environ[name] for name in ("RANK", "WORLD_SIZE")}
        return {"LOCAL_RANK": environ.get("LOCAL_RANK", "0"), **world_variables, **_read_master_address(environ)}
    return {
        **(
            _detect_slurm_env(environ)
            or _detect_mpi_env(environ)
            or _detect_determined_env(environ, determined_info_folder)
            or _build_single_process_env()
        ),
        **_read_master_address(environ),
    }


def reserve_port(address: str = LOOPBACK) -> socket.socket:
    """Return a socket that is bound to a free port: until it is closed, no other program gets this port by chance.

    A server that sets SO_REUSEADDR, such as torch's TCPStore, can listen on the port.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((address, 0))
    return reservation


def get_node_name(environ: Mapping[str, str]) -> str:
    """Return the name of the node that this process runs on: as set by swarmtrain's launcher, else by Slurm, else the host name."""
    return environ.get("SWARMTRAIN_NODE") or environ.get("SLURMD_NODENAME") or socket.gethostname()


def _read_master_address(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}


def _detect_slurm_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's environment variables for a task of srun; empty if this process is not one.

    The shell of sbatch or salloc belongs to a job but to no job step, so a program that it starts directly is a single process.
    """
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"} <= environ.keys():
        return {}
    rank, local_rank = int(environ["SLURM_PROCID"]), environ.get("SLURM_LOCALID", "0")
    hostlist = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    world_size = environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]
    return _build_torchrun_env(rank, world_size, local_rank, get_first_host(hostlist), compute_slurm_base_port(environ))


def _detect_mpi_env(environ: Mapping[str, str]) -> dict[str, str]:
    names = next((names for names in _MPI_RANK_VARIABLES if names[0] in environ and names[1] in environ), None)
    if names is None:
        return {}
    rank, world_size, local_rank = (environ.get(name, "0") for name in names)
    hostlist = environ.get("SLURM_JOB_NODELIST", "")
    local_size = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or environ.get("MPI_LOCALNRANKS") or world_size
    if local_size != world_size and not hostlist and "MASTER_ADDR" not in environ:
        raise ValueError("MPI does not provide the host of rank 0: use mpirun -x MASTER_ADDR=HOST (MPICH: -genv MASTER_ADDR HOST)")
    job = next((environ[name] for name in _MPI_JOB_ID_VARIABLES if name in environ), "")
    job_number = int("".join(char for char in job if char.isdigit()) or (_find_launcher_pid() if local_size == world_size else 0))
    return _build_torchrun_env(
        int(rank), world_size, local_rank, get_first_host(hostlist) if hostlist else LOOPBACK, compute_base_port(job_number) + 2
    )


def _find_launcher_pid() -> int:
    """Return the pid of the process that started all ranks on this host, which identifies the job.

    Hydra, MPICH's process manager, sets no job id, and starts each rank in a separate session.
    """
    leader = os.getsid(0)
    if leader == 0:  # the session leader is outside this container: such ranks share a parent process
        return os.getppid()
    return int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])


def is_determined_trial(environ: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a Determined trial."""
    return environ.get("DET_TASK_TYPE") == "TRIAL"


def _detect_determined_env(environ: Mapping[str, str], info_folder: Path) -> dict[str, str]:
    """Return torchrun's environment variables for the entrypoint of a Determined trial that runs once per container (no launch layer).

    Empty outside a trial, or if the trial has one container. Raises ValueError if a container has several slots, which need a launch layer.
    """
    path = info_folder / "rendezvous.json"
    if not is_determined_trial(environ) or not path.exists():
        return {}
    rendezvous_info = json.loads(path.read_text())
    addresses = rendezvous_info["container_addrs"]
    if max(rendezvous_info["container_slot_counts"]) > 1:
        launcher = "python3 -m determined.launch.torch_distributed"
        raise ValueError(
            f"Determined starts one process per container, but this trial has containers with several slots: use {launcher} SCRIPT"
        )
    if len(addresses) == 1:
        return {}
    return _build_torchrun_env(
        rendezvous_info["container_rank"], str(len(addresses)), "0", addresses[0], compute_base_port(int(environ["DET_TRIAL_ID"])) + 3
    )


def _build_single_process_env() -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _build_torchrun_env(rank: int, world_size: str, local_rank: str, master_addr: str, master_port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def compute_slurm_base_port(environ: Mapping[str, str]) -> int:
    """Return the first of the four ports of this Slurm job step."""
    return compute_base_port(int(environ["SLURM_JOB_ID"]) + _PORT_STRIDE_PER_STEP * int(environ.get("SLURM_STEP_ID", 0)))


def compute_base_port(job_number: int) -> int:
    """Return the first of the four ports of job `job_number`: below the ephemeral range, and different for jobs with nearby numbers."""
    return _FIRST_PORT + _PORTS_PER_JOB * (job_number % _PORT_SETS)


def get_first_host(hostlist: str) -> str:
    """Return the first host name of the Slurm hostlist `hostlist`. Raises ValueError if it is empty or invalid."""
    return next(expand_hostlist(hostlist))


def expand_hostlist(hostlist: str) -> Iterator[str]:
    """Yield the host names of the Slurm hostlist `hostlist`, such as `n[01-03,7],gpu-[2-4]x`.

    Raises ValueError if it is empty or invalid.
    """
    patterns = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hostlist)
    if not patterns or ",".join(patterns) != hostlist:
        raise ValueError(f"invalid Slurm hostlist: {hostlist!r}")
    names = (name for pattern in patterns for name in _expand_hostlist_pattern(pattern))
    for number, name in enumerate(names):
        if number == _MAX_HOSTS:
            raise ValueError(f"invalid Slurm hostlist: {hostlist!r} has more than {_MAX_HOSTS} hosts")
        yield name


def _expand_hostlist_pattern(pattern: str) -> Iterator[str]:
    prefix, bracket, remainder = pattern.partition("[")
    if not bracket:
        yield pattern
        return
    ranges, _, suffix = remainder.partition("]")
    for number in (number for number_range in ranges.split(",") for number in _expand_number_range(number_range)):
        for expanded_suffix in _expand_hostlist_pattern(suffix):
            yield prefix + number + expanded_suffix


def _expand_number_range(text: str) -> Iterator[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) - int(match[1]) not in range(_MAX_HOSTS):
        raise ValueError(f"invalid number range: {text!r}")
    for number in range(int(match[1]), int(match[2] or match[1]) + 1):
        yield str(number).zfill(len(match[1]))
