"""Who the ranks are where the config does not say: the owner of the folder that they save to, as it is here or as it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarmtrain.config import Config
from swarmtrain.config.load import parse
from swarmtrain.launchers import offline_plan
from swarmtrain.launchers.owner import settle
from swarmtrain.render import compose

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to others")


def config(source: Path | str, save_dir: str = "runs/first", *overrides: str) -> Config:
    text = f"runner: {{hosts: [a], script: train.py, docker_config: {{docker_mounts: [[{source}, /workspace/runs]]}}}}"
    return parse(text, [f"trainer.save_dir={save_dir}", *overrides])


def settled(config: Config, up: Config | None = None) -> tuple[str | None, str]:
    made, why = settle(config, lambda: up)
    return made.runner.docker_config.user, why


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder that somebody has made as himself."""
    os.chown(tmp_path, 1234, 100)
    return tmp_path


@ROOT_ONLY
def test_the_owner_of_the_folder_here(mine: Path) -> None:
    assert settled(config(mine)) == ("1234:100", f"user: 1234:100, the owner of {mine} here")
    (mine / "first").mkdir()
    os.chown(mine / "first", 77, 77)
    assert settled(config(mine)) == ("77:77", f"user: 77:77, the owner of {mine}/first here")


@ROOT_ONLY
@pytest.mark.parametrize("owner", [0, 65534])
def test_root_and_nobody_are_left_to_the_image(tmp_path: Path, owner: int) -> None:
    os.chown(tmp_path, owner, owner)
    user, why = settled(config(tmp_path))
    assert user is None
    assert why.startswith(f"user: the image's, for {tmp_path} here is ")


@ROOT_ONLY
def test_nothing_is_settled_where_it_is_said_or_elsewhere(mine: Path) -> None:
    assert settled(config(mine, "runs/first", "runner.docker_config.user='7'")) == ("7", "")
    assert settled(config(mine, "other")) == (None, "")
    assert settled(config(mine, "null")) == (None, "")
    assert settled(config("volume")) == (None, "")
    assert settled(config(mine / "absent")) == (None, ""), "what is above the mount is not what is mounted"
    assert settled(config(mine, "runs/first", "runner.runner_type=local")) == (None, "")


@ROOT_ONLY
def test_a_run_that_is_up_keeps_what_it_has(mine: Path) -> None:
    here, up = config(mine), config(mine, "runs/first", "runner.docker_config.user='7:7'")
    assert settled(here, up) == ("7:7", "user: 7:7, as the run that is up has it")
    assert settled(here, here) == (None, "")
    assert settled(here, config("/elsewhere", "runs/first", "runner.docker_config.user='7:7'"))[0] == "1234:100"


@ROOT_ONLY
def test_the_stack_file_and_the_plan_say_the_same(mine: Path) -> None:
    (mine / "train.py").write_text("train()\n")
    plan = offline_plan(config(mine), "demo", folder=mine)
    assert f"  user: 1234:100, the owner of {mine} here" in str(plan).splitlines()
    services = compose.stack(plan).document["services"]
    assert services["node0"]["user"] == "1234:100"
    assert services["node0"]["environment"]["HOME"] == "/tmp"
