"""A run's folder on the machine that its processes are on, and the keepers that it knows of.

local.json          that there is a run here, and what a later launcher must know of it; removed last
deployed.json       the config as it was deployed      config.json   the same, resolved, as the nodes read it
code/ secrets/      what travels with the run          logs/         the ranks' own files
NODE.spec NODE.state  what a keeper keeps, and how it stands     lock   held by whoever changes the run
events.jsonl        the notice board's lines           NODE.log      what a node printed, each line with its time
events.N.jsonl NODE.N.log   the same, of the times that the run was up before
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from swarmtrain.host.spec import Spec, State, replace
from swarmtrain.process import start, uninterrupted

MARK, LOCK, EVENTS = "local.json", "lock", "events.jsonl"
_KILLED_WITHIN = 5.0
_GOODBYE = 3.0
_CLEANED_WITHIN = 60.0
_MADE_WITHIN = 30.0
_LOOK_EVERY = 0.05
_KNOWN_WITHIN = 5.0
# Out of a zip file that has come over SSH, it is that file's main program.
_KEEPER = [archive] if (archive := getattr(globals()["__loader__"], "archive", "")) else ["-m", "swarmtrain.host.keeper"]


class Folder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def exists(self) -> bool:
        return (self.path / MARK).exists()

    def log(self, name: str) -> Path:
        """Return where `name` prints to."""
        return self.path / f"{name}.log"

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
        argv = [sys.executable, *_KEEPER, str(path)]
        with self.log(spec.name).open("ab") as log, uninterrupted():
            keeper = start(argv, cwd=spec.cwd, stdout=log, stderr=log, new_session=True)
            replace(path.with_suffix(".state"), json.dumps(asdict(State(keeper.pid, "running"))))
            # For a moment a new program has no command line, and whoever ends the run just then would not know it.
            until = time.monotonic() + _KNOWN_WITHIN
            while keeper.poll() is None and not self._keeps(keeper.pid, spec.name) and time.monotonic() < until:
                time.sleep(0.001)
        keeper.returncode = 0  # it is meant to outlive us: its state file, not this handle, says how it ends

    def end(self, names: list[str], grace: float) -> None:
        """Stop the keepers of `names` and all below them: SIGTERM, `grace` seconds and a few for goodbyes, SIGKILL."""
        keepers = {name: state.keeper for name in names if (state := self.state(name)) and self._keeps(state.keeper, name)}
        for pid in keepers.values():
            _signal(pid, signal.SIGTERM)
        made = [spec for name in names if (spec := self.spec(name)) and spec.clean]
        if made and not grace:
            for spec in made:
                clean(spec)
        # A keeper that is having a container made just now sees that through, so that there is none afterwards.
        self._wait(keepers, grace + _GOODBYE if grace else _MADE_WITHIN if made else 0.0)
        left = {name: pid for name, pid in keepers.items() if self._keeps(pid, name)}
        families = [pid for keeper in left.values() for pid in [keeper, *_below(keeper)]]
        # A process that ended while it was only starting may have left some that have not noticed yet.
        for pid in {*families, *_sessions(keepers.values())}:
            _signal(pid, signal.SIGKILL)
        self._wait(left, _KILLED_WITHIN)
        until = time.monotonic() + _KILLED_WITHIN
        while _sessions(keepers.values()) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
        for spec in made:
            clean(spec)

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
        (self.path / MARK).unlink(missing_ok=True)

    def erase(self) -> None:
        """Remove the folder, with the events and logs. The lock goes with it: whoever holds it is the last here."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _wait(self, keepers: dict[str, int], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(self._keeps(pid, name) for name, pid in keepers.items()):
            time.sleep(_LOOK_EVERY)

    def _keeps(self, pid: int, name: str) -> bool:
        """Whether `pid` is the keeper of `name`: a pid alone may be somebody else's by now."""
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                return False
            return str(self.path / f"{name}.spec").encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False


def clean(spec: Spec) -> None:
    """Remove what the process may have left that does not end with it, such as a container. What fails is no reason to stop."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(spec.clean, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CLEANED_WITHIN, check=False)


def _sessions(leaders: Collection[int]) -> list[int]:
    """Return the living processes of the sessions that `leaders` began: each keeper has one, and what it starts stays in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            found += [int(entry.name)] if int(session) in leaders and state != "Z" else []
    return found


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
