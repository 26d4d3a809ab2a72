"""Checks that this machine can host a lab. Each failed check has its own error message and fix."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from swarmtrain.errors import LabError

_ENGINE_PROGRAMS = {
    "dockerd": "docker.io",
    "containerd": "docker.io",
    "runc": "docker.io",
    "docker-registry": "docker-registry",
    "iptables": "iptables",
}
_PROGRAMS_BY_COMPONENT = {
    "swarm": _ENGINE_PROGRAMS,
    "docker": _ENGINE_PROGRAMS,
    "ssh": {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"},
    # Not a component: builds the base image of the lab's images, since the lab's engines reach no registry but their own.
    "base image": {"mmdebstrap": "mmdebstrap"},
    "slurm": {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"},
}
_COMMON_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}


def build_search_path(engine_folder: Path | None) -> str:
    """Return the PATH for a lab's programs: first `engine_folder`, the folder of a different Docker engine; last the sbin folders."""
    engine_path = [str(engine_folder)] if engine_folder else []
    return os.pathsep.join([*engine_path, os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def check_machine_prerequisites(engine_folder: Path | None, components: Collection[str]) -> None:
    """Check that this is Linux, the user is root, and all programs that a lab with `components` needs are installed.

    Raises LabError if one of these conditions does not hold.
    """
    if sys.platform != "linux":
        raise LabError("needs Linux namespaces, but this is not Linux", place="lab", hint="run swarmtrain lab in a Linux virtual machine")
    check_root()
    if engine_folder and not os.access(engine_folder / "dockerd", os.X_OK):
        raise LabError(
            f"{engine_folder} does not contain dockerd",
            place="lab --engine",
            hint="pass the directory that contains dockerd and containerd",
        )
    if missing := _find_missing_programs(engine_folder, components):
        packages = sorted(set(missing.values()))
        hint = f"apt-get install -y {' '.join(list_missing_packages() if 'docker.io' in packages else packages)}"
        raise LabError(f"missing: {', '.join(missing)} (Debian packages: {', '.join(packages)})", place="lab", hint=hint)


def list_missing_packages() -> list[str]:
    """Return the Debian packages that a lab with engines, and building its images, need and this machine lacks."""
    return sorted(set(_find_missing_programs(None, ("swarm", "base image")).values()))


def _find_missing_programs(engine_folder: Path | None, components: Collection[str]) -> dict[str, str]:
    """Return the programs that this machine lacks for a lab with `components`, and the Debian package of each."""
    packages_by_program = {
        program: package for component in components for program, package in _PROGRAMS_BY_COMPONENT[component].items()
    } | _COMMON_PROGRAMS
    search_path = build_search_path(engine_folder)
    return {program: package for program, package in packages_by_program.items() if not shutil.which(program, path=search_path)}


def check_root() -> None:
    """Check that the user is root. Raises LabError if not."""
    if os.geteuid() != 0:
        command = f"sudo {shutil.which('swarmtrain') or 'swarmtrain'} lab …"
        raise LabError("only root can create network namespaces and start Docker engines", place="lab", hint=command)
