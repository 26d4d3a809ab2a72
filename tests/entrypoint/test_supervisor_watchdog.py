"""A hung process is killed by its own child process; one that is busy or only waits is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

GUARDED = (
    "import sys, time; from swarmtrain.entrypoint.supervisor_watchdog import start_heartbeat_watchdog; "
    "start_heartbeat_watchdog(interval=0.1, max_missed_heartbeats=4); print('guarded', flush=True); "
)


def start_guarded(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", GUARDED + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_process_that_hangs_is_killed_and_prints_why() -> None:
    process = start_guarded("time.sleep(60)")
    os.kill(process.pid, signal.SIGSTOP)
    _, stderr = process.communicate(timeout=10)
    assert process.returncode == -signal.SIGKILL
    assert "hangs, and is killed" in stderr


@pytest.mark.parametrize(
    "code", ["time.sleep(2)", "end = time.monotonic() + 2\nwhile time.monotonic() < end: pass"], ids=["waits", "works"]
)
def test_one_that_waits_or_works_lives_to_its_end(code: str) -> None:
    assert start_guarded(code).wait(10) == 0


def test_one_that_takes_long_to_exit_is_not_killed() -> None:
    """After the interpreter has exited, nothing handles signals, for example while torch's libraries are unloaded."""
    linger = "import ctypes; libc = ctypes.CDLL(None); libc.on_exit(ctypes.cast(libc.pause, ctypes.c_void_p), None)"
    process = start_guarded(linger)
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    process.wait()


def test_a_process_that_was_stopped_for_a_moment_continues() -> None:
    process = start_guarded("time.sleep(2)")
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(10) == 0
