"""The folder of one local run, `~/.local/state/swarmtrain/RUN` (XDG_STATE_HOME is respected): see swarmtrain.host.folder.

The events and logs stay when the run goes, for reading afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from swarmtrain.config import Config
from swarmtrain.config.files import OPEN, SECRET, reason, write_all
from swarmtrain.errors import RunNotFound, StateError
from swarmtrain.host.folder import LOCK, MARK, Folder
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.kept import state_directory
from swarmtrain.plan import Cargo, CodeFile, Plan


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


class RunFolder(Folder):
    """One run's folder, and the keepers that it knows of."""

    def __init__(self, run: str) -> None:
        super().__init__(state_directory() / run)
        self.run = run

    @contextlib.contextmanager
    def locked(self, say: Say) -> Iterator[None]:
        """Hold the only right to change the run; whoever holds it is waited for, saying so. The kernel takes it from the dead."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a+", encoding="utf-8") as file:
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
            return Facts(**json.loads((self.path / MARK).read_text(encoding="utf-8")))
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
            | {self.path / MARK: (mark.encode(), OPEN)}
        )

    def read(self) -> tuple[Config, Cargo]:
        """Return what `write` was given. Raises RunNotFound."""
        facts = self.facts()
        code = tuple(CodeFile.of(name, (self.path / "code" / name).read_bytes()) for name in facts.code)
        secrets = tuple(CodeFile.of(name, (self.path / "secrets" / name).read_bytes()) for name in facts.secrets)
        return Config.from_json((self.path / "deployed.json").read_text(encoding="utf-8")), Cargo(code, secrets)
