"""The plan of a run whose training becomes longer names the jump of its learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtrain.config.loader import load_config
from swarmtrain.launchers.local import LocalLauncher
from swarmtrain.launchers.planner import plan_run

CONFIG = "runner: {runner_type: local, nodes: 1, script: train.py}\ntrainer: {train_iterations: 100}\n"
TRAIN = "import swarmtrain.trainer\n# swarmtrain.trainer.run() and run.prepare_training() would follow\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    Path("config.yml").write_text(CONFIG)
    launcher = LocalLauncher()
    launcher.deploy_run(plan_run(load_config("config.yml", []), "demo", working_folder=tmp_path), print)
    yield "demo"
    launcher.tear_down_run("demo", print)


def test_a_plan_names_the_learning_rate_that_a_longer_training_changes(run: str, tmp_path: Path) -> None:
    note = "the learning rate of step 100 is 0.0005 instead of 0, since trainer.train_iterations is 200 instead of 100"
    plans = [
        plan_run(load_config("config.yml", [f"trainer.train_iterations={steps}"]), run, working_folder=tmp_path) for steps in (100, 200)
    ]
    assert [note in plan.notes for plan in plans] == [False, True]
    assert note in str(plans[1])
