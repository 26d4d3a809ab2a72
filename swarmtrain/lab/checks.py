"""Can this machine host a lab? Each reason why not has its own error and its own way out."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from swarmtrain.errors import LabError

_ENGINE = {
    "dockerd": "docker.io",
    "containerd": "docker.io",
    "runc": "docker.io",
    "docker-registry": "docker-registry",
    "iptables": "iptables",
}
_PROGRAMS = {
    "swarm": _ENGINE,
    "docker": _ENGINE,
    "ssh": {"sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"},
    "slurm": {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"},
}
_ALWAYS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setsid": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_APT = "apt-get install -y docker.io docker-registry mmdebstrap iproute2 iptables"


def search_path(engine: Path | None) -> str:
    """Return the PATH of a lab's programs: the engine's own directory first, the system's sbin directories last."""
    own = [str(engine)] if engine else []
    return os.pathsep.join([*own, os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def check_machine(engine: Path | None, parts: Collection[str]) -> None:
    """Raise LabError unless this is Linux, we are root, and every program that a lab of these `parts` takes is there."""
    if sys.platform != "linux":
        raise LabError("a lab needs Linux's namespaces, and this is not Linux", place="lab", hint="run it in a Linux virtual machine")
    check_root()
    if engine and not os.access(engine / "dockerd", os.X_OK):
        raise LabError(
            f"{engine} holds no program dockerd", place="lab --engine", hint="give the directory that holds dockerd and containerd"
        )
    wanted = {program: package for part in parts for program, package in _PROGRAMS[part].items()} | _ALWAYS
    missing = [program for program in wanted if not shutil.which(program, path=search_path(engine))]
    if missing:
        packages = sorted({wanted[program] for program in missing})
        hint = _APT if "docker.io" in packages else f"apt-get install -y {' '.join(packages)}"
        raise LabError(f"missing: {', '.join(missing)} (Debian packages: {', '.join(packages)})", place="lab", hint=hint)


def check_root() -> None:
    """Raise LabError unless we are root."""
    if os.geteuid() != 0:
        command = f"sudo {shutil.which('swarmtrain') or 'swarmtrain'} lab …"
        raise LabError("only root may make network namespaces and start Docker engines", place="lab", hint=command)
