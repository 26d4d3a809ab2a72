"""Check the hosts of a run over SSH before the run starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from swarmtrain import __version__
from swarmtrain.errors import HostError
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.ssh.host_connections import Host, HostGroup
from swarmtrain.launchers.ssh.process_specs import build_docker_argv
from swarmtrain.planning.plan import Plan

_MAX_CLOCK_OFFSET_SECONDS = 5.0
_COMMAND_TIMEOUT_SECONDS = 30.0


def collect_findings(plan: Plan, host_group: HostGroup, *, ports: tuple[int, ...]) -> list[Finding]:
    """Return the findings about each host; the ports `ports` must be free on the first host.

    An unreachable host is a finding, not an error.
    """
    uses_docker = plan.config.runner.capabilities.runs_in_containers
    coordinator_host = plan.nodes[0].host

    def check_host(host: Host) -> list[Finding]:
        started_at = time.time()
        host_info = host.call_agent("describe_host", cwd=str(Path.cwd()), ports=ports if host.name == coordinator_host else ())
        findings = _check_machine(host.name, host_info, (started_at + time.time()) / 2)
        return findings + (
            _check_docker(host, plan)
            if uses_docker
            else _check_interpreter(host, host_group.get_interpreter(host.name), plan.config.runner.env)
        )

    results, failed = host_group.collect_results_and_errors(check_host)
    findings = [Finding(str(error.place), error.message, error.hint, host=name) for name, error in failed.items()]
    findings += [finding for host_findings in results.values() for finding in host_findings]
    return [*findings, *([] if failed or uses_docker else _check_shared_save_dir(plan, host_group))]


def _check_machine(name: str, host_info: dict[str, Any], expected_time: float) -> list[Finding]:
    place = f"host {name}"
    findings = []
    if host_info["taken_ports"]:
        ports = ", ".join(map(str, host_info["taken_ports"]))
        findings.append(
            Finding(place, f"another process listens on port {ports}, which the run needs", "set runner.master_port to a free port")
        )
    if abs(host_info["time"] - expected_time) > _MAX_CLOCK_OFFSET_SECONDS:
        hint = "timedatectl set-ntp true"
        findings.append(
            Finding(
                place,
                f"its clock differs from this machine's clock by {host_info['time'] - expected_time:+.0f} s: logs will be out of order",
                hint,
                fatal=False,
            )
        )
    if not host_info["cwd"]:
        message = f"the folder {Path.cwd()} does not exist: relative paths are resolved against the user's home folder"
        findings.append(Finding(place, message, "use absolute paths, which refer to the same folder on every host", fatal=False))
    return findings


def _check_interpreter(host: Host, interpreter: str, env: dict[str, str]) -> list[Finding]:
    place = f"host {host.name}"
    result = host.call_agent("check_interpreter", argv=[interpreter], env=env)
    if "error" in result:
        return [
            Finding(
                place,
                f"{interpreter} cannot import swarmtrain: {result['error']}",
                f"{interpreter} -m pip install 'swarmtrain[train]' on that host",
                host=host.name,
            )
        ]
    findings = []
    if result["swarmtrain"] != __version__:
        message = f"has swarmtrain {result['swarmtrain']}, but this machine has {__version__}"
        hint = "install the same version on all hosts, or select another interpreter with runner.python"
        findings.append(Finding(place, message, hint, host=host.name))
    if not result["torch"]:
        findings.append(
            Finding(
                place,
                f"{interpreter} cannot find torch, which the ranks need",
                f"{interpreter} -m pip install 'swarmtrain[train]' on that host",
                host=host.name,
            )
        )
    return findings


def _check_docker(host: Host, plan: Plan) -> list[Finding]:
    argv = [*build_docker_argv(plan), "version", "--format", "{{.Server.Version}}"]
    result = host.call_agent("run_command", argv=argv, seconds=_COMMAND_TIMEOUT_SECONDS)
    if result["exit_code"] == 0:
        return []
    output_lines = result["output"].strip().splitlines()
    hint = (
        f"add the SSH user to the group docker, or allow passwordless sudo and set runner.docker_config.docker_sudo; to see the error, run "
        f"{' '.join(argv)}"
    )
    message = output_lines[-1] if output_lines else "cannot connect to the Docker daemon"
    return [Finding(f"host {host.name}", message, hint, host=host.name)]


def _check_shared_save_dir(plan: Plan, host_group: HostGroup) -> list[Finding]:
    """Return a finding if save_dir is not shared: each host would then store only the checkpoint files of its own ranks."""
    folder = plan.config.trainer.save_dir
    hosts = list(host_group.hosts)
    if folder is None or len(hosts) == 1:
        return []
    marker = str(Path.cwd() / folder / f".swarmtrain-seen-{uuid4().hex}")
    first_host = host_group.hosts[hosts[0]]
    try:
        if not first_host.call_agent("update_marker", path=marker, action="create"):
            return []
        visible = host_group.run_on_hosts(lambda host: bool(host.call_agent("update_marker", path=marker, action="check")))
        first_host.call_agent("update_marker", path=marker, action="remove")
    except HostError:
        return []
    if hosts_without_marker := [name for name, is_visible in visible.items() if not is_visible]:
        message = f"is a different folder on {', '.join(hosts_without_marker)} than on {hosts[0]}: each host will have its own checkpoints"
        return [Finding(f"save_dir {folder}", message, "use a folder that all hosts share", fatal=False)]
    return []
