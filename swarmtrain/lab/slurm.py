"""The Slurm of the lab's machines: munged and slurmctld on the first, a slurmd on each, with key, socket and state in the lab's directory.

Jobs of the partition `urgent` preempt those of `main`, which have 20 seconds to leave.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import time
from collections.abc import Iterable
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import LabError, ProcessError
from swarmtrain.lab import cores, fabric, machines
from swarmtrain.lab.state import Description

PORTS = {"slurmctld": 6817, "slurmd": 6818}
_CPUS = 8  # of each node, whatever the machine has: two jobs are to share them
_READY = ("idle", "mixed", "allocated", "completing")

_CONF = """ClusterName=lab
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task-prolog.sh
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_min_interval=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ReturnToService=2
KillWait=10
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""
_NODE = "NodeName={name} NodeAddr={address} CPUs={cpus} SocketsPerBoard=1 CoresPerSocket={cpus}\n"
# --force: the folder may be below one that others can write to, as /tmp is. A socket that is there may be that of a node0 that was killed.
_MUNGED = "munged --foreground --force --socket={0}/munge.socket --key-file={0}/munge.key --pid-file=/run/munge.pid {1}"
_MUNGED_FILES = "--log-file={0}/munge.log --seed-file={0}/munge.seed"


def conf(directory: Path) -> Path:
    """Return the slurm.conf of the lab."""
    return directory / "slurm" / "slurm.conf"


def make(directory: Path, description: Description) -> None:
    """Write the lab's slurm.conf and munge's key, and make the folders of the daemons."""
    folder = conf(directory).parent
    for each in ("state", *(f"spool-{node}" for node in description.nodes)):
        (folder / each).mkdir(parents=True, mode=0o700)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    prolog = folder / "task-prolog.sh"  # Slurm adds to a task's environment what this prints
    prolog.write_text(f"#!/bin/sh\necho export {cores.setting(description)}\n")
    prolog.chmod(0o755)
    first = description.nodes[0]
    nodes = [_NODE.format(name=node, address=description.address(node), cpus=_CPUS) for node in description.nodes]
    cluster = _CONF.format(folder=folder, first=first, address=description.address(first))
    conf(directory).write_text("".join([*nodes, cluster]), encoding="utf-8")


def services(directory: Path, description: Description, node: str) -> dict[str, str]:
    """Return the scripts that run the node's part of the Slurm: its slurmd, and on the first node the rest."""
    folder, file = shlex.quote(str(conf(directory).parent)), shlex.quote(str(conf(directory)))
    wait = f"until [ -S {folder}/munge.socket ]; do sleep 0.02; done\n"
    found = {"slurmd": f"{wait}exec slurmd -D -f {file}\n"}
    if node == description.nodes[0]:
        munged = f"rm -f {folder}/munge.socket\nexec {_MUNGED.format(folder, _MUNGED_FILES.format(folder))}\n"
        found |= {"munged": munged, "slurmctld": f"{wait}exec slurmctld -D -f {file}\n"}
    return found


def wait_until_ready(directory: Path, description: Description, nodes: Iterable[str], *, seconds: float = 60) -> None:
    """Return once slurmctld counts all `nodes` as fit for jobs. Raises LabError naming those that it does not within `seconds`."""
    first = description.nodes[0]
    machines.wait_until_listening(directory, first, "slurmctld", PORTS["slurmctld"], seconds=seconds)
    for node in nodes:
        machines.wait_until_listening(directory, node, "slurmd", PORTS["slurmd"], seconds=seconds)
    deadline = time.monotonic() + seconds
    while missing := set(nodes) - _ready(directory, description):
        if time.monotonic() > deadline:
            told = machines.said(directory, first, "slurmctld")
            raise LabError(f"not ready in Slurm after {seconds:g} s\n{told}", place=", ".join(sorted(missing)))
        time.sleep(0.05)


def _ready(directory: Path, description: Description) -> set[str]:
    argv = [*fabric.enter(description.name, "fabric"), "sinfo", "--noheader", "--Node", "--format=%N %T"]
    with contextlib.suppress(ProcessError):
        rows = [line.split() for line in process.run(argv, env={"SLURM_CONF": str(conf(directory))}, timeout=5.0).splitlines()]
        return {name for name, condition in rows if condition in _READY}
    return set()
