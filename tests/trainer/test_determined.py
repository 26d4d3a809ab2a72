"""A run inside a trial of Determined, with that project's own package: its master asks the run to make room, and hears its losses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from master import TRIAL, Master
from worlds import World, audit, changed, losses, steps_saved

from swarmtrain.wire import EXIT_PLANNED

pytestmark = pytest.mark.test_all_only("needs only the API of Determined; preemption itself is in test_resume.py")

LONG = {"train_iterations": 60, "eval_interval": 30}


def test_off_its_cluster_a_preempted_trial_saves_and_goes_on(tmp_path: Path, config: dict[str, Any]) -> None:
    long = changed(config, trainer=LONG)
    once, twice = World(tmp_path / "once", long, 2, TRIAL, script="trial"), World(tmp_path / "twice", long, 2, TRIAL, script="trial")
    twice.until(lambda: len(audit(tmp_path / "twice")) > 10)
    (tmp_path / "twice" / "make-room").touch()
    assert twice.wait() == [0] * 2, twice.log()
    (step,) = steps_saved(tmp_path / "twice")
    assert 5 <= step < 60
    assert {max(line["step"] for line in audit(tmp_path / "twice") if line["rank"] == rank) for rank in range(2)} == {step}
    assert (tmp_path / "twice" / "acknowledged").exists()
    (tmp_path / "twice" / "make-room").unlink()
    again = World(tmp_path / "twice", long, 2, TRIAL, script="trial")
    assert (once.wait(), again.wait()) == ([0, 0], [0, 0]), once.log() + again.log()
    assert not (tmp_path / "once" / "acknowledged").exists()
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")


def test_a_trials_master_asks_and_hears(tmp_path: Path, config: dict[str, Any], master: Master) -> None:
    """The package's own client, of which only the other end of the wire is ours."""
    long = changed(config, trainer=LONG, logger={"log_interval": 3})
    world = World(tmp_path, long, 2, master.environ, script="trial")
    world.until(lambda: len(audit(tmp_path)) > 10)
    master.preempts.set()
    assert world.wait() == [0] * 2, world.log()
    (step,) = steps_saved(tmp_path)
    assert master.acknowledged == 1
    master.preempts.clear()
    again = World(tmp_path, long, 2, master.environ, script="trial")
    assert again.wait() == [0, 0], again.log()
    assert master.acknowledged == 1
    heard = {group: [each for each in master.reported if each["group"] == group] for group in ("training", "validation")}
    steps = [each["stepsCompleted"] for each in heard["training"]]
    assert steps == [*range(3, 61, 3)]
    assert all(each["metrics"]["avgMetrics"]["loss"] == losses(tmp_path)[each["stepsCompleted"]] for each in heard["training"])
    assert [each["stepsCompleted"] for each in heard["validation"]] == [0, 30, 60]
    assert step


def test_a_master_that_breaks_does_not_stop_training(tmp_path: Path, config: dict[str, Any], master: Master) -> None:
    """It never says whether to make room, and takes no losses."""
    master.silent = master.refuses = True
    world = World(tmp_path, changed(config, trainer=LONG), 2, {**master.environ, "DET_RETRY_CONFIG": '{"total": 0}'}, script="trial")
    assert world.wait() == [0, 0], world.log()
    assert master.answers == 0
    assert len(losses(tmp_path)) == 60
    assert "what the run has come to is no longer told" in world.log()


@pytest.mark.parametrize("asked_by", ["a master that is not told", "SIGTERM"])
def test_without_a_master_that_knows_better_the_exit_code_says_that_there_is_more(
    tmp_path: Path, config: dict[str, Any], master: Master, asked_by: str
) -> None:
    master.refuses = True
    world = World(tmp_path, changed(config, trainer=LONG), 2, {**master.environ, "DET_RETRY_CONFIG": '{"total": 0}'}, script="trial")
    world.until(lambda: len(audit(tmp_path)) > 10)
    world.send(1, signal.SIGTERM) if asked_by == "SIGTERM" else master.preempts.set()
    assert world.wait() == [EXIT_PLANNED] * 2, world.log()
    assert len(steps_saved(tmp_path)) == 1
