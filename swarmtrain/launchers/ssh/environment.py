"""The same environment on all hosts of a run: a pinned list, made there side by side, and the proof that its backends work."""

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
from swarmtrain.config.names import host_gpus
from swarmtrain.config.runner import RunnerConfig, RunnerType
from swarmtrain.errors import ConfigError, HostError, Problem, SwarmtrainError
from swarmtrain.images.wheels import own
from swarmtrain.launchers.base import Finding, Say
from swarmtrain.launchers.ssh import address_of
from swarmtrain.launchers.ssh.host import HERE, Host, Team, connect

BACKENDS = ("gloo", "nccl", "mpi")
_PIN = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[\w.,-]+\])?==([\w.!+-]+)(?:\s*;.*)?")
_DEFAULT = Path("~/.local/share/swarmtrain/env")
_PART = 8 << 20
_MADE_WITHIN = 7200.0
_PROVED_WITHIN = 150.0
_TRIED_AGAIN = 1.0
_PORTS = range(20000, 29997)
_SOME = 16
_SCRIPT = Path(__file__).parents[2] / "entrypoint" / "backends.py"


@dataclass(frozen=True)
class Pins:
    """What an environment holds: lines for pip, and the wheels that travel, of which alone it is made unless there is an `index`."""

    lines: tuple[str, ...]
    wheels: tuple[Path, ...] = ()
    index: bool = True

    @property
    def digest(self) -> str:
        """Stands for all of it."""
        parts = [*self.lines, str(self.index), *(f"{path.name} {sha256(path.read_bytes()).hexdigest()}" for path in self.wheels)]
        return sha256("\n".join(parts).encode()).hexdigest()


@dataclass
class Report:
    """What was made and what was proved. It prints itself."""

    python: str
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each host's interpreter has; none for a host where that could not be told."""
    proved: dict[str, str] = field(default_factory=dict)
    """Backend to what came of it: empty if its group found the right sum, else why it is not proved."""
    findings: list[Finding] = field(default_factory=list)
    configured: bool = False
    """The config names this interpreter already."""

    @property
    def sound(self) -> bool:
        """Whether runs can use it."""
        return not any(finding.fatal for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs."""
        return {**asdict(self), "sound": self.sound}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rows: list[tuple[str, ...]] = [("host", "python", "torch", "GPUs", *BACKENDS)]
        for name, facts in self.hosts.items():
            cells = [facts.get("python", ""), facts.get("torch", ""), str(len(facts.get("gpus", ()))) if facts else ""]
            rows.append((name, *(cell or "-" for cell in cells), *(self._cell(facts, backend) for backend in BACKENDS)))
        widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
        yield from ("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        size = len(self.hosts)
        for backend, why in self.proved.items():
            yield f"{backend} is not proved: {why}" if why else f"{backend}: a group of {size} has added up to {size * (size + 1) // 2}"
        for finding in self.findings:
            yield f"{'error' if finding.fatal else 'warning'}: {finding.place}: {finding.message}"
            yield from [f"hint: {finding.hint}"] * bool(finding.hint)
        if self.configured:
            yield f"the config has it: runner.python is {self.python}"
        elif self.sound:
            yield f"for the config:\nrunner:\n  python: {self.python}"

    def _cell(self, facts: dict[str, Any], backend: str) -> str:
        if backend not in facts.get("backends", ()):
            return "no" if facts else "-"
        return "not proved" if self.proved[backend] else "ok"


def interpreter(runner: RunnerConfig, path: str | None, *, check: bool) -> str:
    """Return the interpreter of the environment at `path`; without one, that of the config. Raises ConfigError.

    Only `check` may be of an interpreter that stands in no folder bin.
    """
    if runner.runner_type is not RunnerType.pdsh:
        hint = "swarmtrain image build makes the image that containers run"
        raise ConfigError((Problem("runner.runner_type", f"is {runner.runner_type}, and environments on hosts are for pdsh", hint=hint),))
    if path:
        return str(PurePosixPath(path) / "bin" / "python3")
    if check or not runner.python:
        return runner.python or (sys.executable if check else str(_DEFAULT.expanduser() / "bin" / "python3"))
    if PurePosixPath(runner.python).parts[-2:] != ("bin", "python3"):
        raise ConfigError((Problem("runner.python", f"{runner.python} is in no environment: PATH/bin/python3", hint="--path says where"),))
    return runner.python


def make(runner: RunnerConfig, target: str, requirements: Path | None, wheels: Path | None, *, python: str, say: Say) -> Report:
    """Make the environment whose interpreter is `target` with the `python` of each host, of what `requirements` lists, and prove it.

    Without a list, it is what the running interpreter has. What fails on a host is a finding. Raises SwarmtrainError.
    """
    names = _names(runner)
    lines = read(requirements) if requirements else installed()
    with tempfile.TemporaryDirectory() as folder, connect(names, dict.fromkeys(names, python)) as team:
        failed = _made(team, str(PurePosixPath(target).parents[1]), pinned(lines, wheels, Path(folder) / "wheel", say), python, say)
        return prove(runner, target, team, say, failed)


def check(runner: RunnerConfig, python: str, say: Say) -> Report:
    """Prove the interpreter `python` on all hosts, and change nothing there."""
    names = _names(runner)
    with connect(names, dict.fromkeys(names, python)) as team:
        return prove(runner, python, team, say, {})


def prove(runner: RunnerConfig, python: str, team: Team, say: Say, failed: dict[str, HostError]) -> Report:
    """Return what `python` has on each host of `team` that has not `failed`, and which backends work between all of them."""
    report = Report(python, configured=runner.python == python)
    done, silent = team.tried(lambda host: _asked(host, python, runner, {}), team.hosts.keys() - failed)
    report.hosts = {name: {} if "error" in done.get(name, {"error": ""}) else done[name] for name in team.hosts}
    for name, error in (failed | silent).items():
        report.findings.append(Finding(error.place or f"host {name}", error.message, error.hint))
    for name, facts in done.items():
        for problem in [facts["error"]] if "error" in facts else facts["problems"]:
            hint = "swarmtrain env without --check makes an environment that has it, if it is in the list"
            report.findings.append(Finding(f"host {name}", f"{python}: {problem}", hint))
    report.findings += _differences(report.hosts)
    for backend in BACKENDS:
        why = _obstacle(backend, report.hosts)
        if not why:
            say(f"adding up by {backend} over {', '.join(team.hosts)}")
            why = _group(backend, runner, python, team)
            report.findings += [Finding(f"backend {backend}", why, "swarmtrain doctor CONFIG measures the links between hosts")] * bool(why)
        report.proved[backend] = why
    return report


def read(file: Path) -> tuple[str, ...]:
    """Return the pins that a file lists. Raises SwarmtrainError for a line that pins nothing."""
    lines = []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SwarmtrainError(str(getattr(error, "strerror", None) or error).lower(), place=str(file)) from None
    for number, line in enumerate(text.splitlines(), 1):
        pin = re.sub(r"(^|\s)#.*", "", line).strip()
        if pin and not _PIN.fullmatch(pin):
            hint = "every line is NAME==VERSION, as pip freeze writes them: hosts are to get the same, today and later"
            raise SwarmtrainError(f"{pin!r} pins no version", place=f"{file}:{number}", hint=hint)
        lines += [pin] if pin else []
    return tuple(lines)


def installed() -> tuple[str, ...]:
    """Return pins of all that the running interpreter has. Raises SwarmtrainError for what came from no index."""
    found: dict[str, str] = {}
    for each in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", each.name).lower()
        if name in found or name == "pip":
            continue
        if name != "swarmtrain" and each.read_text("direct_url.json"):
            hint = "--requirements FILE lists what hosts are to have, and --wheels DIR holds what no index has"
            raise SwarmtrainError(
                f"{each.name} was installed from a file or a folder, so its version names nothing", place="pip freeze", hint=hint
            )
        found[name] = f"{name}=={each.version}"
    return tuple(sorted({**found, "swarmtrain": f"swarmtrain=={__version__}"}.values()))


def pinned(lines: Sequence[str], wheels: Path | None, folder: Path, say: Say) -> Pins:
    """Return what is to be installed; swarmtrain of this version is what runs here, a wheel in `folder`. Raises SwarmtrainError."""
    travel = sorted(wheels.glob("*.whl")) if wheels else []
    if wheels and not travel:
        raise SwarmtrainError("has no wheels", place=str(wheels), hint=f"pip download --no-deps -r LIST -d {wheels}")
    if (ours := f"swarmtrain=={__version__}") in lines:
        own(folder, say=say)
        wheel = next(folder.glob("*.whl"))
        travel = [*(path for path in travel if path.name != wheel.name), wheel]
        lines = [f"./{wheel.name}" if line == ours else line for line in lines]
    return Pins(tuple(lines), tuple(travel), index=wheels is None)


def _names(runner: RunnerConfig) -> list[str]:
    return [host.split()[0] for host in runner.hosts or (HERE,)]


def _made(team: Team, path: str, pins: Pins, python: str, say: Say) -> dict[str, HostError]:
    """Make the environment wherever it is not so already; return why it is not so in the end."""
    who, digest = f"process {os.getpid()} on {socket.gethostname()}", pins.digest
    failed: dict[str, HostError] = {}
    holders: dict[str, str] = {}

    def one(host: Host) -> str:
        begun = time.monotonic()
        stands = host.ask("environment", path=path, python=python, digest=digest, who=who)
        if stands["holder"]:
            return str(stands["holder"])
        if stands["current"]:
            say(f"{host.name} has it already")
            return ""
        for wheel in pins.wheels:
            with wheel.open("rb") as file:
                while part := file.read(_PART):
                    content = base64.b64encode(part).decode()
                    host.ask("put_wheel", path=path, name=wheel.name, offset=file.tell() - len(part), content=content)
        asked = {"path": path, "python": python, "key": stands["key"], "lines": pins.lines, "index": pins.index}
        if done := host.ask("make_environment", within=_MADE_WITHIN, **asked):
            raise HostError(
                "\n  ".join([done["error"], *done["output"].splitlines()]), place=f"host {host.name}", hint=_hint(done["output"])
            )
        say(f"{host.name} has it after {time.monotonic() - begun:.0f} s")
        return ""

    waiting = list(team.hosts)
    while waiting:
        done, errors = team.tried(one, waiting)
        for name, error in errors.items():
            say(f"{name} has it not: {error.message.splitlines()[0]}")
        for name in done.keys() - holders.keys():
            if done[name]:
                say(f"{name} is waited for: {done[name]} makes it")
        failed |= errors
        holders |= {name: holder for name, holder in done.items() if holder}
        waiting = [name for name, holder in done.items() if holder]
        time.sleep(_TRIED_AGAIN if waiting else 0)
    return failed


def _hint(output: str) -> str:
    if "ensurepip" in output:
        return "the system's package python3-venv, on that host; or --python with another interpreter"
    if "requires" in output and "which is not installed" in output:
        return "every package's own requirements belong into the list: pip freeze where all of it works"
    return "what was there before is still used; that host's pip config list shows its index, and --wheels DIR needs none"


def _asked(host: Host, python: str, runner: RunnerConfig, question: dict[str, Any], launch: Sequence[str] = ()) -> dict[str, Any]:
    gpus = host_gpus(next((entry for entry in runner.hosts or () if entry.split()[0] == host.name), host.name))
    env = {**runner.env, **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
    argv = [*launch, python, "-c", _SCRIPT.read_text(encoding="utf-8"), json.dumps(question)]
    done = host.ask("command", within=2 * _PROVED_WITHIN, argv=argv, seconds=_PROVED_WITHIN, env=env)
    lines = [line for line in done["output"].splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("{"):
            return dict(json.loads(line))
    return {"error": lines[-1] if lines else f"exit code {done['code']}"}


def _differences(hosts: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    """Yield what is not the same on all hosts that tell; another Python does less harm than another torch."""
    for what in ("python", "swarmtrain", "torch", "cuda", "nccl"):
        told = {name: facts[what] for name, facts in hosts.items() if facts.get(what)}
        if len(set(told.values())) > 1:
            versions = ", ".join(f"{version} on {name}" for name, version in told.items())
            yield Finding(what, f"differs: {versions}", "swarmtrain env makes them the same", fatal=what != "python")


def _obstacle(backend: str, hosts: dict[str, dict[str, Any]]) -> str:
    """Return why no group of `backend` can be tried on all hosts, or nothing."""
    lacks = {
        "nothing to try": [name for name, facts in hosts.items() if not facts],
        "no torch": [name for name, facts in hosts.items() if not facts.get("torch")],
        "no swarmtrain": [name for name, facts in hosts.items() if not facts.get("swarmtrain")],
        f"torch is built without {backend}": [name for name, facts in hosts.items() if backend not in facts.get("backends", ())],
        "no GPU": [name for name, facts in hosts.items() if backend == "nccl" and not facts.get("gpus")],
        "no mpirun": [name for name, facts in hosts.items() if backend == "mpi" and not facts.get("mpirun")],
    }
    return next((f"{what} on {', '.join(names)}" for what, names in lacks.items() if names), "")


def _group(backend: str, runner: RunnerConfig, python: str, team: Team) -> str:
    """Have one process on each host add up its number with the others'; return what went wrong, or nothing."""
    names, size = list(team.hosts), len(team.hosts)
    right = size * (size + 1) / 2
    # By chance, so that two proofs at once do not meet.
    ports = [runner.master_port] if runner.master_port else random.sample(_PORTS, _SOME)
    try:
        facts = team.each(lambda host: host.ask("facts", ports=ports if host.name == names[0] else ()))
        if not (free := [port for port in ports if port not in facts[names[0]]["taken"]]):
            return f"something listens at port {ports[0]} of {names[0]} already: -o runner.master_port chooses another"
        store = f"{address_of(runner, names[0], facts)}:{free[0]}"
        asked = {"backend": backend, "size": size, "store": store, "interface": runner.interface or ""}
        if backend == "mpi":
            launch = ["mpirun", "-n", str(size), *(["-host", ",".join(names)] if names != [HERE] else [])]
            done = {names[0]: _asked(team.hosts[names[0]], python, runner, {**asked, "rank": 0}, launch)}
        else:
            done = team.each(lambda host: _asked(host, python, runner, {**asked, "rank": names.index(host.name)}))
    except HostError as error:
        return str(error)
    wrong = [
        f"{name}: {found.get('error') or 'it found ' + str(found['sum'])}" for name, found in done.items() if found.get("sum") != right
    ]
    return "; ".join(wrong)
