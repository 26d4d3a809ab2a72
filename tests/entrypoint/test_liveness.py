"""A process that hangs is killed by its own child; one that is busy, or merely waits, is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

GUARDED = "import sys, time; from swarmtrain.entrypoint.liveness import guard; guard(every=0.1, missed=4); print('guarded', flush=True); "


def start(what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", GUARDED + what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_that_hangs_is_killed_and_says_so() -> None:
    process = start("time.sleep(60)")
    os.kill(process.pid, signal.SIGSTOP)
    _, told = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGKILL
    assert "hangs, and is killed" in told


@pytest.mark.parametrize(
    "what", ["time.sleep(2)", "end = time.monotonic() + 2\nwhile time.monotonic() < end: pass"], ids=["waits", "works"]
)
def test_one_that_waits_or_works_lives_to_its_end(what: str) -> None:
    assert start(what).wait(10) == 0


def test_one_that_takes_long_to_leave_is_left_in_peace() -> None:
    """Past the interpreter's own end nothing handles signals, as when torch's libraries are unloaded."""
    linger = "import ctypes; libc = ctypes.CDLL(None); libc.on_exit(ctypes.cast(libc.pause, ctypes.c_void_p), None)"
    process = start(linger)
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    process.wait()


def test_what_was_stopped_for_a_moment_goes_on() -> None:
    process = start("time.sleep(2)")
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(10) == 0
