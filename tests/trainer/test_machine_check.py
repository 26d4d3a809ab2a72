"""`swarmtrain doctor --train`, and the table of tests/gpu, here on the CPU with tiny models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import find_run_pids

from swarmtrain.trainer.speed.machine_check import main

ROOT = Path(__file__).parents[2]
DOCTOR = [sys.executable, "-m", "swarmtrain", "doctor", "--train", "--device", "cpu"]
RESULTS = ["losses: float32", "losses: bfloat16", "losses: bfloat16, documents", "two ranks: ddp", "two ranks: fsdp"]


def test_losses_equal_the_cpu_and_one_rank_and_the_speed_is_measured() -> None:
    completed = subprocess.run([*DOCTOR, "--json"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert [result["name"] for result in results if result["outcome"] == "passed"] == RESULTS
    assert results[0]["values"]["loss_error"] == 0, "the same training on the same device"
    assert 0 < results[1]["values"]["loss_error"] < 2e-3, "rounded differently"
    speed = results[-1]["values"]
    assert speed["ratio"] == pytest.approx(speed["plain_step_seconds"] / speed["step_seconds"])
    assert "no check failed" in completed.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.test_all_only("the same with SIGINT"))])
def test_an_interrupted_check_stops_everything_that_it_has_started(number: signal.Signals, tmp_path: Path) -> None:
    doctor = subprocess.Popen(DOCTOR, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while len(find_run_pids(tmp_path)) < 2:  # the command and a measurement
            assert time.monotonic() < deadline
            time.sleep(0.1)
        doctor.send_signal(number)
        assert doctor.wait(120) == 130
    finally:
        doctor.kill()
        doctor.wait()
    assert not find_run_pids(tmp_path)


def test_a_check_that_fails_is_a_result_and_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = "import os, sys\nif 'losses' in sys.orig_argv:\n    os.write(2, b'the disk is full')\n    os._exit(7)\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert main({"device": "cpu", "json": False}) == 1
    captured = capsys.readouterr()
    assert captured.out.count("FAILED") == 2
    assert "the disk is full" in captured.out
    assert "measured  speed" in captured.out
    assert "2 failed" in captured.err


def test_a_gpu_that_torch_cannot_use_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main({"device": "cuda", "json": False}) == 1
    assert "torch 2" in capsys.readouterr().err
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main({"device": "auto", "json": False}) == 1
    assert "check the driver with nvidia-smi" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "Invalid value for --device: needs --train"),
        (["config.yml", "--train"], "Invalid value for CONFIG: --train checks this machine, without a config"),
    ],
)
def test_options_that_do_not_belong_together(options: list[str], message: str) -> None:
    argv = [sys.executable, "-m", "swarmtrain", "doctor", *options]
    completed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert message in completed.stderr


def run_table(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    """Run a part of tests/gpu on the CPU, and return its output and its rows by module and name."""
    rows = folder / "rows.jsonl"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "python_files=rows_*.py",
        "--basetemp",
        str(folder / "tests"),
        "-p",
        "no:cacheprovider",
        "--rows",
        str(rows),
    ]
    completed = subprocess.run([*argv, "--device", "cpu", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    return completed, {f"{record['stage']}: {record['name']}": record for record in records}


def test_rows_of_the_table_are_printed_and_recorded(tmp_path: Path) -> None:
    equivalence = "tests/gpu/rows_equivalence.py::test_losses_equal_float32_on_the_cpu"
    completed, rows = run_table(tmp_path, f"{equivalence}[bfloat16]", f"{equivalence}[compiled, documents]", "tests/gpu/rows_facts.py")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert rows["equivalence: bfloat16"]["outcome"] == "passed"
    assert 0 < rows["equivalence: bfloat16"]["values"]["loss_error"] < 2e-3
    assert "ok      equivalence: bfloat16 " in completed.stdout
    skipped = rows["equivalence: compiled, documents"]
    assert (skipped["outcome"], skipped["reason"]) == ("skipped", "needs a GPU")
    assert next(iter(rows)) == "facts: versions", "they come first"
    records = tmp_path / "rows.jsonl"
    program = f"import sys, json; sys.path.insert(0, 'tests/gpu'); import speed_section as page; lines = open({str(records)!r})\n" + (
        "section = page.render_section([json.loads(line) for line in lines])\n"
        "first = page.replace_section('# Speed\\n\\ntext\\n\\n## CPU, torch 1.0\\n\\nkept\\n', section)\n"
        "assert page.replace_section(first, section) == first\nprint(first)"
    )
    page = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "kept" in page
    assert "| bfloat16 | passed | loss error " in page


@pytest.mark.test_all_only("trains and compiles for minutes; the gate runs some rows")
def test_the_table_on_the_cpu(tmp_path: Path) -> None:
    completed, rows = run_table(tmp_path, "tests/gpu")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    skipped = {name for name, row in rows.items() if row["outcome"] == "skipped"}
    assert {"equivalence: float8, tensorwise", "equivalence: compiled, float8"} <= skipped
    launched = {"launched_run: deploy", "launched_run: stop and resume", "launched_run: killed rank"}
    assert launched | {"multiple_ranks: pipeline parallel, two ranks", "multiple_ranks: killed rank"} <= rows.keys() - skipped
