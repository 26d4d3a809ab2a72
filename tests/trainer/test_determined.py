"""A run inside a Determined trial, with Determined's own package: the master preempts the run and receives its losses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from determined_service import TRIAL, DeterminedMaster
from worlds import LocalWorld, list_saved_steps, merge_config, read_audit, read_losses

from swarmtrain.protocol import EXIT_PLANNED

pytestmark = pytest.mark.test_all_only("needs only the API of Determined; preemption itself is in test_resume.py")

LONG = {"train_iterations": 60, "eval_interval": 30}


def test_off_its_cluster_a_preempted_trial_saves_and_resumes(tmp_path: Path, config: dict[str, Any]) -> None:
    long = merge_config(config, trainer=LONG)
    once, twice = (
        LocalWorld(tmp_path / "once", long, 2, TRIAL, script="determined_trial"),
        LocalWorld(tmp_path / "twice", long, 2, TRIAL, script="determined_trial"),
    )
    twice.wait_until(lambda: len(read_audit(tmp_path / "twice")) > 10)
    (tmp_path / "twice" / "make-room").touch()
    assert twice.wait() == [0] * 2, twice.read_log()
    (step,) = list_saved_steps(tmp_path / "twice")
    assert 5 <= step < 60
    assert {max(line["step"] for line in read_audit(tmp_path / "twice") if line["rank"] == rank) for rank in range(2)} == {step}
    assert (tmp_path / "twice" / "acknowledged").exists()
    (tmp_path / "twice" / "make-room").unlink()
    again = LocalWorld(tmp_path / "twice", long, 2, TRIAL, script="determined_trial")
    assert (once.wait(), again.wait()) == ([0, 0], [0, 0]), once.read_log() + again.read_log()
    assert not (tmp_path / "once" / "acknowledged").exists()
    assert read_losses(tmp_path / "twice") == read_losses(tmp_path / "once")


def test_a_trials_master_preempts_and_receives_metrics(tmp_path: Path, config: dict[str, Any], determined_master: DeterminedMaster) -> None:
    """With the package's own client; only the server is a stand-in."""
    long = merge_config(config, trainer=LONG, logger={"log_interval": 3})
    world = LocalWorld(tmp_path, long, 2, determined_master.environ, script="determined_trial")
    world.wait_until(lambda: len(read_audit(tmp_path)) > 10)
    determined_master.preempt_event.set()
    assert world.wait() == [0] * 2, world.read_log()
    (step,) = list_saved_steps(tmp_path)
    assert determined_master.acknowledgments == 1
    determined_master.preempt_event.clear()
    again = LocalWorld(tmp_path, long, 2, determined_master.environ, script="determined_trial")
    assert again.wait() == [0, 0], again.read_log()
    assert determined_master.acknowledgments == 1
    heard = {group: [each for each in determined_master.reported_metrics if each["group"] == group] for group in ("training", "validation")}
    steps = [each["stepsCompleted"] for each in heard["training"]]
    assert steps == [*range(3, 61, 3)]
    assert all(each["metrics"]["avgMetrics"]["loss"] == read_losses(tmp_path)[each["stepsCompleted"]] for each in heard["training"])
    assert [each["stepsCompleted"] for each in heard["validation"]] == [0, 30, 60]
    assert step


def test_a_master_that_fails_does_not_stop_training(tmp_path: Path, config: dict[str, Any], determined_master: DeterminedMaster) -> None:
    """It never answers whether to preempt, and rejects losses."""
    determined_master.is_silent = determined_master.is_refusing = True
    world = LocalWorld(
        tmp_path,
        merge_config(config, trainer=LONG),
        2,
        {**determined_master.environ, "DET_RETRY_CONFIG": '{"total": 0}'},
        script="determined_trial",
    )
    assert world.wait() == [0, 0], world.read_log()
    assert determined_master.preemption_answers == 0
    assert len(read_losses(tmp_path)) == 60
    assert "metrics are no longer reported" in world.read_log()


@pytest.mark.parametrize("asked_by", ["a master that is not notified", "SIGTERM"])
def test_without_a_master_the_exit_code_requests_a_restart(
    tmp_path: Path, config: dict[str, Any], determined_master: DeterminedMaster, asked_by: str
) -> None:
    determined_master.is_refusing = True
    world = LocalWorld(
        tmp_path,
        merge_config(config, trainer=LONG),
        2,
        {**determined_master.environ, "DET_RETRY_CONFIG": '{"total": 0}'},
        script="determined_trial",
    )
    world.wait_until(lambda: len(read_audit(tmp_path)) > 10)
    world.send_signal(1, signal.SIGTERM) if asked_by == "SIGTERM" else determined_master.preempt_event.set()
    assert world.wait() == [EXIT_PLANNED] * 2, world.read_log()
    assert len(list_saved_steps(tmp_path)) == 1
