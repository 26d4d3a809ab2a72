"""The program's exit: all its output is flushed, or it reports why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "swarmtrain"]


@pytest.mark.parametrize("argv", [["--help"], ["deploy", "--help"]])
def test_a_full_disk_behind_the_output_is_reported(argv: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*PROGRAM, *argv], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: standard output: no space left on device\nhint: run df -h to see which disk is full\n"


def test_a_closed_pipe_is_not_reported() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PROGRAM, "--help"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_was_printed_is_flushed_at_exit() -> None:
    done = subprocess.run([*PROGRAM, "--help"], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines()[-1].split()[0] == "lab", "the last of the commands"
