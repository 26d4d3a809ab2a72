"""Pull the image on the hosts of a run before any container starts, with the registry login of the user who deploys."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from swarmtrain.atomic_file import SECRET_MODE
from swarmtrain.errors import ImageError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.ssh.host_connections import Host, HostGroup
from swarmtrain.launchers.ssh.process_specs import build_docker_argv
from swarmtrain.planning.plan import Plan

_PULL_TIMEOUT_SECONDS = 3600.0
_INSPECT_TIMEOUT_SECONDS = 60.0
_LOGIN_FILE = "docker/config.json"
_DOCKER_HUB_REGISTRY = "https://index.docker.io/v1/"


def pull_image(plan: Plan, host_group: HostGroup, hosts: list[str], report_progress: ProgressReporter) -> dict[str, ImageError]:
    """Pull the image on all `hosts` in parallel. A host on which the pull fails uses its local copy of the image.

    Return the errors, by host, of the hosts on which the pull failed that have no local copy.
    """
    image, docker = plan.config.runner.docker_config.docker_container, build_docker_argv(plan)
    report_progress(f"pulling {image}")
    login = _build_registry_login(image)

    def pull_image_on_host(host: Host) -> str:
        result = _pull_image_with_login(host, plan.run, [*docker], image, login)
        if result["exit_code"] == 0:
            return ""
        inspection = host.call_agent(
            "run_command", argv=[*docker, "image", "inspect", image], seconds=_INSPECT_TIMEOUT_SECONDS, timeout=_INSPECT_TIMEOUT_SECONDS
        )
        if inspection["exit_code"] == 0:
            report_progress(f"{host.name} could not pull {image}; using its local copy")
            return ""
        return str(result["output"]).strip() or f"exit code {result['exit_code']}"

    def build_error(name: str, output: str) -> ImageError:
        hint = f"run docker login on this machine, or on {name}; to see the complete error, run: ssh {name} docker pull {image}"
        return ImageError(output.splitlines()[-1], place=f"host {name}", hint=hint)

    outputs = host_group.run_on_hosts(pull_image_on_host, hosts)
    return {name: build_error(name, output) for name, output in outputs.items() if output}


def _pull_image_with_login(host: Host, run: str, docker_argv: list[str], image: str, login: str) -> dict[str, object]:
    """Pull the image on `host`, and return the exit code and output of the pull.

    The registry login is `login`, which is stored on the host only during the pull; if `login` is empty, the host's own login is used.
    """
    if not login:
        return dict(
            host.call_agent(
                "run_command", argv=[*docker_argv, "pull", "--quiet", image], seconds=_PULL_TIMEOUT_SECONDS, timeout=_PULL_TIMEOUT_SECONDS
            )
        )
    host.call_agent("write_files", run=run, files={_LOGIN_FILE: (login, SECRET_MODE)})
    try:
        folder = str(Path(host.call_agent("inspect_run", run=run)["path"]) / _LOGIN_FILE).removesuffix("/config.json")
        argv = [*docker_argv, "--config", folder, "pull", "--quiet", image]
        return dict(host.call_agent("run_command", argv=argv, seconds=_PULL_TIMEOUT_SECONDS, timeout=_PULL_TIMEOUT_SECONDS))
    finally:
        host.call_agent("delete_files", run=run, names=[_LOGIN_FILE])


def _build_registry_login(image: str) -> str:
    """Return a base64-encoded Docker config.json with only this machine's login for the image's registry; empty if there is none.

    Logins that a credential helper stores are not used.
    """
    first_part = image.partition("/")[0]
    registry = (
        first_part if "/" in image and ("." in first_part or ":" in first_part or first_part == "localhost") else _DOCKER_HUB_REGISTRY
    )
    path = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"
    try:
        auth = json.loads(path.read_text(encoding="utf-8"))["auths"][registry]["auth"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return base64.b64encode(json.dumps({"auths": {registry: {"auth": auth}}}).encode()).decode()
