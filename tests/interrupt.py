"""Interrupt a command at each of its stages, independent of the machine's load: the signal comes at an event, not after a time.

Python's audit events announce what a program is about to do. A hook in the command's interpreter counts the events of some kinds
and raises the signal at a given one: at the n-th import, or before the n-th effect on the outside world.
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
"""Changes to files and processes, and to an engine."""
_TIMEOUT_SECONDS = 150.0
_AUDIT_HOOK = """
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
class InterruptResult:
    """The result of a command: exit code, output, and the seconds from the signal to the exit, if known."""

    code: int
    out: str
    err: str
    seconds: float = 0.0

    @property
    def is_interrupted(self) -> bool:
        return self.code == 130


def interrupt_at_event(signum: signal.Signals, position: int, events: tuple[str, ...], *argv: str, cwd: Path) -> InterruptResult:
    """Run `swarmtrain ARGV`, and raise `signum` in it before its `position`-th of `events`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_AUDIT_HOOK)
        first_module = "swarmtrain.cli" if events == IMPORTS else "swarmtrain.errors"
        env = {
            "INTERRUPT": f"{int(signum)} {position} {first_module} {' '.join(events)}",
            "PYTHONPATH": f"{folder}:{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",  # writing bytecode would count as an effect
        }
        result = subprocess.run(
            [sys.executable, "-m", "swarmtrain", *argv],
            cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS,
        )  # fmt: skip
    return InterruptResult(result.returncode, result.stdout, result.stderr)


def interrupt_at_each_event(
    events: tuple[str, ...], *argv: str, cwd: Path, step: int = 1, max_events: int = 400
) -> Iterator[InterruptResult]:
    """Interrupt `swarmtrain ARGV` before each of its `events`, with alternating signals, until it completes.

    Yield each result, so that the caller can check what is left and restore the initial state. `step` > 1 takes samples.
    Raises AssertionError for a traceback, or for an exit code other than 130 (and 0 at the end).
    """
    for position in range(1, max_events, step):
        result = interrupt_at_event(SIGNALS[position // step % len(SIGNALS)], position, events, *argv, cwd=cwd)
        assert "Traceback" not in result.err, f"at {position}:\n{result.err}"
        assert result.code in (0, 130), f"at {position}: exit code {result.code}\n{result.err}"
        yield result
        if result.code == 0:
            return
    raise AssertionError(f"{argv} does more than {max_events} things")


def interrupt_at_line(text: str, *argv: str, cwd: Path, signum: signal.Signals = signal.SIGINT, delay: float = 0.0) -> InterruptResult:
    """Run `swarmtrain ARGV`, and send the signal `delay` seconds after the first line on stderr that contains `text`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swarmtrain", *argv],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    out: list[str] = []
    reader = threading.Thread(target=lambda: out.extend(process.stdout or ()), daemon=True)
    reader.start()
    killer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
    killer.start()
    err = []
    for line in process.stderr:
        err.append(line)
        if text in line:
            break
    time.sleep(delay)
    process.send_signal(signum)
    sent = time.monotonic()
    err += process.stderr
    code = process.wait()
    killer.cancel()
    reader.join()
    return InterruptResult(code, "".join(out), "".join(err), time.monotonic() - sent)
