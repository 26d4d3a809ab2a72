"""Programs that reach the lab's machines from a shell outside: what comes first in the PATH that `lab env` prints."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from swarmtrain.lab import fabric, ssh
from swarmtrain.lab.state import Description

_SSH = ("ssh", "scp", "sftp")
_SLURM = ("sbatch", "srun", "salloc", "squeue", "sinfo", "scancel", "scontrol", "sattach", "sbcast", "sprio", "sdiag", "sstat")
# A job has the PATH of who submits it: on a machine of the lab, the network is the lab's already.
_SCRIPT = """#!/bin/sh
[ -e {namespace} ] && exec {enter} {argv} "$@"
exec {argv} "$@"
"""


def folder(directory: Path) -> Path:
    """Return the folder of the programs."""
    return directory / "bin"


def make(directory: Path, description: Description) -> None:
    """Write a program for each of those of SSH and Slurm that this machine has: the same one, in the lab's network."""
    folder(directory).mkdir()
    wanted = {name: ["-F", str(ssh.config(directory))] for name in _SSH} if "ssh" in description.parts else {}
    wanted |= {name: [] for name in _SLURM} if "slurm" in description.parts else {}
    enter = fabric.enter(description.name, "fabric")
    for name, options in wanted.items():
        if found := shutil.which(name, path=os.pathsep.join([os.defpath, os.environ.get("PATH", "")])):  # not one of another lab
            argv = shlex.join([found, *options])
            script = _SCRIPT.format(namespace=fabric.path(description.name, "fabric"), enter=shlex.join(enter), argv=argv)
            program = folder(directory) / name
            program.write_text(script)
            program.chmod(0o755)
