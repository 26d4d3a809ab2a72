"""The user of the ranks if the config does not set it: the owner of the folder that they save to, as it is here or was at deployment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarmtrain.config import Config
from swarmtrain.config.loader import parse_config
from swarmtrain.launchers.config_resolution import resolve_container_user
from swarmtrain.launchers.planner import plan_run_offline
from swarmtrain.render import stack_document

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to others")


def build_mount_config(source: Path | str, save_dir: str = "runs/first", *overrides: str) -> Config:
    text = f"runner: {{hosts: [a], script: train.py, docker_config: {{docker_mounts: [[{source}, /workspace/runs]]}}}}"
    return parse_config(text, [f"trainer.save_dir={save_dir}", *overrides])


def get_resolved_user(config: Config, deployed: Config | None = None) -> tuple[str | None, str]:
    resolved, why = resolve_container_user(config, lambda: deployed)
    return resolved.runner.docker_config.user, why


@pytest.fixture
def owned_folder(tmp_path: Path) -> Path:
    """A folder that belongs to another user."""
    os.chown(tmp_path, 1234, 100)
    return tmp_path


@ROOT_ONLY
def test_the_owner_of_the_folder_here(owned_folder: Path) -> None:
    assert get_resolved_user(build_mount_config(owned_folder)) == (
        "1234:100",
        f"user: 1234:100, the owner of {owned_folder} on this machine",
    )
    (owned_folder / "first").mkdir()
    os.chown(owned_folder / "first", 77, 77)
    assert get_resolved_user(build_mount_config(owned_folder)) == (
        "77:77",
        f"user: 77:77, the owner of {owned_folder}/first on this machine",
    )


@ROOT_ONLY
@pytest.mark.parametrize("owner", [0, 65534])
def test_root_and_nobody_are_left_to_the_image(tmp_path: Path, owner: int) -> None:
    os.chown(tmp_path, owner, owner)
    user, why = get_resolved_user(build_mount_config(tmp_path))
    assert user is None
    assert why.startswith(f"user: the image's default, because {tmp_path} on this machine is owned by ")


@ROOT_ONLY
def test_nothing_is_resolved_where_it_is_set_or_elsewhere(owned_folder: Path) -> None:
    assert get_resolved_user(build_mount_config(owned_folder, "runs/first", "runner.docker_config.user='7'")) == ("7", "")
    assert get_resolved_user(build_mount_config(owned_folder, "other")) == (None, "")
    assert get_resolved_user(build_mount_config(owned_folder, "null")) == (None, "")
    assert get_resolved_user(build_mount_config("volume")) == (None, "")
    assert get_resolved_user(build_mount_config(owned_folder / "absent")) == (None, ""), "what is above the mount is not what is mounted"
    assert get_resolved_user(build_mount_config(owned_folder, "runs/first", "runner.runner_type=local")) == (None, "")


@ROOT_ONLY
def test_a_run_that_is_up_keeps_what_it_has(owned_folder: Path) -> None:
    here, up = build_mount_config(owned_folder), build_mount_config(owned_folder, "runs/first", "runner.docker_config.user='7:7'")
    assert get_resolved_user(here, up) == ("7:7", "user: 7:7, as in the run that is already deployed")
    assert get_resolved_user(here, here) == (None, "")
    assert get_resolved_user(here, build_mount_config("/elsewhere", "runs/first", "runner.docker_config.user='7:7'"))[0] == "1234:100"


@ROOT_ONLY
def test_the_stack_file_and_the_plan_have_the_same_user(owned_folder: Path) -> None:
    (owned_folder / "train.py").write_text("train()\n")
    plan = plan_run_offline(build_mount_config(owned_folder), "demo", working_folder=owned_folder)
    assert f"  user: 1234:100, the owner of {owned_folder} on this machine" in str(plan).splitlines()
    services = stack_document.render_stack(plan).document["services"]
    assert services["node0"]["user"] == "1234:100"
    assert services["node0"]["environment"]["HOME"] == "/tmp"
