"""A real Slurm on this machine: munged, slurmctld and a slurmd for each node, with keys, sockets and state in a folder of their own.

    with cluster(folder) as conf:
        sbatch, srun, squeue … with SLURM_CONF=conf

Jobs of the partition `urgent` preempt those of `main`, which have 20 seconds to leave.
All nodes are this machine, each on a port of its own; their names lead nowhere, and Slurm knows that they are at 127.0.0.1.
Needs root, and Debian's packages slurmctld, slurmd, munge and slurm-client.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from swarmtrain.errors import LabError, ProcessError
from swarmtrain.process import run, start

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_SYSTEM = "/usr/sbin:/sbin"
_READY_WITHIN = 30.0
_END_WITHIN = 10.0
_JOB_NUMBERS = 50_000  # ports follow from them, and there may be another lab on this machine
_CPUS = 8  # of each node, whatever the machine has: two jobs are to share them

_CONF = """ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_min_interval=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
KillWait=10
SlurmdTimeout=10
FirstJobId={first_job}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
_NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus} SocketsPerBoard=1 CoresPerSocket={cpus}\n"


def missing() -> list[str]:
    """Return the programs that this machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]


@contextlib.contextmanager
def cluster(folder: Path, names: Sequence[str] = ("n01", "n02", "n03")) -> Iterator[Path]:
    """Run a cluster of the nodes `names` in `folder` (a short path: it holds a socket), and yield its slurm.conf.

    Raises LabError if it does not come up.
    """
    conf = _write(folder, names)
    with contextlib.ExitStack() as stack:
        munge = folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        # --force: the folder may be below one that others can write to, as /tmp is.
        _daemon(stack, folder, "munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        _until(folder, "munged", (munge / "socket").exists)
        _daemon(stack, folder, "slurmctld", "-D", "-c", "-f", str(conf))
        for name in names:
            _daemon(stack, folder, "slurmd", "-D", "-N", name, "-f", str(conf), log=name)
        _until(folder, "slurmctld", lambda: _idle(conf) == len(names))
        yield conf


def _write(folder: Path, names: Sequence[str]) -> Path:
    for each in ("munge", "state", *(f"spool-{name}" for name in names)):
        (folder / each).mkdir(parents=True, mode=0o700)
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    ports = _free_ports(len(names) + 1)
    lines = [_NODE.format(name=name, port=port, cpus=_CPUS) for name, port in zip(names, ports[1:], strict=True)]
    conf = folder / "slurm.conf"
    conf.write_text(
        "".join([*lines, _CONF.format(folder=folder, ports=ports, first_job=1 + secrets.randbelow(_JOB_NUMBERS))]), encoding="utf-8"
    )
    return conf


def _daemon(stack: contextlib.ExitStack, folder: Path, *argv: str, log: str = "") -> None:
    with (folder / f"{log or argv[0]}.out").open("ab") as out:
        stack.callback(_end, start([shutil.which(argv[0], path=_path()) or argv[0], *argv[1:]], stdout=out, stderr=out, new_session=True))


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(_END_WITHIN)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _until(folder: Path, what: str, ready: Callable[[], bool]) -> None:
    end = time.monotonic() + _READY_WITHIN
    while not ready():
        if time.monotonic() > end:
            tail = (folder / f"{what}.out").read_text(encoding="utf-8", errors="replace")[-1000:]
            raise LabError(f"not ready after {_READY_WITHIN:g} s\n{tail}", place=what)
        time.sleep(0.05)


def _idle(conf: Path) -> int:
    with contextlib.suppress(ProcessError):
        return len(set(run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"], env={"SLURM_CONF": str(conf)}, timeout=5.0).split()))
    return 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{_SYSTEM}"
