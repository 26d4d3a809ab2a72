"""Metrics of a custom script: reduced over ranks, each step once, and wherever the script runs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import ROOT, LocalWorld

import swarmtrain.trainer
from swarmtrain import protocol
from swarmtrain.errors import ConfigError, TrainingError
from swarmtrain.protocol import EXIT_PLANNED

LAST_STEP = 20


def build_expected_line(step: int) -> dict[str, Any]:
    """Return the expected line of two ranks, without what a restart changes."""
    first, second = 10 * step, 10 * step + 1
    line = {"step": step, "loss": step * 10 + 0.5, "tokens": first + second, "least": first, "most": second, "final": second}
    line |= {"each": [first, -first, second, -second], "accuracy": 0.75}
    return line | ({"validation_loss": step / 2, "nothing": None} if step % 5 == 0 else {})


def read_lines(folder: Path) -> dict[int, dict[str, Any]]:
    """Return each step's line. Fails if a step has a name twice."""
    lines_by_step: dict[int, dict[str, Any]] = {}
    for line in map(json.loads, (folder / "logs" / "metrics.jsonl").read_text().splitlines()):
        step = lines_by_step.setdefault(line["step"], {"step": line["step"]})
        assert not (step.keys() & line.keys()) - {"step"}
        step |= line
    return lines_by_step


@pytest.mark.test_all_only("kills torchrun's workers several times")
def test_killed_and_restarted_by_torchrun_every_step_is_logged_once(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KILL_STEP": "1"}
    script = ROOT / "tests" / "trainer" / "custom_script.py"
    done = subprocess.run([*torchrun, script], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = read_lines(tmp_path)
    assert [line.pop("found") for line in found.values()] == [0.0] * 10 + [12.0] * 10, "12 had been written, 10 was gone on after"
    assert found == {step: build_expected_line(step) for step in range(1, LAST_STEP + 1)}
    with (tmp_path / "logs" / "metrics.csv").open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [*range(1, LAST_STEP + 1)]
    assert done.stdout.count("[rank 1] step 20  ") == 1
    assert "[rank 0]" not in done.stdout


@pytest.mark.parametrize(
    "environ",
    [pytest.param({}, marks=pytest.mark.test_all_only("the same without a world")), {"JOINS": "1"}],
    ids=["alone", "script joins"],
)
def test_a_script_exits_when_a_stop_is_requested(tmp_path: Path, environ: dict[str, str]) -> None:
    world = LocalWorld(tmp_path, {}, 2, {**environ, "STOP_STEP": "1"}, script="custom_script")
    assert world.wait() == [EXIT_PLANNED] * 2, world.read_log()
    assert sorted(read_lines(tmp_path)) == [1, 2, 3], "the step was logged before ranks left"


def test_a_script_that_has_joined_by_itself_continues_in_its_world(tmp_path: Path) -> None:
    world = LocalWorld(tmp_path, {}, 2, {"JOINS": "1"}, script="custom_script")
    assert world.wait() == [0, 0], world.read_log()
    found = read_lines(tmp_path)
    assert {step: {**line, "found": 0} for step, line in found.items()} == {
        step: {**build_expected_line(step), "found": 0} for step in found
    }
    assert sorted(found) == [*range(1, LAST_STEP + 1)]


@pytest.mark.usefixtures("_single_process")
def test_steps_continue_where_a_run_rolls_back_or_resumes(tmp_path: Path) -> None:
    def logged(*steps: int | None, at: int | None = None) -> dict[int, float]:
        with swarmtrain.trainer.run(logger={"log_dir": "logs"}) as run:
            if at is not None:
                run.step = at
            for step in steps:
                run.log(step=step, loss=run.step)
        return {step: line["loss"] for step, line in read_lines(tmp_path).items()}

    assert logged(None, None, None) == {1: 0, 2: 1, 3: 2}
    assert logged(None) == {1: 0, 2: 1, 3: 2, 4: 3}
    assert logged(7) == {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
    assert logged(3) == {1: 0, 2: 1, 3: 7}
    assert logged(None, at=1) == {1: 0, 2: 1}
    assert logged(2, 3, at=2) == {1: 0, 2: 1, 3: 2}, "what stands of the step that it goes on after stays"


@pytest.mark.usefixtures("_single_process")
def test_without_a_config_lines_are_only_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with swarmtrain.trainer.run() as run:
        assert (run.rank, run.world_size, run.local_rank, run.device.type) == (0, 1, 0, "cpu")
        for _ in range(11):
            run.log(loss=0.25, tokens=run.sum(3))
    assert capsys.readouterr().out == "step 10  loss 0.2500  tokens 3\nstep 11  loss 0.2500  tokens 3\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_single_process")
@pytest.mark.parametrize(
    ("value", "message"),
    [("high", "loss is not a number but str"), (torch.zeros(3), "loss has 3 elements"), (None, "is not a number but NoneType")],
)
def test_what_is_not_a_number_is_refused(value: object, message: str) -> None:
    with pytest.raises(TrainingError, match=message), swarmtrain.trainer.run() as run:
        run.log(loss=value)


@pytest.mark.usefixtures("_single_process")
def test_an_invalid_logger_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="did you mean use_csv"), swarmtrain.trainer.run(logger={"use_cvs": True}):
        pass


@pytest.mark.usefixtures("_single_process")
def test_the_coordinator_receives_the_progress_of_a_script(
    coordinator_address: str, published_events: list[protocol.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMTRAIN_COORDINATOR", coordinator_address)
    with swarmtrain.trainer.run() as run:
        run.log(loss=torch.tensor(0.5), each=run.cat([1, 2]))
    (progress,) = [event.data for event in published_events if event.kind == protocol.EVENT_PROGRESS]
    assert progress == {"step": 1, "loss": 0.5}


def test_a_rank_may_exit_before_the_end_of_the_block(tmp_path: Path) -> None:
    world = LocalWorld(tmp_path, {}, 2, script="early_exit")
    assert world.wait() == [0, 0], world.read_log()
