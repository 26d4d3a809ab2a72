"""The image on the hosts of a run: pulled before anything starts, with the registry login of whoever deploys."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from swarmtrain.errors import ImageError
from swarmtrain.host.hand import SECRET
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.ssh.host import Host, Team
from swarmtrain.launchers.ssh.specs import sudo_docker
from swarmtrain.plan import Plan

_PULLED_WITHIN = 3600.0
_LOOKED_WITHIN = 60.0
_LOGIN = "docker/config.json"
_HUB = "https://index.docker.io/v1/"


def pull(plan: Plan, team: Team, hosts: list[str], say: Say) -> None:
    """Pull the image on all `hosts` side by side. One that has it, and cannot pull, goes on with what it has. Raises ImageError."""
    image, docker = plan.config.runner.docker_config.docker_container, sudo_docker(plan)
    say(f"pulling {image}")
    login = _login(image)

    def pulled(host: Host) -> str:
        done = _pull(host, plan.run, [*docker], image, login)
        if done["code"] == 0:
            return ""
        there = host.ask("command", argv=[*docker, "image", "inspect", image], seconds=_LOOKED_WITHIN, within=_LOOKED_WITHIN)
        if there["code"] == 0:
            say(f"{host.name} could not pull {image}, and goes on with the one that it has")
            return ""
        return str(done["output"]).strip() or f"exit code {done['code']}"

    for name, error in team.each(pulled, hosts).items():
        if error:
            hint = f"docker login on this machine, or on {name}; ssh {name} docker pull {image} shows more"
            raise ImageError(error.splitlines()[-1], place=f"host {name}", hint=hint)


def _pull(host: Host, run: str, docker: list[str], image: str, login: str) -> dict[str, object]:
    """Pull with the host's own login, or with ours, which lies there as a file for so long."""
    if not login:
        return dict(host.ask("command", argv=[*docker, "pull", "--quiet", image], seconds=_PULLED_WITHIN, within=_PULLED_WITHIN))
    host.ask("put", run=run, files={_LOGIN: (login, SECRET)})
    try:
        folder = str(Path(host.ask("look", run=run)["path"]) / _LOGIN).removesuffix("/config.json")
        argv = [*docker, "--config", folder, "pull", "--quiet", image]
        return dict(host.ask("command", argv=argv, seconds=_PULLED_WITHIN, within=_PULLED_WITHIN))
    finally:
        host.ask("drop", run=run, names=[_LOGIN])


def _login(image: str) -> str:
    """Return a docker config with this machine's login for the image's registry alone, in base64; empty if it has none in its file.

    What a credential helper keeps stays with it.
    """
    first = image.partition("/")[0]
    registry = first if "/" in image and ("." in first or ":" in first or first == "localhost") else _HUB
    path = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"
    try:
        auth = json.loads(path.read_text(encoding="utf-8"))["auths"][registry]["auth"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return base64.b64encode(json.dumps({"auths": {registry: {"auth": auth}}}).encode()).decode()
