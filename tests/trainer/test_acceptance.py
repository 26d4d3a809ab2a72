"""The acceptance run of a machine: `swarmtrain doctor --train`, here on the CPU with tiny models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_stages import yield_row_for_each_item, yield_rows_and_fail
from processes import find_run_pids

from benchmarks import acceptance_page
from swarmtrain.trainer.acceptance.command import main
from swarmtrain.trainer.acceptance.rows import Outcome
from swarmtrain.trainer.acceptance.stages import STAGES
from swarmtrain.trainer.acceptance.worker import run_items_in_workers, run_worker

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "swarmtrain", "doctor", "--train", "--device", "cpu"]
GATE_STAGES = ["facts", "mask_costs", "step_costs", "checkpoint_costs"]
"""Stages that take seconds; the others take minutes on two cores."""


def run_doctor(*options: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DOCTOR, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)


def read_rows(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def check_rows(completed: subprocess.CompletedProcess[str], stages: list[str]) -> list[dict[str, Any]]:
    rows = read_rows(completed.stdout)
    failed = [row for row in rows if row["outcome"] == Outcome.failed]
    assert not failed, json.dumps(failed, indent=1)
    assert completed.returncode == 0
    assert sorted({row["stage"] for row in rows}) == sorted(stages)
    return rows


@pytest.mark.test_all_only("trains for a minute; tests/trainer has each claim by itself")
def test_stages_on_the_cpu() -> None:
    completed = run_doctor("--json", *(word for stage in GATE_STAGES for word in ("--stage", stage)))
    rows = {row["name"]: row for row in check_rows(completed, GATE_STAGES)}
    assert rows["load"]["values"]["step"] == 2
    assert "facts: versions" in completed.stderr
    section = acceptance_page.render_section(list(rows.values()))
    page = acceptance_page.replace_section("# Speed\n\ntext\n\n## CPU, torch 1.0\n\nkept\n", section)
    assert page == acceptance_page.replace_section(page, section)
    assert "kept" in page
    assert "| load | passed |" in page


@pytest.mark.test_all_only("trains and compiles for minutes; the gate runs the other stages")
def test_all_stages_on_the_cpu() -> None:
    stages = [stage.name for stage in STAGES if stage.name not in GATE_STAGES]
    rows = check_rows(run_doctor("--json", *(word for stage in stages for word in ("--stage", stage)), timeout=1800), stages)
    skipped = {row["name"] for row in rows if row["outcome"] == Outcome.skipped}
    assert {"float8, tensorwise", "compiled, float8"} <= skipped
    checked = {row["name"] for row in rows} - skipped
    assert {"float32", "compiled", "deploy", "stop and resume", "killed rank", "pipeline parallel, two ranks"} <= checked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.test_all_only("interrupts whole checks twice; tests/interruption has other commands")
def test_an_interrupted_run_stops_everything_that_it_has_started(number: signal.Signals) -> None:
    # Not pytest's folder: the path of a socket in it may be too long.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="st-") as name:
        folder, argv = Path(name), [*DOCTOR, "--stage", "launched_run"]
        doctor = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "TMPDIR": name}, stdout=subprocess.DEVNULL)
        try:
            wait_for(lambda: list(folder.rglob("metrics.jsonl")), "the first step")
            assert find_run_pids(folder)
            doctor.send_signal(number)
            assert doctor.wait(120) == 130
        finally:
            doctor.kill()
            doctor.wait()
        assert not find_run_pids(folder)
        assert not list(folder.iterdir())


def wait_for(condition: Callable[[], object], description: str, timeout: float = 300.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, description
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "ValueError: no more rows"),
        pytest.param("hang", "not finished after 20 s", marks=pytest.mark.test_all_only("waits for 20 s")),
    ],
)
def test_rows_of_a_process_that_fails_are_kept(how: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    rows = list(run_worker(yield_rows_and_fail, {"count": 2, "how": how}, timeout=20 if how == "hang" else 120))
    assert [row.name for row in rows] == ["row 0", "row 1", "yield_rows_and_fail"]
    assert rows[-1].outcome is Outcome.failed
    assert reason in rows[-1].reason


def test_items_after_one_that_ends_its_process_are_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    rows = list(run_items_in_workers(yield_row_for_each_item, {"a": False, "b": True, "c": False}, timeout=120))
    assert [(row.name, str(row.outcome)) for row in rows] == [("a", "measured"), ("b", "failed"), ("c", "measured")]
    assert "exit code 7" in rows[1].reason


def test_requests_that_cannot_be_met(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"device": "cuda", "stages": ["facts"], "seconds": 0.0, "json": False}
    assert main(request) == 1
    assert "torch 2" in capsys.readouterr().err
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main({**request, "device": "auto"}) == 1, "a GPU that torch cannot use"
    assert "check the driver with nvidia-smi" in capsys.readouterr().err
    assert main({**request, "device": "cpu", "stages": ["speed"]}) == 1
    assert "--stage: no such stage: speed" in capsys.readouterr().err
    assert main({**request, "device": "cpu", "stages": ["facts"], "seconds": 0.0}) == 0
    assert "no time left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stage", "facts"], "Invalid value for --stage: needs --train"),
        (["--device", "cpu"], "Invalid value for --device: needs --train"),
        (["config.yml", "--train"], "Invalid value for CONFIG: --train checks this machine, without a config"),
    ],
)
def test_options_that_do_not_belong_together(options: list[str], message: str) -> None:
    argv = [sys.executable, "-m", "swarmtrain", "doctor", *options]
    completed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert message in completed.stderr
