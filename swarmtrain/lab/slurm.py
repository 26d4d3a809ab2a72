"""The lab's Slurm cluster: munged and slurmctld on the first machine, and slurmd on every machine.

The munge key, socket and state are in the lab's folder. Jobs of the partition `urgent` preempt jobs of `main`, which have 20 s to exit.
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
from swarmtrain.lab import cpu_share, machines, network
from swarmtrain.lab.state import LabDescription

PORTS = {"slurmctld": 6817, "slurmd": 6818}
_CPUS_PER_NODE = 8  # CPUs per node, independent of the real number, so that two jobs can share a node
_READY_STATES = ("idle", "mixed", "allocated", "completing")

_CONF_TEMPLATE = """ClusterName=lab
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
_NODE_TEMPLATE = "NodeName={name} NodeAddr={address} CPUs={cpus} SocketsPerBoard=1 CoresPerSocket={cpus}\n"
# --force: the folder may be below a world-writable one such as /tmp. An existing socket may be left from a node0 that was killed.
_MUNGED_COMMAND = "munged --foreground --force --socket={0}/munge.socket --key-file={0}/munge.key --pid-file=/run/munge.pid {1}"
_MUNGED_FILE_OPTIONS = "--log-file={0}/munge.log --seed-file={0}/munge.seed"


def get_slurm_conf_path(lab_folder: Path) -> Path:
    """Return the path of the lab's slurm.conf."""
    return lab_folder / "slurm" / "slurm.conf"


def write_slurm_files(lab_folder: Path, description: LabDescription) -> None:
    """Write the lab's slurm.conf, munge key and task prolog, and create the folders of the daemons."""
    folder = get_slurm_conf_path(lab_folder).parent
    for subfolder in ("state", *(f"spool-{node}" for node in description.nodes)):
        (folder / subfolder).mkdir(parents=True, mode=0o700)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    prolog = folder / "task-prolog.sh"  # Slurm adds the output of this script to a task's environment
    prolog.write_text(f"#!/bin/sh\necho export {cpu_share.format_cores_assignment(description)}\n")
    prolog.chmod(0o755)
    first = description.nodes[0]
    nodes = [
        _NODE_TEMPLATE.format(name=node, address=description.get_node_address(node), cpus=_CPUS_PER_NODE) for node in description.nodes
    ]
    cluster = _CONF_TEMPLATE.format(folder=folder, first=first, address=description.get_node_address(first))
    get_slurm_conf_path(lab_folder).write_text("".join([*nodes, cluster]), encoding="utf-8")


def build_slurm_services(lab_folder: Path, description: LabDescription, node: str) -> dict[str, str]:
    """Return the scripts of the node's Slurm services: slurmd, and on the first node also munged and slurmctld."""
    folder, file = shlex.quote(str(get_slurm_conf_path(lab_folder).parent)), shlex.quote(str(get_slurm_conf_path(lab_folder)))
    wait = f"until [ -S {folder}/munge.socket ]; do sleep 0.02; done\n"
    service_scripts = {"slurmd": f"{wait}exec slurmd -D -f {file}\n"}
    if node == description.nodes[0]:
        munged = f"rm -f {folder}/munge.socket\nexec {_MUNGED_COMMAND.format(folder, _MUNGED_FILE_OPTIONS.format(folder))}\n"
        service_scripts |= {"munged": munged, "slurmctld": f"{wait}exec slurmctld -D -f {file}\n"}
    return service_scripts


def wait_until_slurm_ready(lab_folder: Path, description: LabDescription, nodes: Iterable[str], *, timeout: float = 60) -> None:
    """Wait until slurmctld reports all `nodes` as ready.

    Raises LabError that names the nodes that are not ready within `timeout` seconds.
    """
    first = description.nodes[0]
    machines.wait_until_service_listens(lab_folder, first, "slurmctld", PORTS["slurmctld"], timeout=timeout)
    for node in nodes:
        machines.wait_until_service_listens(lab_folder, node, "slurmd", PORTS["slurmd"], timeout=timeout)
    deadline = time.monotonic() + timeout
    while missing := set(nodes) - _list_ready_nodes(lab_folder, description):
        if time.monotonic() > deadline:
            log_tail = machines.read_log_tail(lab_folder, first, "slurmctld")
            raise LabError(f"not ready in Slurm after {timeout:g} s\n{log_tail}", place=", ".join(sorted(missing)))
        time.sleep(0.05)


def _list_ready_nodes(lab_folder: Path, description: LabDescription) -> set[str]:
    argv = [*network.build_enter_command(description.name, "bridge"), "sinfo", "--noheader", "--Node", "--format=%N %T"]
    with contextlib.suppress(ProcessError):
        rows = [
            line.split()
            for line in process.run_command(argv, env={"SLURM_CONF": str(get_slurm_conf_path(lab_folder))}, timeout=5.0).splitlines()
        ]
        return {name for name, node_state in rows if node_state in _READY_STATES}
    return set()
