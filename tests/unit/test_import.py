"""What becomes of other tools' files: each of tests/unit/imports beside what is made of it, and nothing in them is passed over.

REFRESH=1 pytest tests/unit/test_import.py writes what is made of them anew.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarmtrain import importers
from swarmtrain.config import Config
from swarmtrain.config.load import parse
from swarmtrain.config.source import read_yaml
from swarmtrain.errors import ConfigError, SwarmtrainError
from swarmtrain.importers import book, deepspeed
from swarmtrain.importers.book import is_secret

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "imports"
SOURCES = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".out")
MAPPINGS = [name for name in SOURCES if name.endswith((".yml", ".json"))]


def made(name: str, text: str | None = None) -> importers.Import:
    return importers.convert((FOLDER / name).read_text() if text is None else text, name)


def told(result: importers.Import) -> str:
    return f"{result.yaml()}---\n{result.report()}\n"


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_made_of_a_file(name: str) -> None:
    golden, text = FOLDER / f"{name}.out", told(made(name))
    if os.environ.get("REFRESH"):
        golden.write_text(text)
    assert golden.read_text() == text


@pytest.mark.parametrize("name", SOURCES)
def test_it_loads_and_holds_no_default(name: str) -> None:
    text = made(name).yaml()
    config, usual = parse(text).model_dump(mode="json"), Config().model_dump(mode="json")
    set_here = [key for key, _ in leaves(read_yaml(text).values) if key[0] not in ("topology", "training_groups")]
    assert [key for key in set_here if at(config, key) == at(usual, key)] == []


@pytest.mark.parametrize("name", MAPPINGS)
def test_no_value_of_a_mapping_is_passed_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is changed in it, the config or the list changes, or it is refused."""
    monkeypatch.setattr(book, "_LONGEST", 10**6)
    values = read_yaml((FOLDER / name).read_text()).values
    form = made(name).format
    before = importers.convert(dumped(values), name, form=form).to_dict()
    passed_over = []
    for key, value in leaves(values):
        changed = copy.deepcopy(values)
        put(changed, key, other(value))
        try:
            if importers.convert(dumped(changed), name, form=form).to_dict() == before and not is_secret(key[-1]):
                passed_over.append(key)
        except SwarmtrainError:
            continue
    assert passed_over == []


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_taken_for_another_format_is_no_crash(name: str) -> None:
    for form in importers.Format:
        with contextlib.suppress(SwarmtrainError):
            importers.convert((FOLDER / name).read_text(), name, form=form)


@pytest.mark.parametrize("name", MAPPINGS)
def test_what_is_of_another_kind_than_it_should_be_is_no_crash(name: str) -> None:
    values, form = read_yaml((FOLDER / name).read_text()).values, made(name).format
    wrong = itertools.cycle(["text", [["text"], None], {"a": {"b": [1]}}, 7])
    for key in sections(values):
        changed = copy.deepcopy(values)
        put(changed, key, next(wrong))
        with contextlib.suppress(SwarmtrainError):
            importers.convert(dumped(changed), name, form=form)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in MAPPINGS])
def test_no_line_of_a_script_or_hostfile_is_passed_over(name: str) -> None:
    lines, before = (FOLDER / name).read_text().splitlines(), made(name).to_dict()
    passed_over = []
    for number, line in enumerate(lines):
        if line.strip() and (not line.startswith("#") or line.startswith("#SBATCH")):
            try:
                text = "\n".join([*lines[:number], "", *lines[number + 1 :]])
                if made(name, text).to_dict() == before:
                    passed_over.append(line)
            except SwarmtrainError:
                continue
    assert passed_over == []


def test_a_launcher_that_there_is_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kinds of launchers are asked for when a file is read."""
    kept = book.Book({})
    monkeypatch.setattr(book, "RunnerType", StrEnum("All", {kind: kind for kind in ("swarm", "local", "docker", "pdsh", "slurm")}))
    assert (kept.place("pdsh"), kept.place("slurm"), kept.place("docker")) == ("pdsh", "slurm", "docker")
    monkeypatch.setattr(book, "RunnerType", StrEnum("Few", {kind: kind for kind in ("swarm", "local")}))
    assert (kept.place("pdsh"), kept.place("slurm"), kept.place("docker")) == ("swarm", "swarm", "local")


def test_a_json_and_its_hostfile() -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}'
    result = importers.load(FOLDER / "hostfile").result.values["runner"]["hosts"]
    values = importers.convert(text, "ds.json", hosts=tuple(result)).result.values
    assert values["runner"]["hosts"] == ["gpu-1 slots=4", "gpu-2 slots=4", "node01.lab slots=2", "node02.lab slots=2", "node03.lab slots=2"]
    assert values["topology"] == {"global_batch_size": 2 * 3 * 14, "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds nothing"),
        ("\n  \n", "holds nothing"),
        ("{}\n", "holds nothing"),
        ("just words\n", 'is none that is known: it holds "just words"'),
        ("- a\n- b\n", "is none that is known: it holds a list"),
        ("replicaCount: 3\nimage: x\n", "is none that is known, by its keys image, replicaCount"),
        ("runner: {runner_type: swarm}\n", "is a swarmtrain config already"),
        ("#!/bin/bash\necho hello\n", "starts neither torchrun nor python"),
        ("#!/bin/bash\nA=aaaaaaaaaa\n" + "A=$A$A\n" * 60 + "torchrun train.py $A\n", "starts neither torchrun nor python"),
        ("services: {db: {image: postgres}}\n", "none of them trains"),
        ("runner: [\n", "is neither YAML nor JSON"),
        ("topology: {a: 1}\ntopology: {b: 1}\n", "stands twice"),
    ],
)
def test_what_is_none_of_these(text: str, message: str) -> None:
    with pytest.raises(SwarmtrainError) as raised:
        importers.convert(text, "file")
    assert message in raised.value.text


@pytest.mark.parametrize("form", [form for form in importers.Format if form is not importers.Format.sbatch])
def test_an_empty_mapping_is_refused_in_every_format(form: importers.Format) -> None:
    with pytest.raises(SwarmtrainError, match="holds nothing"):
        importers.convert("{}", "file", form=form)


def test_a_value_that_is_refused_is_told_with_its_own_place() -> None:
    with pytest.raises(ConfigError) as raised:
        importers.convert('{"bf16": {"enabled": true},\n "train_batch_size": 24,\n "train_micro_batch_size_per_gpu": 5}', "ds.json")
    assert raised.value.text.startswith(
        "error: ds.json: config train_batch_size, here topology.global_batch_size (line 2): 24 is no multiple of micro_batch_size 5"
    )
    with pytest.raises(ConfigError) as raised:
        deepspeed.read_hosts("gpu-1 slots=4\ngpu 2 slots=4\ngpu-3 slots=x\n", "hosts")
    assert "(line 2)" in raised.value.text
    assert "(line 3)" in raised.value.text


def test_the_command(tmp_path: Path) -> None:
    """Data on stdout, talk on stderr, no file is overwritten unless that is asked for; what is no text is refused."""
    (tmp_path / "ds.json").write_text((FOLDER / "deepspeed-small.json").read_text())
    (tmp_path / "binary").write_bytes(b"\x80\x00\x01")
    (tmp_path / "huge.yml").write_text("a: 1\n" * 300_000)
    (tmp_path / "hosts").write_text("gpu-1 slots=2\n")
    script = """
import contextlib, io, json, sys
from swarmtrain.__main__ import command
def call(*argv):
    sys.argv = ["swarmtrain", "import", *argv]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command()
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
    assert parse(plain[1]).runner.hosts == ("gpu-1 slots=2",)
    assert "not in the config:" in plain[2]
    assert (written[0], written[1]) == (0, "")
    assert written[2].endswith("wrote config.yml\nnext: swarmtrain plan config.yml\n")
    assert again[0] == 1
    assert "config.yml: exists already\nhint: --force overwrites it" in again[2]
    assert forced[0] == 0
    assert yaml.safe_load(as_json[1])["config"] == yaml.safe_load((tmp_path / "config.yml").read_text())
    assert (binary[0], "is not text" in binary[2]) == (1, True)
    assert (huge[0], "1.5 MB; at most 1 MB are read" in huge[2]) == (1, True)
    assert (none[0], "no such file" in none[2]) == (1, True)
    assert (unknown[0], "there are scaling, accelerate, deepspeed, sbatch, compose" in unknown[2]) == (1, True)


def leaves(values: Any, key: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, (*key, name))
    elif isinstance(values, list) and any(isinstance(item, dict) for item in values):
        for index, value in enumerate(values):
            yield from leaves(value, (*key, index))
    else:
        yield key, values


def sections(values: Any, key: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if key:
        yield key
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from sections(value, (*key, name))


def at(values: Any, key: tuple[Any, ...]) -> Any:
    for part in key:
        if not isinstance(values, dict | list) or part not in values:
            return key
        values = values[part]
    return values


def put(values: Any, key: tuple[Any, ...], value: Any) -> None:
    for part in key[:-1]:
        values = values[part]
    values[key[-1]] = value


def other(value: Any) -> Any:
    """Return another value, of the same kind where it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return ["another", *value[1:]]
    return f"another {value}"


def dumped(values: Any) -> str:
    return json.dumps(values, indent=1)


@pytest.mark.parametrize(("folder", "used"), [("", False), ("  log_dir: logs\n", True)])
def test_scaling_writes_nothing_to_tensorboard_without_a_folder(folder: str, *, used: bool) -> None:
    text = f"version: .unknown.\nlogger:\n  use_tensorboard: true\n{folder}transformer_architecture: {{hidden_size: 64}}\n"
    result = importers.convert(text, "config.yml", form=importers.Format.scaling)
    assert parse(result.yaml()).logger.use_tensorboard == used
    assert ("logger.log_dir says where to" in str(result.report())) != used
