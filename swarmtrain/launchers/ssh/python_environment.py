"""Check that the Python of each host of a run has what ranks need, in the same versions, and that ranks can communicate."""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from swarmtrain import __version__
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import HostSource
from swarmtrain.errors import ConfigError, HostError, Problem
from swarmtrain.launchers.base import Finding, ProgressReporter
from swarmtrain.launchers.ssh import resolve_host_address
from swarmtrain.launchers.ssh.host_connections import Host, HostGroup, connect_hosts, list_hosts

_TIMEOUT_SECONDS = 150.0
_PORT_RANGE, _PORT_CANDIDATES = range(20000, 29997), 16
_BACKEND_PROBE_SCRIPT = Path(__file__).parents[2] / "entrypoint" / "probe" / "backend_probe.py"


@dataclass
class EnvironmentReport:
    """Result of the check. str() formats it for the user."""

    python: str
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Probe result of each host's interpreter; empty for a host whose probe failed."""
    backend: str = ""
    """The backend whose all-reduce over all hosts was correct."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        """Whether runs can use the interpreter on all hosts."""
        return not any(finding.fatal for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict, for `--json`."""
        return {**asdict(self), "ok": self.is_usable}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("host", "python", "torch", "swarmtrain", "GPUs", "backends")]
        for name, facts in self.hosts.items():
            versions = (facts.get(key) or "-" for key in ("python", "torch", "swarmtrain"))
            rows.append((name, *versions, str(len(facts.get("gpus", ()))), ", ".join(facts.get("backends", ())) or "-"))
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.backend:
            count = len(self.hosts)
            lines.append(f"{self.backend}: all-reduce over {count} processes returned the correct sum {count * (count + 1) // 2}")
        for finding in self.findings:
            lines.append(f"{'error' if finding.fatal else 'warning'}: {finding.place}: {finding.message}")
            lines += [f"hint: {finding.hint}"] * bool(finding.hint)
        return "\n".join(lines)


def check_environment(runner: RunnerConfig, report_progress: ProgressReporter) -> EnvironmentReport:
    """Check runner.python, by default the path of the running interpreter, on all hosts, without changing them, and return the report.

    A problem of a host is a finding. Without findings, one process on each host runs an all-reduce. Raises ConfigError if the ranks of the
    runner type do not use a Python of their hosts.
    """
    if runner.capabilities.hosts is not HostSource.over_ssh or runner.capabilities.runs_in_containers:
        reason = f"is {runner.runner_type}, but only runner_type ssh uses the Python of its hosts"
        raise ConfigError((Problem("runner.runner_type", reason, hint="check what a run needs with: swarmtrain doctor CONFIG"),))
    interpreter, names = runner.python or sys.executable, [host.name for host in list_hosts(runner)]
    with connect_hosts(names, dict.fromkeys(names, interpreter)) as host_group:
        results, errors = host_group.collect_results_and_errors(lambda host: _run_backend_probe(host, interpreter, runner, {}))
        report = EnvironmentReport(interpreter, {name: results.get(name, {}) for name in names})
        install_hint = f"run on that host: {_format_install_commands(interpreter, report.hosts)}"
        for name, error in errors.items():
            hint = f"{error.hint}, or {install_hint}" if interpreter in (error.hint or "") else error.hint
            report.findings.append(Finding(error.place or f"host {name}", error.message, hint))
        for name, result in results.items():
            for problem in [result["error"]] if "error" in result else result["problems"]:
                report.findings.append(Finding(f"host {name}", f"{interpreter}: {problem}", install_hint))
        report.findings += _find_version_differences(report.hosts, install_hint.replace("that host", "the hosts that differ"))
        if report.is_usable:
            backend = "nccl" if all(facts["gpus"] and "nccl" in facts["backends"] for facts in results.values()) else "gloo"
            report_progress(f"testing all-reduce with {backend} over {', '.join(names)}")
            if reason := _explain_failed_all_reduce(backend, runner, interpreter, host_group):
                report.findings.append(Finding(f"backend {backend}", reason, "ranks need a route to each other's ports: check firewalls"))
            else:
                report.backend = backend
    return report


def _format_install_commands(interpreter: str, hosts: dict[str, dict[str, Any]]) -> str:
    """Return the commands that install what is missing: with the versions of this machine, or torch's version on the first host."""
    torch_version = next((distribution.version for distribution in metadata.distributions(name="torch")), "")
    torch_version = torch_version or next((facts["torch"] for facts in hosts.values() if facts.get("torch")), "")
    packages = [f"swarmtrain[train]=={__version__}", f"torch=={torch_version.partition('+')[0]}" if torch_version else "torch"]
    folder, suffix = str(PurePosixPath(interpreter).parents[1]) if interpreter.count("/") > 1 else "/usr", ""
    if folder in ("/", "/usr", "/usr/local"):  # pip must not change a system's Python
        folder = "/opt/swarmtrain"
        suffix = f"; then set runner.python: {folder}/bin/python3"
    return f"uv venv --allow-existing {shlex.quote(folder)} && uv pip install --python {shlex.quote(folder)} {shlex.join(packages)}{suffix}"


def _run_backend_probe(host: Host, interpreter: str, runner: RunnerConfig, request: dict[str, Any]) -> dict[str, Any]:
    gpus = next((entry.gpus for entry in runner.host_entries if entry.name == host.name), ())
    env = {**runner.env, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
    argv = [interpreter, "-c", _BACKEND_PROBE_SCRIPT.read_text(encoding="utf-8"), json.dumps(request)]
    result = host.call_agent("run_command", timeout=2 * _TIMEOUT_SECONDS, argv=argv, seconds=_TIMEOUT_SECONDS, env=env)
    lines = [line for line in result["output"].splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"error": lines[-1] if lines else f"exit code {result['exit_code']}"}


def _find_version_differences(hosts: dict[str, dict[str, Any]], hint: str) -> Iterator[Finding]:
    """Yield a finding for each version difference between hosts. A difference in Python is less severe than one in torch."""
    for component in ("python", "swarmtrain", "torch", "cuda", "nccl"):
        versions = {name: facts[component] for name, facts in hosts.items() if facts.get(component)}
        if len(set(versions.values())) > 1:
            text = ", ".join(f"{version} on {name}" for name, version in versions.items())
            yield Finding(component, f"differs: {text}", hint, fatal=component != "python")


def _explain_failed_all_reduce(backend: str, runner: RunnerConfig, interpreter: str, host_group: HostGroup) -> str:
    """Run an all-reduce with one process on each host. Return the reason if it fails; empty if the result is correct."""
    names = list(host_group.hosts)
    # Random, so that two simultaneous tests do not collide.
    ports = [runner.master_port] if runner.master_port else random.sample(_PORT_RANGE, _PORT_CANDIDATES)
    try:
        facts = host_group.run_on_hosts(lambda host: host.call_agent("describe_host", ports=ports if host.name == names[0] else ()))
        if not (free_ports := [port for port in ports if port not in facts[names[0]]["taken_ports"]]):
            return f"another process listens on port {ports[0]} of {names[0]}: choose another with -o runner.master_port"
        store_address = f"{resolve_host_address(runner, names[0], facts)}:{free_ports[0]}"
        group = {"backend": backend, "world_size": len(names), "store_address": store_address, "interface": runner.interface or ""}
        results = host_group.run_on_hosts(
            lambda host: _run_backend_probe(host, interpreter, runner, {**group, "rank": names.index(host.name)})
        )
    except HostError as error:
        return str(error)
    correct = len(names) * (len(names) + 1) / 2
    wrong = {
        name: result.get("error") or f"got the sum {result['sum']}" for name, result in results.items() if result.get("sum") != correct
    }
    return "; ".join(f"{name}: {reason}" for name, reason in wrong.items())
