"""Importing other tools' files: each of tests/unit/imports has its expected result next to it, and nothing in a file is skipped.

REFRESH=1 pytest tests/unit/test_import.py rewrites the expected results.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarmtrain import importers
from swarmtrain.config import Config
from swarmtrain.config.loader import parse_config
from swarmtrain.config.yaml_document import read_yaml
from swarmtrain.errors import ConfigError, SwarmtrainError
from swarmtrain.importers import deepspeed, migration_report
from swarmtrain.importers.migration_report import is_secret_name

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "imports"
SOURCES = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".out")
MAPPINGS = [name for name in SOURCES if name.endswith((".yml", ".json"))]


def convert_fixture(name: str, text: str | None = None) -> importers.ImportedConfig:
    source = (FOLDER / name).read_text()
    settings = importers.parse_script_settings(tuple(re.findall(r"^# --set (.*)$", source, re.MULTILINE)), None)
    return importers.import_config_text(source if text is None else text, name, settings=settings)


def format_import(result: importers.ImportedConfig) -> str:
    return f"{result.to_yaml()}---\n{result.format_report()}\n"


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_is_converted(name: str) -> None:
    golden, text = FOLDER / f"{name}.out", format_import(convert_fixture(name))
    if os.environ.get("REFRESH"):
        golden.write_text(text)
    assert golden.read_text() == text


@pytest.mark.parametrize("name", SOURCES)
def test_it_loads_and_holds_no_default(name: str) -> None:
    text = convert_fixture(name).to_yaml()
    config, usual = parse_config(text).model_dump(mode="json"), Config().model_dump(mode="json")
    set_here = [key for key, _ in iterate_leaves(read_yaml(text).values) if key[0] not in ("topology", "training_groups")]
    assert [key for key in set_here if get_value(config, key) == get_value(usual, key)] == []


@pytest.mark.parametrize("name", MAPPINGS)
def test_no_value_of_a_mapping_is_skipped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If any of its values changes, the config or the migration report changes, or the file is refused."""
    monkeypatch.setattr(migration_report, "_MAX_VALUE_LENGTH", 10**6)
    values = read_yaml((FOLDER / name).read_text()).values
    form = convert_fixture(name).format
    before = importers.import_config_text(dump_json(values), name, source_format=form).to_dict()
    passed_over = []
    for key, value in iterate_leaves(values):
        changed = copy.deepcopy(values)
        set_value(changed, key, change_value(value))
        try:
            if importers.import_config_text(dump_json(changed), name, source_format=form).to_dict() == before and not is_secret_name(
                key[-1]
            ):
                passed_over.append(key)
        except SwarmtrainError:
            continue
    assert passed_over == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_read_as_another_format_does_not_crash(name: str) -> None:
    for form in importers.SourceFormat:
        with contextlib.suppress(SwarmtrainError):
            importers.import_config_text((FOLDER / name).read_text(), name, source_format=form)


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_value_of_another_type_does_not_crash(name: str) -> None:
    values, form = read_yaml((FOLDER / name).read_text()).values, convert_fixture(name).format
    wrong = itertools.cycle(["text", [["text"], None], {"a": {"b": [1]}}, 7])
    for key in iterate_paths(values):
        changed = copy.deepcopy(values)
        set_value(changed, key, next(wrong))
        with contextlib.suppress(SwarmtrainError):
            importers.import_config_text(dump_json(changed), name, source_format=form)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in MAPPINGS])
def test_no_line_of_a_script_or_hostfile_is_skipped(name: str) -> None:
    lines, before = (FOLDER / name).read_text().splitlines(), convert_fixture(name).to_dict()
    passed_over = []
    for number, line in enumerate(lines):
        if line.strip() and (not line.startswith("#") or line.startswith("#SBATCH")):
            try:
                text = "\n".join([*lines[:number], "", *lines[number + 1 :]])
                if convert_fixture(name, text).to_dict() == before:
                    passed_over.append(line)
            except SwarmtrainError:
                continue
    assert passed_over == []


def test_a_json_and_its_hostfile() -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}'
    result = importers.import_config_file(FOLDER / "hostfile").result.values["runner"]["hosts"]
    values = importers.import_config_text(text, "ds.json", hosts=tuple(result)).result.values
    assert values["runner"]["hosts"] == ["gpu-1 slots=4", "gpu-2 slots=4", "node01.lab slots=2", "node02.lab slots=2", "node03.lab slots=2"]
    assert values["topology"] == {"global_batch_size": 2 * 3 * 14, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n  \n", "is empty"),
        ("{}\n", "is empty"),
        ("just words\n", 'is not a known format: it contains "just words"'),
        ("- a\n- b\n", "is not a known format: it contains a list"),
        ("replicaCount: 3\nimage: x\n", "is not a known format; its keys are image, replicaCount"),
        ("runner: {runner_type: swarm}\n", "is already a swarmtrain config"),
        ("#!/bin/bash\necho hello\n", "starts neither torchrun nor python"),
        (
            "#!/bin/bash\nA=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "torchrun train.py $A\n",
            "(line 15): cannot be parsed: the value of A is too long",
        ),
        ("services: {db: {image: postgres}}\n", "no service starts training"),
        ("runner: [\n", "is neither YAML nor JSON"),
        ("topology: {a: 1}\ntopology: {b: 1}\n", "appears twice"),
    ],
)
def test_unrecognized_formats_are_refused(text: str, message: str) -> None:
    with pytest.raises(SwarmtrainError) as raised:
        importers.import_config_text(text, "file")
    assert message in raised.value.plain_text


@pytest.mark.parametrize("form", [form for form in importers.SourceFormat if form is not importers.SourceFormat.sbatch])
def test_an_empty_mapping_is_refused_in_every_format(form: importers.SourceFormat) -> None:
    with pytest.raises(SwarmtrainError, match="is empty"):
        importers.import_config_text("{}", "file", source_format=form)


def test_a_value_that_is_refused_is_reported_with_its_own_place() -> None:
    with pytest.raises(ConfigError) as raised:
        importers.import_config_text(
            '{"bf16": {"enabled": true},\n "train_batch_size": 24,\n "train_micro_batch_size_per_gpu": 5}', "ds.json"
        )
    assert raised.value.plain_text.startswith(
        "error: ds.json: config train_batch_size (imported as topology.global_batch_size) (line 2): 24 is not a multiple"
    )
    with pytest.raises(ConfigError) as raised:
        deepspeed.parse_hostfile("gpu-1 slots=4\ngpu 2 slots=4\ngpu-3 slots=x\n", "hosts")
    assert "(line 2)" in raised.value.plain_text
    assert "(line 3)" in raised.value.plain_text


def test_the_command(tmp_path: Path) -> None:
    """Data on stdout, messages on stderr, no file is overwritten unless requested; binary files are refused."""
    (tmp_path / "ds.json").write_text((FOLDER / "deepspeed-small.json").read_text())
    (tmp_path / "binary").write_bytes(b"\x80\x00\x01")
    (tmp_path / "huge.yml").write_text("a: 1\n" * 300_000)
    (tmp_path / "hosts").write_text("gpu-1 slots=2\n")
    script = """
import contextlib, io, json, sys
from swarmtrain.__main__ import run_program
def call(*argv):
    sys.argv = ["swarmtrain", "import", *argv]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_program()
    return code, out.getvalue(), err.getvalue()
print(json.dumps([call(*argv) for argv in (
    ["ds.json", "--hostsfile", "hosts"], ["ds.json", "--output", "config.yml"], ["ds.json", "--output", "config.yml"],
    ["ds.json", "--output", "config.yml", "--force"], ["ds.json", "--json"], ["binary"], ["huge.yml"], ["none"],
    ["ds.json", "--from", "toml"])]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT), "PATH": ""}
    )
    plain, written, again, forced, as_json, binary, huge, none, unknown = yaml.safe_load(done.stdout)
    assert plain[0] == 0
    assert parse_config(plain[1]).runner.hosts == ("gpu-1 slots=2",)
    assert "not in the config:" in plain[2]
    assert (written[0], written[1]) == (0, "")
    assert written[2].endswith("wrote config.yml\nnext: swarmtrain plan config.yml\n")
    assert again[0] == 1
    assert "config.yml: exists already\nhint: use --force to overwrite it" in again[2]
    assert forced[0] == 0
    assert yaml.safe_load(as_json[1])["config"] == yaml.safe_load((tmp_path / "config.yml").read_text())
    assert (binary[0], "is not text" in binary[2]) == (1, True)
    assert (huge[0], "1.5 MB; the limit is 1 MB" in huge[2]) == (1, True)
    assert (none[0], "no such file" in none[2]) == (1, True)
    assert (unknown[0], "available formats: scaling, accelerate, deepspeed, sbatch, compose" in unknown[2]) == (1, True)


def iterate_leaves(values: Any, key: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from iterate_leaves(value, (*key, name))
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        for index, value in enumerate(values):
            yield from iterate_leaves(value, (*key, index))
    else:
        yield key, values


def iterate_paths(values: Any, key: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if key:
        yield key
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from iterate_paths(value, (*key, name))


def get_value(values: Any, key: tuple[Any, ...]) -> Any:
    for part in key:
        if not isinstance(values, dict | list) or part not in values:
            return key
        values = values[part]
    return values


def set_value(values: Any, key: tuple[Any, ...], value: Any) -> None:
    for part in key[:-1]:
        values = values[part]
    values[key[-1]] = value


def change_value(value: Any) -> Any:
    """Return another value, of the same type if possible."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return ["another", *value[1:]]
    return f"another {value}"


def dump_json(values: Any) -> str:
    return json.dumps(values, indent=1)


@pytest.mark.parametrize(("folder", "used"), [("", False), ("  log_dir: logs\n", True)])
def test_scaling_writes_nothing_to_tensorboard_without_a_folder(folder: str, *, used: bool) -> None:
    text = f"version: .unknown.\nlogger:\n  use_tensorboard: true\n{folder}transformer_architecture: {{hidden_size: 64}}\n"
    result = importers.import_config_text(text, "config.yml", source_format=importers.SourceFormat.scaling)
    assert parse_config(result.to_yaml()).logger.use_tensorboard == used
    assert ("set logger.log_dir; without it" in str(result.format_report())) != used


@pytest.mark.parametrize(
    ("service", "max_restarts", "unmapped"),
    [
        ({"deploy": {"restart_policy": {"condition": "none"}}}, 0, set()),
        ({"deploy": {"restart_policy": {"condition": "none", "max_attempts": 5, "delay": "5s"}}}, 0, {"max_attempts", "delay"}),
        ({"deploy": {"restart_policy": {"condition": "on-failure", "max_attempts": 5}}}, 5, {"condition"}),
        ({"deploy": {"restart_policy": {"max_attempts": 0}}}, None, {"max_attempts"}),  # Docker's word for unlimited
        ({"deploy": {"restart_policy": {"condition": "any", "window": "2m"}}}, None, {"condition", "window"}),
        ({"deploy": {"restart_policy": {"condition": "none"}}, "restart": "always"}, 0, {"restart"}),
        ({"deploy": {"restart_policy": {"condition": "any"}}, "restart": "no"}, None, {"condition", "restart"}),
        ({"restart": "no"}, 0, set()),
        ({"restart": False}, 0, set()),
        ({"restart": "on-failure:7"}, 7, set()),
        ({"restart": "on-failure:0"}, None, {"restart"}),
        ({"restart": "on-failure"}, None, {"restart"}),
        ({"restart": "unless-stopped"}, None, {"restart"}),
    ],
    ids=str,
)
def test_the_restart_limit_of_a_compose_service_is_kept(service: dict[str, Any], max_restarts: int | None, unmapped: set[str]) -> None:
    result = import_compose_service("torchrun --nproc_per_node=1 train.py", service)
    assert result.values["runner"].get("max_restarts") == max_restarts
    assert {key.key.rpartition(".")[2] for key in result.unmapped_keys if "restart" in key.key} == unmapped


def test_the_limit_of_torchrun_counts_not_that_of_the_container() -> None:
    """torchrun restarts the ranks within a container that Docker does not restart."""
    service = {"deploy": {"restart_policy": {"condition": "none"}}}
    result = import_compose_service("torchrun --nproc_per_node=1 --max-restarts=5 train.py", service)
    assert result.values["runner"]["max_restarts"] == 5
    assert [key.key for key in result.unmapped_keys if "restart" in key.key] == ["services.node.deploy.restart_policy.condition"]


def import_compose_service(command: str, service: dict[str, Any]) -> migration_report.ImportResult:
    text = yaml.safe_dump({"services": {"node": {"image": "example/trainer", "command": command, **service}}})
    return importers.import_config_text(text, "compose.yml").result
