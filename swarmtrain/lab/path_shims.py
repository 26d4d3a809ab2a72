"""Wrapper scripts with which SSH and Slurm programs reach the lab from a shell outside it; `lab env` puts their folder first in PATH."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from swarmtrain.lab import network, ssh
from swarmtrain.lab.state import LabDescription

_SSH_PROGRAMS = ("ssh", "scp", "sftp")
_SLURM_PROGRAMS = ("sbatch", "srun", "salloc", "squeue", "sinfo", "scancel", "scontrol", "sattach", "sbcast", "sprio", "sdiag", "sstat")
# A job inherits the PATH of its submitter, so it may call a wrapper on a machine of the lab, which is already in the lab's network.
_SHIM_SCRIPT = """#!/bin/sh
[ -e {namespace} ] && exec {enter} {argv} "$@"
exec {argv} "$@"
"""


def get_shim_folder(lab_folder: Path) -> Path:
    """Return the folder of the PATH shims (wrapper scripts)."""
    return lab_folder / "bin"


def write_shims(lab_folder: Path, description: LabDescription) -> None:
    """Write a shim for each SSH and Slurm program on this machine; the shim runs the same program in the lab's network."""
    get_shim_folder(lab_folder).mkdir()
    options_by_program = (
        {name: ["-F", str(ssh.get_client_config_path(lab_folder))] for name in _SSH_PROGRAMS} if "ssh" in description.components else {}
    )
    options_by_program |= {name: [] for name in _SLURM_PROGRAMS} if "slurm" in description.components else {}
    enter_command = network.build_enter_command(description.name, "bridge")
    for name, options in options_by_program.items():
        if program_path := shutil.which(name, path=os.pathsep.join([os.defpath, os.environ.get("PATH", "")])):  # not another lab's shim
            argv = shlex.join([program_path, *options])
            script = _SHIM_SCRIPT.format(
                namespace=network.get_namespace_path(description.name, "bridge"), enter=shlex.join(enter_command), argv=argv
            )
            program = get_shim_folder(lab_folder) / name
            program.write_text(script)
            program.chmod(0o755)
