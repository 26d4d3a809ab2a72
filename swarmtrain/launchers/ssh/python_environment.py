"""Build the same Python environment on all hosts of a run from pinned packages, and test its collective backends."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from swarmtrain import __version__
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import HostSource
from swarmtrain.config.user_files import read_regular_file
from swarmtrain.errors import ConfigError, HostError, Problem, SwarmtrainError
from swarmtrain.images.wheels import build_swarmtrain_wheel
from swarmtrain.launchers.base import Finding, ProgressReporter
from swarmtrain.launchers.ssh import resolve_host_address
from swarmtrain.launchers.ssh.host_connections import LOCALHOST, Host, HostGroup, connect_hosts, list_hosts

BACKENDS = ("gloo", "nccl", "mpi")
_PIN_PATTERN = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w.,-]+\])?==([\w.!+-]+)(?:\s*;.*)?")
_DEFAULT_ENVIRONMENT_FOLDER = Path("~/.local/share/swarmtrain/env")
_CHUNK_BYTES = 8 << 20
_BUILD_TIMEOUT_SECONDS = 7200.0
_VERIFY_TIMEOUT_SECONDS = 150.0
_RETRY_SECONDS = 1.0
_PORT_RANGE = range(20000, 29997)
_PORT_CANDIDATES = 16
_BACKEND_PROBE_SCRIPT = Path(__file__).parents[2] / "entrypoint" / "probe" / "backend_probe.py"


@dataclass(frozen=True)
class PinnedRequirements:
    """Packages of an environment: pinned requirements for pip, and wheels to upload. pip uses a package index only with `use_index`."""

    lines: tuple[str, ...]
    wheels: tuple[Path, ...] = ()
    use_index: bool = True

    @property
    def digest(self) -> str:
        """Digest of the requirements and wheels."""
        parts = [*self.lines, str(self.use_index), *(f"{path.name} {sha256(path.read_bytes()).hexdigest()}" for path in self.wheels)]
        return sha256("\n".join(parts).encode()).hexdigest()


@dataclass
class EnvironmentReport:
    """Result of building or checking the environment. str() formats it for the user."""

    python: str
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Probe result of each host's interpreter; empty for a host whose probe failed."""
    verified: dict[str, str] = field(default_factory=dict)
    """Result of each backend: empty if the all-reduce over all hosts was correct, else the reason why it is not verified."""
    findings: list[Finding] = field(default_factory=list)
    configured: bool = False
    """Whether the config already names this interpreter."""

    @property
    def is_usable(self) -> bool:
        """Whether runs can use the environment."""
        return not any(finding.fatal for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dict, for `--json`."""
        return {**asdict(self), "ok": self.is_usable}

    def __str__(self) -> str:
        return "\n".join(self._format_table_lines())

    def _format_table_lines(self) -> Iterator[str]:
        rows: list[tuple[str, ...]] = [("host", "python", "torch", "GPUs", *BACKENDS)]
        for name, host_info in self.hosts.items():
            cells = [host_info.get("python", ""), host_info.get("torch", ""), str(len(host_info.get("gpus", ()))) if host_info else ""]
            rows.append((name, *(cell or "-" for cell in cells), *(self._format_cell(host_info, backend) for backend in BACKENDS)))
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        yield from ("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        world_size = len(self.hosts)
        for backend, why in self.verified.items():
            yield (
                f"{backend} is not verified: {why}"
                if why
                else f"{backend}: all-reduce over {world_size} processes returned the correct sum {world_size * (world_size + 1) // 2}"
            )
        for finding in self.findings:
            yield f"{'error' if finding.fatal else 'warning'}: {finding.place}: {finding.message}"
            yield from [f"hint: {finding.hint}"] * bool(finding.hint)
        if self.configured:
            yield f"already in the config: runner.python is {self.python}"
        elif self.is_usable:
            yield f"add to the config:\nrunner:\n  python: {self.python}"

    def _format_cell(self, host_info: dict[str, Any], backend: str) -> str:
        if backend not in host_info.get("backends", ()):
            return "no" if host_info else "-"
        return "not verified" if self.verified[backend] else "ok"


def resolve_interpreter(runner: RunnerConfig, environment_path: str | None, *, check_only: bool) -> str:
    """Return the path of the environment's interpreter: in `environment_path`, if set; else runner.python, if set; else a default.

    The default is ~/.local/share/swarmtrain/env/bin/python3; with `check_only`, it is the running interpreter. Raises ConfigError if the
    runner type does not support environments or, without `check_only`, if runner.python does not end with bin/python3.
    """
    if runner.capabilities.hosts is not HostSource.over_ssh or runner.capabilities.runs_in_containers:
        hint = "for a runner_type with containers, build an image with: swarmtrain image build"
        raise ConfigError(
            (
                Problem(
                    "runner.runner_type",
                    f"is {runner.runner_type}, but a Python environment on the hosts requires runner_type ssh",
                    hint=hint,
                ),
            )
        )
    if environment_path:
        return str(PurePosixPath(environment_path) / "bin" / "python3")
    if check_only or not runner.python:
        return runner.python or (sys.executable if check_only else str(_DEFAULT_ENVIRONMENT_FOLDER.expanduser() / "bin" / "python3"))
    if PurePosixPath(runner.python).parts[-2:] != ("bin", "python3"):
        raise ConfigError(
            (
                Problem(
                    "runner.python",
                    f"{runner.python} is not in an environment (expected PATH/bin/python3)",
                    hint="set the environment's folder with --path",
                ),
            )
        )
    return runner.python


def build_environment(
    runner: RunnerConfig,
    environment_interpreter: str,
    requirements: Path | None,
    wheels_folder: Path | None,
    *,
    host_interpreter: str,
    report_progress: ProgressReporter,
) -> EnvironmentReport:
    """Build a virtual environment on each host with `host_interpreter`, verify it, and return the report.

    `environment_interpreter` is the path of the interpreter in the environment. The environment contains the pinned packages in
    `requirements`; by default, the packages of the running interpreter. A failure on a host is a finding in the report. Raises
    SwarmtrainError if the pins are invalid.
    """
    names = [host.name for host in list_hosts(runner)]
    lines = read_requirements(requirements) if requirements else freeze_installed_packages()
    with tempfile.TemporaryDirectory() as folder, connect_hosts(names, dict.fromkeys(names, host_interpreter)) as host_group:
        failed = _build_environment_on_hosts(
            host_group,
            str(PurePosixPath(environment_interpreter).parents[1]),
            pin_requirements(lines, wheels_folder, Path(folder) / "wheel", report_progress),
            host_interpreter,
            report_progress,
        )
        return verify_environment(runner, environment_interpreter, host_group, report_progress, failed)


def check_environment(runner: RunnerConfig, interpreter: str, report_progress: ProgressReporter) -> EnvironmentReport:
    """Verify `interpreter` on all hosts, without changing the hosts, and return the report."""
    names = [host.name for host in list_hosts(runner)]
    with connect_hosts(names, dict.fromkeys(names, interpreter)) as host_group:
        return verify_environment(runner, interpreter, host_group, report_progress, {})


def verify_environment(
    runner: RunnerConfig, interpreter: str, host_group: HostGroup, report_progress: ProgressReporter, errors_by_host: dict[str, HostError]
) -> EnvironmentReport:
    """Probe `interpreter` and test the collective backends on all hosts, and return the report.

    Hosts in `errors_by_host` are not probed; their errors become findings in the report.
    """
    report = EnvironmentReport(interpreter, configured=runner.python == interpreter)
    results, unreachable = host_group.collect_results_and_errors(
        lambda host: _run_backend_probe(host, interpreter, runner, {}), host_group.hosts.keys() - errors_by_host
    )
    report.hosts = {name: {} if "error" in results.get(name, {"error": ""}) else results[name] for name in host_group.hosts}
    for name, error in (errors_by_host | unreachable).items():
        report.findings.append(Finding(error.place or f"host {name}", error.message, error.hint))
    for name, host_info in results.items():
        for problem in [host_info["error"]] if "error" in host_info else host_info["problems"]:
            hint = "add the package to --requirements FILE, and build the environment with swarmtrain env, without --check"
            report.findings.append(Finding(f"host {name}", f"{interpreter}: {problem}", hint))
    report.findings += _find_version_differences(report.hosts)
    for backend in BACKENDS:
        why = _find_backend_incompatibility(backend, report.hosts)
        if not why:
            report_progress(f"testing all-reduce with {backend} over {', '.join(host_group.hosts)}")
            why = _verify_backend(backend, runner, interpreter, host_group)
            report.findings += [
                Finding(f"backend {backend}", why, "measure the links between hosts with: swarmtrain doctor CONFIG")
            ] * bool(why)
        report.verified[backend] = why
    return report


def read_requirements(file: Path) -> tuple[str, ...]:
    """Return the pinned requirements in a file. Raises SwarmtrainError for a line that is not a pin."""
    lines = []
    try:
        text = read_regular_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SwarmtrainError(str(getattr(error, "strerror", None) or error).lower(), place=str(file)) from None
    for number, line in enumerate(text.splitlines(), 1):
        pin = re.sub(r"(^|\s)#.*", "", line).strip()
        if pin and not _PIN_PATTERN.fullmatch(pin):
            hint = "write each line as NAME==VERSION, as pip freeze does, so that all hosts always get the same versions"
            raise SwarmtrainError(f"{pin!r} does not pin a version", place=f"{file}:{number}", hint=hint)
        lines += [pin] if pin else []
    return tuple(lines)


def freeze_installed_packages() -> tuple[str, ...]:
    """Return the pins of all packages of the running interpreter. Raises SwarmtrainError if one was not installed from an index."""
    pins: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.name).lower()
        if name in pins or name == "pip":
            continue
        if name != "swarmtrain" and distribution.read_text("direct_url.json"):
            hint = "list the packages for the hosts in --requirements FILE, and put those that no index has into --wheels DIR"
            raise SwarmtrainError(
                f"{distribution.name} was installed from a file or a folder, so its version cannot be pinned", place="pip freeze", hint=hint
            )
        pins[name] = f"{name}=={distribution.version}"
    return tuple(sorted({**pins, "swarmtrain": f"swarmtrain=={__version__}"}.values()))


def pin_requirements(
    requirements: Sequence[str], wheels_folder: Path | None, output_folder: Path, report_progress: ProgressReporter
) -> PinnedRequirements:
    """Return the pinned requirements to install. The running version of swarmtrain is built as a wheel into `output_folder`.

    The wheels in `wheels_folder`, if set, replace the package index. Raises SwarmtrainError if the folder contains no wheels.
    """
    wheel_files = sorted(wheels_folder.glob("*.whl")) if wheels_folder else []
    if wheels_folder and not wheel_files:
        raise SwarmtrainError(
            "contains no wheels (*.whl)", place=str(wheels_folder), hint=f"pip download --no-deps -r REQUIREMENTS_FILE -d {wheels_folder}"
        )
    if (own_requirement := f"swarmtrain=={__version__}") in requirements:
        build_swarmtrain_wheel(output_folder, report_progress=report_progress)
        wheel = next(output_folder.glob("*.whl"))
        wheel_files = [*(path for path in wheel_files if path.name != wheel.name), wheel]
        requirements = [f"./{wheel.name}" if line == own_requirement else line for line in requirements]
    return PinnedRequirements(tuple(requirements), tuple(wheel_files), use_index=wheels_folder is None)


def _build_environment_on_hosts(
    host_group: HostGroup,
    environment_path: str,
    pinned_requirements: PinnedRequirements,
    host_interpreter: str,
    report_progress: ProgressReporter,
) -> dict[str, HostError]:
    """Build the environment on each host that lacks it. Return the errors of hosts on which it could not be built."""
    owner, digest = f"process {os.getpid()} on {socket.gethostname()}", pinned_requirements.digest
    failed: dict[str, HostError] = {}
    known_holders: dict[str, str] = {}

    def build_environment_on_host(host: Host) -> str:
        started_at = time.monotonic()
        status = host.call_agent("claim_venv", path=environment_path, python=host_interpreter, digest=digest, owner=owner)
        if status["holder"]:
            return str(status["holder"])
        if status["current"]:
            report_progress(f"{host.name} already has the environment")
            return ""
        for wheel in pinned_requirements.wheels:
            with wheel.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    content = base64.b64encode(chunk).decode()
                    host.call_agent(
                        "write_wheel_chunk", path=environment_path, name=wheel.name, offset=file.tell() - len(chunk), content=content
                    )
        arguments = {
            "path": environment_path,
            "python": host_interpreter,
            "key": status["key"],
            "requirements": pinned_requirements.lines,
            "use_index": pinned_requirements.use_index,
        }
        if failure := host.call_agent("build_venv", timeout=_BUILD_TIMEOUT_SECONDS, **arguments):
            raise HostError(
                "\n  ".join([failure["error"], *failure["output"].splitlines()]),
                place=f"host {host.name}",
                hint=_suggest_build_fix(failure["output"]),
            )
        report_progress(f"{host.name} has the environment after {time.monotonic() - started_at:.0f} s")
        return ""

    waiting = list(host_group.hosts)
    while waiting:
        holder_by_host, errors = host_group.collect_results_and_errors(build_environment_on_host, waiting)
        for name, error in errors.items():
            report_progress(f"{name} does not have the environment: {error.message.splitlines()[0]}")
        for name in holder_by_host.keys() - known_holders.keys():
            if holder_by_host[name]:
                report_progress(f"{name}: waiting for another command that builds the environment there: {holder_by_host[name]}")
        failed |= errors
        known_holders |= {name: holder for name, holder in holder_by_host.items() if holder}
        waiting = [name for name, holder in holder_by_host.items() if holder]
        time.sleep(_RETRY_SECONDS if waiting else 0)
    return failed


def _suggest_build_fix(output: str) -> str:
    if "ensurepip" in output:
        return "install the system package python3-venv on that host, or choose another interpreter with --python"
    if "requires" in output and "which is not installed" in output:
        return "add every package's dependencies to the list, for example with pip freeze in an environment that works"
    return (
        "check the package index with pip config list on that host, or use --wheels DIR, which needs no index; the "
        "previous environment stays in use"
    )


def _run_backend_probe(
    host: Host, interpreter: str, runner: RunnerConfig, request: dict[str, Any], launch_prefix: Sequence[str] = ()
) -> dict[str, Any]:
    gpus = next((entry.gpus for entry in runner.host_entries if entry.name == host.name), ())
    env = {**runner.env, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
    argv = [*launch_prefix, interpreter, "-c", _BACKEND_PROBE_SCRIPT.read_text(encoding="utf-8"), json.dumps(request)]
    result = host.call_agent("run_command", timeout=2 * _VERIFY_TIMEOUT_SECONDS, argv=argv, seconds=_VERIFY_TIMEOUT_SECONDS, env=env)
    lines = [line for line in result["output"].splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"error": lines[-1] if lines else f"exit code {result['exit_code']}"}


def _find_version_differences(probe_result_by_host: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yield a finding for each version difference between hosts. A difference in Python is less severe than one in torch."""
    for component in ("python", "swarmtrain", "torch", "cuda", "nccl"):
        version_by_host = {name: host_info[component] for name, host_info in probe_result_by_host.items() if host_info.get(component)}
        if len(set(version_by_host.values())) > 1:
            versions = ", ".join(f"{version} on {name}" for name, version in version_by_host.items())
            yield Finding(
                component,
                f"differs: {versions}",
                "build the same environment on all hosts with: swarmtrain env",
                fatal=component != "python",
            )


def _find_backend_incompatibility(backend: str, probe_result_by_host: dict[str, dict[str, Any]]) -> str:
    """Return the reason why `backend` cannot be tested on all hosts; empty if it can be tested."""
    hosts_by_obstacle = {
        "no probe result": [name for name, host_info in probe_result_by_host.items() if not host_info],
        "no torch": [name for name, host_info in probe_result_by_host.items() if not host_info.get("torch")],
        "no swarmtrain": [name for name, host_info in probe_result_by_host.items() if not host_info.get("swarmtrain")],
        f"torch is built without {backend}": [
            name for name, host_info in probe_result_by_host.items() if backend not in host_info.get("backends", ())
        ],
        "no GPU": [name for name, host_info in probe_result_by_host.items() if backend == "nccl" and not host_info.get("gpus")],
        "no mpirun": [name for name, host_info in probe_result_by_host.items() if backend == "mpi" and not host_info.get("mpirun")],
    }
    return next((f"{obstacle} on {', '.join(names)}" for obstacle, names in hosts_by_obstacle.items() if names), "")


def _verify_backend(backend: str, runner: RunnerConfig, interpreter: str, host_group: HostGroup) -> str:
    """Run an all-reduce with one process on each host. Return the reason if it fails; empty if the result is correct."""
    names, world_size = list(host_group.hosts), len(host_group.hosts)
    expected_sum = world_size * (world_size + 1) / 2
    # Random, so that two simultaneous tests do not collide.
    ports = [runner.master_port] if runner.master_port else random.sample(_PORT_RANGE, _PORT_CANDIDATES)
    try:
        host_info = host_group.run_on_hosts(lambda host: host.call_agent("describe_host", ports=ports if host.name == names[0] else ()))
        if not (free_ports := [port for port in ports if port not in host_info[names[0]]["taken_ports"]]):
            return f"another process listens on port {ports[0]} of {names[0]}: choose another with -o runner.master_port"
        store_address = f"{resolve_host_address(runner, names[0], host_info)}:{free_ports[0]}"
        question = {"backend": backend, "world_size": world_size, "store_address": store_address, "interface": runner.interface or ""}
        if backend == "mpi":
            launch = ["mpirun", "-n", str(world_size), *(["-host", ",".join(names)] if names != [LOCALHOST] else [])]
            results = {names[0]: _run_backend_probe(host_group.hosts[names[0]], interpreter, runner, {**question, "rank": 0}, launch)}
        else:
            results = host_group.run_on_hosts(
                lambda host: _run_backend_probe(host, interpreter, runner, {**question, "rank": names.index(host.name)})
            )
    except HostError as error:
        return str(error)
    failures = [
        f"{name}: {result.get('error') or 'all-reduce returned ' + str(result['sum'])}"
        for name, result in results.items()
        if result.get("sum") != expected_sum
    ]
    return "; ".join(failures)
