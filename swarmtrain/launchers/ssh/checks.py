"""What must be so on the hosts of a run before it is worth starting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from swarmtrain import __version__
from swarmtrain.config.runner import RunnerType
from swarmtrain.errors import HostError
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.ssh.host import Host, Team
from swarmtrain.launchers.ssh.specs import sudo_docker
from swarmtrain.plan import Plan

_CLOCKS = 5.0
_COMMAND = 30.0


def findings(plan: Plan, team: Team, *, ports: tuple[int, ...]) -> list[Finding]:
    """Return what each host lacks; `ports` must be free on the first. Raises nothing for a host that cannot be reached."""
    docker = plan.config.runner.runner_type is RunnerType.pdsh_docker
    board = plan.nodes[0].host

    def look(host: Host) -> list[Finding]:
        before = time.time()
        facts = host.ask("facts", cwd=str(Path.cwd()), ports=ports if host.name == board else ())
        found = _of_facts(host.name, facts, (before + time.time()) / 2)
        return found + (_docker(host, plan) if docker else _python(host, team.python(host.name), plan.config.runner.env))

    done, failed = team.tried(look)
    found = [Finding(str(error.place), error.message, error.hint) for error in failed.values()]
    found += [each for some in done.values() for each in some]
    return [*found, *([] if failed or docker else _save_dir(plan, team))]


def _of_facts(name: str, facts: dict[str, Any], now: float) -> list[Finding]:
    place = f"host {name}"
    found = []
    if facts["taken"]:
        ports = ", ".join(map(str, facts["taken"]))
        found.append(
            Finding(place, f"something listens at port {ports} already, and the run needs it", "choose another: runner.master_port")
        )
    if abs(facts["time"] - now) > _CLOCKS:
        hint = "timedatectl set-ntp true"
        found.append(Finding(place, f"its clock is {facts['time'] - now:+.0f} s off ours: logs will be out of order", hint, fatal=False))
    if not facts["cwd"]:
        message = f"has no folder {Path.cwd()}: there, relative paths are from the home of its user"
        found.append(Finding(place, message, "absolute paths mean the same everywhere", fatal=False))
    return found


def _python(host: Host, python: str, env: dict[str, str]) -> list[Finding]:
    place = f"host {host.name}"
    proof = host.ask("prove", argv=[python], env=env)
    if "error" in proof:
        return [
            Finding(place, f"{python} cannot import swarmtrain: {proof['error']}", f"{python} -m pip install 'swarmtrain[train]' there")
        ]
    found = []
    if proof["swarmtrain"] != __version__:
        message = f"has swarmtrain {proof['swarmtrain']}, and this is {__version__}"
        found.append(Finding(place, message, "the same version everywhere: runner.python chooses the interpreter"))
    if not proof["torch"]:
        found.append(
            Finding(place, f"{python} cannot find torch, and ranks run in it", f"{python} -m pip install 'swarmtrain[train]' there")
        )
    return found


def _docker(host: Host, plan: Plan) -> list[Finding]:
    argv = [*sudo_docker(plan), "version", "--format", "{{.Server.Version}}"]
    done = host.ask("command", argv=argv, seconds=_COMMAND)
    if done["code"] == 0:
        return []
    said = done["output"].strip().splitlines()
    hint = (
        f"its user must be in the group docker, or sudo without a password: runner.docker_config.docker_sudo ({' '.join(argv)} shows more)"
    )
    return [Finding(f"host {host.name}", said[-1] if said else "docker does not answer", hint)]


def _save_dir(plan: Plan, team: Team) -> list[Finding]:
    """Return a note if hosts do not see what another writes into save_dir: then each has a part of the checkpoints."""
    folder = plan.config.trainer.save_dir
    hosts = list(team.hosts)
    if folder is None or len(hosts) == 1:
        return []
    mark = str(Path.cwd() / folder / f".swarmtrain-seen-{uuid4().hex}")
    first = team.hosts[hosts[0]]
    try:
        if not first.ask("mark", path=mark, do="make"):
            return []
        seen = team.each(lambda host: bool(host.ask("mark", path=mark, do="look")))
        first.ask("mark", path=mark, do="remove")
    except HostError:
        return []
    if alone := [name for name, sees in seen.items() if not sees]:
        message = f"is another folder on {', '.join(alone)} than on {hosts[0]}: each disk will have its own checkpoints"
        return [Finding(f"save_dir {folder}", message, "a folder that all hosts share", fatal=False)]
    return []
