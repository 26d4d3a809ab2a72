"""A plan names the variables of runner.env that look like credentials: their values are visible to others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.config import Config
from swarmtrain.launchers.planner import plan_run_offline


def list_notes(folder: Path, **runner: Any) -> list[str]:
    (folder / "training_code.py").touch()
    runner = {"hosts": ["a"], "script": "training_code.py", **runner}
    plan = plan_run_offline(Config.from_json(json.dumps({"runner": runner})), "demo", working_folder=folder, use_placeholders=True)
    return [note for note in plan.notes if note.startswith("runner.env")]


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "TOKEN", "PGPASSWORD", "DB_PASSWORD", "wandb_api_key"])
def test_a_variable_that_is_named_like_a_credential_is_a_note_without_its_value(name: str, tmp_path: Path) -> None:
    (note,) = list_notes(tmp_path, env={"SEED": "1", name: "hush"})
    assert note.startswith(f"runner.env: {name} can be read in docker inspect")
    assert "runner.secrets" in note
    assert "hush" not in note


def test_other_variables_are_not(tmp_path: Path) -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us", "MONKEY": "x", "HF_TOKEN": "", "HF_TOKEN_PATH": "/run/secrets/HF_TOKEN"}
    assert list_notes(tmp_path, env=env) == []


def test_runs_without_containers_do_not_mention_docker(tmp_path: Path) -> None:
    (note,) = list_notes(tmp_path, env={"HF_TOKEN": "hush"}, runner_type="ssh")
    assert "in the config and checkpoints" in note
    assert "docker" not in note
