"""The benchmarks' own parts: what they measure with, what they write down, and the page that is made of it."""

from __future__ import annotations

import platform
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine
from benchmarks.measure import Sample, cpu_seconds, in_turns, interval
from benchmarks.page import over, page, table
from benchmarks.records import merged
from benchmarks.services import idle_program
from swarmtrain.errors import ProcessError


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def rows(text: str) -> dict[str, list[str]]:
    """Return the lines of the page's table, by the benchmark's name."""
    return {found[0].strip("`"): found[1:] for line in text.splitlines() if line.startswith("| `") and (found := cells(line))}


def record(name: str, **values: Any) -> dict[str, Any]:
    plain = {"what": "what it is", "unit": "s", "ours": 1.0, "spread": [0.9, 1.1], "other": None, "other_spread": None, "other_is": ""}
    return {"name": name, **plain, "ratio": None, "limit": None, "note": "", "why_not": "", "machine": "2 cores", "load": 0.0, **values}


def test_a_row_over_its_limit_and_one_without_figures_say_so() -> None:
    slow = record("help", ours=2.0, limit=1.5)
    absent = record("first-step", ours=None, spread=None, why_not="no lab: needs root")
    assert over(slow)
    assert not over(record("help", ours=1.5, limit=1.5))
    assert "OVER THE LIMIT" in table([slow])
    assert "no lab: needs root" in table([absent])
    text = page([slow, absent], ["help", "first-step"])
    assert rows(text)["help"][2] == "1.50 s"
    assert rows(text)["first-step"] == ["", "", "", ""]
    assert "Not measured here: no lab: needs root" in text


def test_what_is_not_measured_again_is_kept_in_order() -> None:
    kept = [record("help"), record("generate"), record("generate-1000/growth"), record("a benchmark that is no more")]
    found = merged(kept, "generate", [record("generate", ours=2.0)], ["generate", "help", "generate-1000"])
    assert [(each["name"], each["ours"]) for each in found] == [("generate", 2.0), ("help", 1.0), ("generate-1000/growth", 1.0)]


def test_the_page_keeps_what_is_not_measured_here() -> None:
    names = ["help", "first-step", "train"]
    stood = page([record("train", ours=3.0), record("help", ours=1.0, note="as it was")], names)
    now = page([record("first-step", machine="4 cores"), record("train", ours=2.0)], names, stood)
    assert {name: cells[0].split()[0] for name, cells in rows(now).items()} == {"help": "1.00", "first-step": "1.00", "train": "2.00"}
    assert list(rows(now)) == names
    assert "as it was" in now
    assert "Measured on: 2 cores; 4 cores." in now


def test_the_interval_of_a_ratio_is_that_of_tossed_coins() -> None:
    """Of nine, the second and the eighth: 1 - 2 x 10/512 is the chance that the median lies between them."""
    assert interval([5, 3, 1, 2, 4, 6, 9, 8, 7]) == (2, 8)
    assert interval([1, 2, 3, 4, 5]) is None
    found = record("train", other=2.0, other_spread=[1.9, 2.1], ratio=0.5, interval=[0.45, 0.55], goal=0.98)
    assert rows(page([found], ["train"]))["train"][3] == "0.50 (0.45–0.55), goal 0.98"
    assert "SHORT OF THE GOAL" in table([found])


def test_things_are_measured_in_turns() -> None:
    said: list[str] = []

    def thing(name: str, value: float) -> float:
        said.append(name)
        return value

    samples = in_turns(2, lambda: thing("a", 1), lambda: thing("b", 2))
    assert said == ["a", "b"] * 3
    assert samples == [Sample((1, 1)), Sample((2, 2))]
    assert (Sample.of([5, 1, 2]).median, Sample.of([5, 1, 2]).spread) == (2, (1, 5))


def test_cpu_time_is_that_of_the_program() -> None:
    sleepy = cpu_seconds([sys.executable, "-c", "import time; time.sleep(1)"])
    busy = cpu_seconds([sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"])
    assert sleepy < 0.9
    assert busy >= 1
    with pytest.raises(ProcessError, match="exit code 7"):
        cpu_seconds([sys.executable, "-c", "raise SystemExit(7)"])


def test_the_machine_is_described_without_its_name() -> None:
    text = machine.describe()
    assert re.match(r"\d+ cores? of .+, \d+ GiB memory, \w+$", text)
    assert socket.gethostname() not in text


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the program is made for Linux on x86_64")
def test_the_idle_program_waits_for_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "idle"
    path.write_bytes(idle_program())
    path.chmod(0o755)
    program = subprocess.Popen([str(path)])
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.3)
    program.terminate()
    assert program.wait(10) == -signal.SIGTERM
