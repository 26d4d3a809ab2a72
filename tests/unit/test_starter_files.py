"""`swarmtrain init`: a short config that loads, its schema, and the training script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from swarmtrain.config.json_schema import EDITOR_LINE, SCHEMA_FILE_NAME, render_json_schema
from swarmtrain.config.loader import load_config, parse_config
from swarmtrain.config.presets import PRESET_NAMES
from swarmtrain.config.starter_files import render_starter_config, render_template, write_starter_files
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers.planner import plan_run, plan_run_offline

ROOT = Path(__file__).parents[2]
MAX_LINES = 40


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json.loads(render_json_schema())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def list_schema_errors(validator: Draft202012Validator, text: str) -> list[str]:
    # YAML 1.1, which PyYAML implements, reads 1.0e-3 as a number and 1e-3 as text; editors use YAML 1.2.
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(yaml.safe_load(text) or {})]


def is_valid(text: str) -> bool:
    try:
        parse_config(text)
    except SwarmtrainError:
        return False
    return True


@pytest.mark.parametrize("preset", [None, *PRESET_NAMES])
def test_the_config_is_short_and_loads(validator: Draft202012Validator, preset: str | None) -> None:
    text = EDITOR_LINE + render_starter_config("demo", preset=preset)
    assert len(text.splitlines()) <= MAX_LINES
    assert max(map(len, text.splitlines())) <= 120
    config = parse_config(text)
    assert (config.runner.runner_type, config.runner.nodes, str(config.trainer.save_dir)) == ("local", 1, "runs/demo")
    assert list_schema_errors(validator, text) == []


def test_its_next_command_works_in_an_empty_folder(folder: Path) -> None:
    written = write_starter_files(Path("config.yml"))
    assert [str(path) for path in written] == ["config.yml", SCHEMA_FILE_NAME, "training_code.py", "datautils.py"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(map(str, written))
    assert (folder / "training_code.py").read_bytes() == (ROOT / "training_code.py").read_bytes()
    plan = plan_run(load_config("config.yml"), "config", working_folder=folder)
    assert [file.name for file in plan.cargo.code] == ["training_code.py", "datautils.py"]
    assert (folder / "config.yml").read_text().splitlines()[0] == f"# yaml-language-server: $schema={SCHEMA_FILE_NAME}"


def test_files_of_the_user_are_kept(folder: Path) -> None:
    (folder / "training_code.py").write_text("print('mine')\n")
    write_starter_files(Path("config.yml"))
    assert (folder / "training_code.py").read_text() == "print('mine')\n"
    (folder / "config.yml").write_text("{}\n")
    with pytest.raises(SwarmtrainError, match="exists already"):
        write_starter_files(Path("config.yml"))
    assert (folder / "config.yml").read_text() == "{}\n"
    write_starter_files(Path("config.yml"), force=True)
    assert (folder / "config.yml").read_text() != "{}\n"


@pytest.mark.parametrize("script", ["train.py", "src/my script: a #1.py"])
def test_a_script_of_the_user(folder: Path, script: str) -> None:
    (folder / script).parent.mkdir(exist_ok=True)
    (folder / script).touch()
    assert len(write_starter_files(Path("config.yml"), script=Path(script))) == 2
    assert not (folder / "training_code.py").exists()
    config = load_config("config.yml")
    assert str(config.runner.script) == script
    assert plan_run(config, "config", working_folder=folder).world_size == 1
    assert "topology" not in (folder / "config.yml").read_text()


def test_a_script_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(SwarmtrainError, match="no such file"):
        write_starter_files(Path("config.yml"), script=Path("train.py"))
    assert list(folder.iterdir()) == []


def test_the_full_config_has_every_key(validator: Draft202012Validator) -> None:
    write_starter_files(Path("config.yml"), full=True)
    text = Path("config.yml").read_text()
    assert text.startswith(EDITOR_LINE)
    assert load_config("config.yml") == parse_config("{}")
    assert list_schema_errors(validator, render_template()) == []


@pytest.mark.parametrize(
    "values",
    [
        {"runner": {"docker_config": {"shm_size": "8g", "docker_mounts": ["/a", "/b", "/c", "/d"], "user": 1000}}},
        {"runner": {"docker_config": {"docker_mounts": [["/a", "/b"]], "memory": 1024}}},
        {"runner": {"swarm": {"gpu": "visible", "gpu_ids": [0, "GPU-8f6a"]}, "runner_type": "ssh"}},
        {"logger": {"log_ranks": [0, 1], "sinks": ["toy"]}},
        {"logger": {"log_ranks": {"pipe_parallel_rank": 0}, "sinks": {"toy": {"name": "x"}}}},
        {"trainer": {"save_interval": "10 minutes", "init_from": None}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_notations_that_only_a_file_has_are_valid(validator: Draft202012Validator, values: dict[str, Any]) -> None:
    text = yaml.safe_dump(values)
    parse_config(text)
    assert list_schema_errors(validator, text) == []


@pytest.mark.parametrize(
    "values",
    [{"runner": {"nodez": 3}}, {"runner": {"nodes": "three"}}, {"topology": {"micro_batch_size": 0}}, {"logger": {"log_level": "loud"}}],
)
def test_errors_are_marked(validator: Draft202012Validator, values: dict[str, Any]) -> None:
    assert list_schema_errors(validator, yaml.safe_dump(values))


def test_the_examples_are_valid(validator: Draft202012Validator) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)]
    texts = [path.read_text() for path in sorted((ROOT / "examples").glob("*.yml")) if path.name != "prometheus-alerts.yml"]
    texts += [block for block in blocks if block.startswith("runner:") and is_valid(block)]
    assert len(texts) > 20
    for text in texts:
        assert list_schema_errors(validator, text) == [], text


def test_without_a_swarm_a_stack_file_has_placeholders(folder: Path) -> None:
    (folder / "training_code.py").touch()
    config = parse_config("runner: {nodes: 3, swarm: {labels: {disk: ssd}}}")
    plan = plan_run_offline(config, "demo", working_folder=folder, use_placeholders=True)
    assert [node.constraint for node in plan.nodes] == [f"node.hostname==HOST{index}" for index in range(3)]
    assert plan.notes[-1] == "replace HOST0, HOST1, HOST2 in the file by host names of the swarm (docker node ls)"
    listed = parse_config("runner: {hosts: [a, b]}")
    assert [node.host for node in plan_run_offline(listed, "demo", working_folder=folder, use_placeholders=True).nodes] == ["a", "b"]
