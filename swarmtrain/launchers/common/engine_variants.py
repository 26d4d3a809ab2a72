"""Warnings about kinds of Docker engines on which runs are not tested: Docker Desktop, rootless engines, and engines with SELinux."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmtrain.launchers.base import Finding

_DESKTOP = "Docker Desktop"


def collect_findings(engine_info: Mapping[str, Any], place: str, *, uses_overlay: bool, uses_mounts: bool) -> list[Finding]:
    """Return the warnings about the engine whose answer to `GET /info` is `engine_info`.

    `uses_overlay`: the run uses an overlay network between machines; `uses_mounts`: it mounts folders of its hosts.
    """
    options = {str(option).partition(",")[0] for option in engine_info.get("SecurityOptions") or []}
    findings = []
    if engine_info.get("OperatingSystem") == _DESKTOP:
        message = f"is {_DESKTOP}, on which runs are not tested: its containers run in a virtual machine"
        hint = "use Docker Engine on Linux, or train on this machine without Docker: runner.runner_type: local"
        why = "other machines cannot reach the containers, and only shared folders can be mounted"
        findings.append(Finding(place, message, hint, fatal=False, why=why))
    if "name=rootless" in options and uses_overlay:
        message = "is rootless, and Docker does not support overlay networks on rootless engines"
        findings.append(Finding(place, message, "use an engine that runs as root, or runner.runner_type: ssh", fatal=False))
    if "name=selinux" in options and uses_mounts:
        message = "uses SELinux, which denies containers the access to folders that are not labelled for them"
        hint = "chcon --recursive --type container_file_t FOLDER, for each folder in docker_mounts, on each host"
        findings.append(Finding(place, message, hint, fatal=False))
    return findings
