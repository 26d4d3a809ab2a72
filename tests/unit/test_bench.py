"""The parts of the benchmarks: how they measure, what they record, and the page that is generated from it."""

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

from benchmarks import machine_description
from benchmarks.idle_services import build_idle_program
from benchmarks.measurement import Sample, compute_median_confidence_interval, measure_cpu_seconds, measure_in_turns
from benchmarks.records import merge_records
from benchmarks.speed_page import is_over_limit, render_page, render_table
from swarmtrain.errors import ProcessError


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def parse_rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the page's table, by the benchmark's name."""
    return {found[0].strip("`"): found[1:] for line in text.splitlines() if line.startswith("| `") and (found := split_cells(line))}


def build_record(name: str, **values: Any) -> dict[str, Any]:
    plain = {
        "description": "what it is",
        "unit": "s",
        "result": 1.0,
        "spread": [0.9, 1.1],
        "baseline": None,
        "baseline_spread": None,
        "baseline_description": "",
    }
    return {"name": name, **plain, "ratio": None, "limit": None, "note": "", "skip_reason": "", "machine": "2 cores", "load": 0.0, **values}


def test_a_row_over_its_limit_and_one_without_figures_are_marked() -> None:
    slow = build_record("help", result=2.0, limit=1.5)
    absent = build_record("first-step", result=None, spread=None, skip_reason="no lab: needs root")
    assert is_over_limit(slow)
    assert not is_over_limit(build_record("help", result=1.5, limit=1.5))
    assert "OVER THE LIMIT" in render_table([slow])
    assert "no lab: needs root" in render_table([absent])
    text = render_page([slow, absent], ["help", "first-step"])
    assert parse_rows(text)["help"][2] == "1.50 s"
    assert parse_rows(text)["first-step"] == ["", "", "", ""]
    assert "Not measured here: no lab: needs root" in text


def test_results_that_are_not_remeasured_are_kept_in_order() -> None:
    kept = [
        build_record("help"),
        build_record("generate"),
        build_record("generate-1000/growth"),
        build_record("a benchmark that is no more"),
    ]
    found = merge_records(kept, "generate", [build_record("generate", result=2.0)], ["generate", "help", "generate-1000"])
    assert [(each["name"], each["result"]) for each in found] == [("generate", 2.0), ("help", 1.0), ("generate-1000/growth", 1.0)]


def test_the_page_keeps_what_is_not_measured_here() -> None:
    names = ["help", "first-step", "train"]
    stood = render_page([build_record("train", result=3.0), build_record("help", result=1.0, note="as it was")], names)
    now = render_page([build_record("first-step", machine="4 cores"), build_record("train", result=2.0)], names, stood)
    assert {name: cells[0].split()[0] for name, cells in parse_rows(now).items()} == {"help": "1.00", "first-step": "1.00", "train": "2.00"}
    assert list(parse_rows(now)) == names
    assert "as it was" in now
    assert "Measured on: 2 cores; 4 cores." in now


def test_the_interval_of_a_ratio_is_that_of_coin_flips() -> None:
    """Of nine values, the second and the eighth: the median lies between them with probability 1 - 2 x 10/512."""
    assert compute_median_confidence_interval([5, 3, 1, 2, 4, 6, 9, 8, 7]) == (2, 8)
    assert compute_median_confidence_interval([1, 2, 3, 4, 5]) is None
    found = build_record("train", baseline=2.0, baseline_spread=[1.9, 2.1], ratio=0.5, interval=[0.45, 0.55], goal=0.98)
    assert parse_rows(render_page([found], ["train"]))["train"][3] == "0.50 (0.45–0.55), goal 0.98"
    assert "SHORT OF THE GOAL" in render_table([found])


def test_programs_are_measured_alternately() -> None:
    said: list[str] = []

    def thing(name: str, value: float) -> float:
        said.append(name)
        return value

    samples = measure_in_turns(2, lambda: thing("a", 1), lambda: thing("b", 2))
    assert said == ["a", "b"] * 3
    assert samples == [Sample((1, 1)), Sample((2, 2))]
    assert (Sample.from_values([5, 1, 2]).median, Sample.from_values([5, 1, 2]).spread) == (2, (1, 5))


def test_cpu_time_is_that_of_the_program() -> None:
    sleepy = measure_cpu_seconds([sys.executable, "-c", "import time; time.sleep(1)"])
    busy = measure_cpu_seconds([sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"])
    assert sleepy < 0.9
    assert busy >= 1
    with pytest.raises(ProcessError, match="exit code 7"):
        measure_cpu_seconds([sys.executable, "-c", "raise SystemExit(7)"])


def test_the_machine_is_described_without_its_name() -> None:
    text = machine_description.describe_machine()
    assert re.match(r"\d+ cores? of .+, \d+ GiB memory, \w+$", text)
    assert socket.gethostname() not in text


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the program is built for Linux on x86_64")
def test_the_idle_program_waits_for_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "idle"
    path.write_bytes(build_idle_program())
    path.chmod(0o755)
    program = subprocess.Popen([str(path)])
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.3)
    program.terminate()
    assert program.wait(10) == -signal.SIGTERM
