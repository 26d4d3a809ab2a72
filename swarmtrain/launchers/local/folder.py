"""The folder of one local run: `~/.local/state/swarmtrain/RUN` (XDG_STATE_HOME is respected).

    local.json          that there is a run, its ports, its nodes; removed by `down`
    deployed.json       the config as it was deployed      config.json   the same, resolved, as the nodes read it
    code/ secrets/      what travels with the run          logs/         the ranks' own files
    NODE.spec NODE.state  what a keeper keeps, and how it stands     lock   held by whoever changes the run
    events.jsonl        the notice board's lines           NODE.log      what a node printed, each line with its time
    events.N.jsonl NODE.N.log   the same, of the times that the run was up before

The events and logs stay when the run goes, for reading afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.config.files import OPEN, SECRET, reason, write_all
from swarmtrain.errors import RunNotFound, StateError
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.kept import EVENTS, state_directory
from swarmtrain.launchers.local.spec import Spec, State, replace
from swarmtrain.plan import Cargo, CodeFile, Plan
from swarmtrain.process import start, uninterrupted

_MARK = "local.json"
_LOCK = "lock"
_KILLED_WITHIN = 5.0
_GOODBYE = 3.0


@contextlib.contextmanager
def in_state() -> Iterator[None]:
    """Around what reads and writes folders of runs. Raises StateError where the system refuses that."""
    try:
        yield
    except BrokenPipeError:  # of our own output
        raise
    except OSError as error:
        hint = "export XDG_STATE_HOME=FOLDER keeps the runs elsewhere"
        raise StateError(reason(error), place=str(error.filename or state_directory()), hint=hint) from None


def local_runs() -> list[str]:
    """Return the names of all local runs, sorted. Raises OSError, where a glob would pass over what it may not read."""
    try:
        return sorted(path.name for path in state_directory().iterdir() if RunFolder(path.name).exists)
    except FileNotFoundError:
        return []


@dataclass(frozen=True)
class Facts:
    """What a later launcher process must know of the run."""

    store_port: int
    board_port: int
    cwd: str
    stop_grace: float
    hosts: dict[str, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)


class RunFolder:
    """One run's folder, and the keepers that it knows of."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.path = state_directory() / run

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def exists(self) -> bool:
        return (self.path / _MARK).exists()

    def log(self, name: str) -> Path:
        """Return where `name` prints to."""
        return self.path / f"{name}.log"

    @contextlib.contextmanager
    def locked(self, say: Say) -> Iterator[None]:
        """Hold the only right to change the run; whoever holds it is waited for, saying so. The kernel takes it from the dead."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                say(f"waiting for another swarmtrain that changes {self.run}: process {file.read() or '?'}")
                fcntl.flock(file, fcntl.LOCK_EX)
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def facts(self) -> Facts:
        """Raises RunNotFound."""
        try:
            return Facts(**json.loads((self.path / _MARK).read_text(encoding="utf-8")))
        except FileNotFoundError:
            known = ", ".join(local_runs()) or "none"
            raise RunNotFound(f"there is no run of this name on this machine; there is: {known}", place=f"run {self.run}") from None

    def write(self, plan: Plan, facts: Facts) -> None:
        """Write down what the run is made of: all of it, or nothing. Raises OSError."""
        (self.path / "secrets").mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.path / "logs").mkdir(exist_ok=True)
        config, resolved, mark = plan.config.to_json(), plan.config.resolved().to_json(), json.dumps(asdict(facts), indent=1)
        write_all(
            {self.path / "secrets" / item.name: (item.content, SECRET) for item in plan.cargo.secrets}
            | {self.path / "code" / item.name: (item.content, OPEN) for item in plan.cargo.code}
            | {self.path / name: (text.encode(), OPEN) for name, text in (("deployed.json", config), ("config.json", resolved))}
            | {self.path / _MARK: (mark.encode(), OPEN)}
        )

    def read(self) -> tuple[Config, Cargo]:
        """Return what `write` was given. Raises RunNotFound."""
        facts = self.facts()
        code = tuple(CodeFile.of(name, (self.path / "code" / name).read_bytes()) for name in facts.code)
        secrets = tuple(CodeFile.of(name, (self.path / "secrets" / name).read_bytes()) for name in facts.secrets)
        return Config.from_json((self.path / "deployed.json").read_text(encoding="utf-8")), Cargo(code, secrets)

    def put_old_events_aside(self) -> None:
        """A new board begins new files: an old verdict must not end the new run's watch, nor old lines be taken for its own."""
        if not self.events.exists():
            return
        number = 1 + len(list(self.path.glob("events.*.jsonl")))
        self.events.rename(self.path / f"events.{number}.jsonl")
        for log in self.path.glob("node*.log"):
            if log.stem.isalnum():  # not aside already
                log.rename(self.path / f"{log.stem}.{number}.log")

    def names(self) -> list[str]:
        """Return what keepers there are, running or not: nodes in their order, then the rendezvous."""
        found = [path.stem for path in self.path.glob("*.spec")]
        return sorted(found, key=lambda name: (not name.startswith("node"), len(name), name))

    def spec(self, name: str) -> Spec | None:
        """Return what `name`'s keeper was told, or None."""
        try:
            return Spec.load(self.path / f"{name}.spec")
        except (OSError, ValueError, TypeError):
            return None

    def state(self, name: str) -> State | None:
        """Return how `name` stands; a keeper that died unasked counts as failed."""
        try:
            state = State(**json.loads((self.path / f"{name}.state").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        if state.state in ("running", "failed") and not self._keeps(state.keeper, name):
            return State(state.keeper, "failed", state.exit_code, state.restarts)
        return state

    def alive(self, name: str) -> bool:
        """Whether `name` has a keeper at work."""
        state = self.state(name)
        return state is not None and self._keeps(state.keeper, name)

    def launch(self, spec: Spec) -> None:
        """Start a keeper for `spec`. Raises ProcessError."""
        path = self.path / f"{spec.name}.spec"
        spec.save(path)
        path.with_suffix(".state").unlink(missing_ok=True)
        argv = [sys.executable, "-m", "swarmtrain.launchers.local.keeper", str(path)]
        with self.log(spec.name).open("ab") as log, uninterrupted():
            keeper = start(argv, cwd=spec.cwd, stdout=log, stderr=log, new_session=True)
            replace(path.with_suffix(".state"), json.dumps(asdict(State(keeper.pid, "running"))))
        keeper.returncode = 0  # it is meant to outlive us: its state file, not this handle, says how it ends

    def end(self, names: list[str], grace: float) -> None:
        """Stop the keepers of `names` and all below them: SIGTERM, `grace` seconds and a few for goodbyes, SIGKILL."""
        keepers = {name: state.keeper for name in names if (state := self.state(name)) and self._keeps(state.keeper, name)}
        for pid in keepers.values():
            _signal(pid, signal.SIGTERM)
        self._wait(keepers, grace + _GOODBYE if grace else 0.0)
        left = {name: pid for name, pid in keepers.items() if self._keeps(pid, name)}
        families = [pid for keeper in left.values() for pid in [keeper, *_below(keeper)]]
        for pid in families:
            _signal(pid, signal.SIGKILL)
        self._wait(left, _KILLED_WITHIN)

    def forget(self, name: str) -> None:
        """Remove a keeper's files; its log stays."""
        for suffix in (".spec", ".state"):
            (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the run; its events and logs stay. The mark goes last: until then the run can be found, and removed again."""
        for name in ("code", "secrets"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        half_written = self.path.glob(".*")
        for path in (self.path / "deployed.json", self.path / "config.json", *half_written):
            path.unlink(missing_ok=True)
        for name in self.names():
            self.forget(name)
        (self.path / _MARK).unlink(missing_ok=True)

    def _wait(self, keepers: dict[str, int], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(self._keeps(pid, name) for name, pid in keepers.items()):
            time.sleep(0.05)

    def _keeps(self, pid: int, name: str) -> bool:
        """Whether `pid` is the keeper of `name`: a pid alone may be somebody else's by now."""
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                return False
            return str(self.path / f"{name}.spec").encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False


def _below(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    children = [child for child, parent in parents.items() if parent == pid]
    return [each for child in children for each in [child, *_below(child)]]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
