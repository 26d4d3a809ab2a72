"""Where a process finds its world if nobody has told it: torch's agent, Slurm, MPI, a Determined trial, or nothing, in this order.

    find(os.environ) → RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, as torchrun would have set them

Standard library only, and nothing is asked over the network: every process comes to the same answer by itself.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS_EACH, _PORT_SETS = 20000, 4, 2500
_STEP_STRIDE = 997
_LARGEST_GROUP = 100_000
_DETERMINED = Path("/run/determined/info")

# MPI's own: rank, size, local rank. OpenMPI; MPICH, Intel MPI and others by Hydra; MVAPICH.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
_MPI_JOBS = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")


def find(environ: Mapping[str, str], determined: Path = _DETERMINED) -> dict[str, str]:
    """Return torchrun's variables for this process; what `environ` has of them is kept. Raises ValueError if they cannot be told.

    `determined`: the folder in which a trial of Determined finds what its container is told.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        found = {name: environ[name] for name in ("RANK", "WORLD_SIZE")}
        return {"LOCAL_RANK": environ.get("LOCAL_RANK", "0"), **found, **_kept(environ)}
    return {**(_slurm(environ) or _mpi(environ) or _trial(environ, determined) or _alone()), **_kept(environ)}


def node(environ: Mapping[str, str]) -> str:
    """Return the name of the node that this process is on: our launcher's, else Slurm's, else the host's."""
    return environ.get("SWARMTRAIN_NODE") or environ.get("SLURMD_NODENAME") or socket.gethostname()


def _kept(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ}


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """A task of srun. The shell of sbatch or salloc has a job too, but no step: what it starts by itself is alone."""
    if not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"} <= environ.keys():
        return {}
    rank, local = int(environ["SLURM_PROCID"]), environ.get("SLURM_LOCALID", "0")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    size = environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]
    return _world(rank, size, local, first_host(nodes), slurm_port(environ))


def _mpi(environ: Mapping[str, str]) -> dict[str, str]:
    names = next((names for names in _MPI if names[0] in environ and names[1] in environ), None)
    if names is None:
        return {}
    rank, size, local = (environ.get(name, "0") for name in names)
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    here = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or environ.get("MPI_LOCALNRANKS") or size
    if here != size and not nodes and "MASTER_ADDR" not in environ:
        raise ValueError("MPI does not say which host has rank 0: mpirun -x MASTER_ADDR=HOST (MPICH: -genv MASTER_ADDR HOST)")
    job = next((environ[name] for name in _MPI_JOBS if name in environ), "")
    number = int("".join(char for char in job if char.isdigit()) or (_starter() if here == size else 0))
    return _world(int(rank), size, local, first_host(nodes) if nodes else LOOPBACK, port_of(number) + 2)


def _starter() -> int:
    """Return the process that has started all ranks of this host: Hydra names no job, and gives each rank a session of its own."""
    leader = os.getsid(0)
    if leader == 0:  # it is outside this container: ranks without sessions of their own are children of one process
        return os.getppid()
    return int(Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[1])


def in_trial(environ: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a trial of Determined."""
    return environ.get("DET_TASK_TYPE") == "TRIAL"


def _trial(environ: Mapping[str, str], info: Path) -> dict[str, str]:
    """The entrypoint of a trial, which Determined starts once a container, where no launch layer of its own stands between."""
    path = info / "rendezvous.json"
    if not in_trial(environ) or not path.exists():
        return {}
    told = json.loads(path.read_text())
    addresses = told["container_addrs"]
    if max(told["container_slot_counts"]) > 1:
        launcher = "python3 -m determined.launch.torch_distributed"
        raise ValueError(f"Determined starts one process a container, and this trial has containers of several slots: {launcher} SCRIPT")
    if len(addresses) == 1:
        return {}
    return _world(told["container_rank"], str(len(addresses)), "0", addresses[0], port_of(int(environ["DET_TRIAL_ID"])) + 3)


def _alone() -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def _world(rank: int, size: str, local: str, host: str, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": local, "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def slurm_port(environ: Mapping[str, str]) -> int:
    """Return the first of the ports that belong to this step of this job."""
    return port_of(int(environ["SLURM_JOB_ID"]) + _STEP_STRIDE * int(environ.get("SLURM_STEP_ID", 0)))


def port_of(number: int) -> int:
    """Return the first of the four ports of job `number`: below those that kernels deal out, others for the next jobs."""
    return _FIRST_PORT + _PORTS_EACH * (number % _PORT_SETS)


def first_host(nodes: str) -> str:
    """Return the first of `hosts`. Raises ValueError if there is none."""
    return next(hosts(nodes))


def hosts(nodes: str) -> Iterator[str]:
    """Yield the names of a list of nodes as Slurm writes it: `n[01-03,7],gpu-[2-4]x`.

    Raises ValueError for what is no such list.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if not parts or ",".join(parts) != nodes:
        raise ValueError(f"no list of nodes: {nodes!r}")
    for part in parts:
        yield from _expanded(part)


def _expanded(pattern: str) -> Iterator[str]:
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        yield pattern
        return
    ranges, _, after = rest.partition("]")
    for number in (number for each in ranges.split(",") for number in _numbers(each)):
        for tail in _expanded(after):
            yield before + number + tail


def _numbers(text: str) -> Iterator[str]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) - int(match[1]) not in range(_LARGEST_GROUP):
        raise ValueError(f"no range of numbers: {text!r}")
    for number in range(int(match[1]), int(match[2] or match[1]) + 1):
        yield str(number).zfill(len(match[1]))
