"""The image on the hosts of a run: pulled before anything starts, with the credentials of whoever deploys."""

from __future__ import annotations

from swarmtrain.errors import ImageError
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.ssh.host import Host, Team
from swarmtrain.launchers.ssh.specs import sudo_docker
from swarmtrain.plan import Plan

_PULLED_WITHIN = 3600.0
_LOOKED_WITHIN = 60.0


def pull(plan: Plan, team: Team, hosts: list[str], say: Say) -> None:
    """Pull the image on all `hosts` side by side. One that has it, and cannot pull, goes on with what it has. Raises ImageError."""
    image, docker = plan.config.runner.docker_config.docker_container, sudo_docker(plan)
    say(f"pulling {image}")

    def pulled(host: Host) -> str:
        done = host.ask("command", argv=[*docker, "pull", "--quiet", image], seconds=_PULLED_WITHIN, within=_PULLED_WITHIN)
        if done["code"] == 0:
            return ""
        there = host.ask("command", argv=[*docker, "image", "inspect", image], seconds=_LOOKED_WITHIN, within=_LOOKED_WITHIN)
        if there["code"] == 0:
            say(f"{host.name} could not pull {image}, and goes on with the one that it has")
            return ""
        return str(done["output"]).strip()

    for name, error in team.each(pulled, hosts).items():
        if error:
            hint = f"ssh {name} docker login REGISTRY, or docker pull {image} there, shows more"
            raise ImageError(error.splitlines()[-1], place=f"host {name}", hint=hint)
