"""A command that is interrupted at each stage it has, whatever the machine's load: the signal comes at an event, not at a time.

Python's audit events tell what a program is about to do. A hook in the command's own interpreter counts those of one kind
and raises the signal at the one asked for: at the n-th import, or before the n-th thing that it does to the world.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IMPORTS = ("import",)
CHANGES = ("http.client.send",)
"""Requests that change something in an engine."""
EFFECTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "subprocess.Popen", "os.kill", "fcntl.flock", *CHANGES)
"""Changes to files and processes, and to what an engine has."""
_PATIENCE = 150.0
_HOOK = """
import os, signal, sys

number, at, begin, *events = os.environ.pop("INTERRUPT").split()
came = 0
armed = False

def hook(event, arguments):
    global came, armed
    # What the interpreter does before our own first line is not ours.
    armed = armed or (event == "import" and arguments[0] == begin)
    asks = event == "http.client.send" and arguments[1][:4] not in (b"POST", b"DELE")
    if armed and event in events and not asks:
        came += 1
        if came == int(at):
            os.kill(os.getpid(), int(number))

sys.addaudithook(hook)
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, what it printed, and the seconds from the signal to the end where they are known."""

    code: int
    out: str
    err: str
    seconds: float = 0.0

    @property
    def interrupted(self) -> bool:
        return self.code == 130


def at_event(number: signal.Signals, at: int, events: tuple[str, ...], *argv: str, cwd: Path) -> Ended:
    """Run `swarmtrain ARGV`, and raise the signal `number` in it before its `at`-th of `events`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_HOOK)
        begin = "swarmtrain.cli" if events == IMPORTS else "swarmtrain.errors"
        env = {
            "INTERRUPT": f"{int(number)} {at} {begin} {' '.join(events)}",
            "PYTHONPATH": f"{folder}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",  # to keep what it compiles would be an effect too
        }
        done = subprocess.run(
            [sys.executable, "-m", "swarmtrain", *argv],
            cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=_PATIENCE,
        )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr)


def at_each(events: tuple[str, ...], *argv: str, cwd: Path, step: int = 1, most: int = 400) -> Iterator[Ended]:
    """Interrupt `swarmtrain ARGV` before each of `events`, each time with another signal, until it gets to its end.

    Yields how each ended, so that the caller can look at what is left and put the scene in order. `step` takes samples.
    Raises AssertionError for a traceback, or another exit code than 130 (and that of the last).
    """
    for at in range(1, most, step):
        ended = at_event(SIGNALS[at // step % len(SIGNALS)], at, events, *argv, cwd=cwd)
        assert "Traceback" not in ended.err, f"at {at}:\n{ended.err}"
        assert ended.code in (0, 130), f"at {at}: exit code {ended.code}\n{ended.err}"
        yield ended
        if ended.code == 0:
            return
    raise AssertionError(f"{argv} does more than {most} things")


def at_line(text: str, *argv: str, cwd: Path, number: signal.Signals = signal.SIGINT, after: float = 0.0) -> Ended:
    """Run `swarmtrain ARGV`, and send the signal `after` seconds from the first line on stderr that holds `text`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swarmtrain", *argv],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    out: list[str] = []
    reader = threading.Thread(target=lambda: out.extend(process.stdout or ()), daemon=True)
    reader.start()
    killer = threading.Timer(_PATIENCE, process.kill)
    killer.start()
    err = []
    for line in process.stderr:
        err.append(line)
        if text in line:
            break
    time.sleep(after)
    process.send_signal(number)
    sent = time.monotonic()
    err += process.stderr
    code = process.wait()
    killer.cancel()
    reader.join()
    return Ended(code, "".join(out), "".join(err), time.monotonic() - sent)
