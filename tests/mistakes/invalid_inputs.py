"""Configs, overrides and texts that are wrong in all kinds of ways, as hypothesis strategies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from swarmtrain.config.starter_files import render_template
from swarmtrain.errors import ConfigError, SwarmtrainError

ROOT = Path(__file__).parents[2]

QUICKSTART = yaml.safe_load((ROOT / "examples" / "quickstart.yml").read_text())
VALID_CONFIGS = (
    QUICKSTART,
    yaml.safe_load(render_template()),
    {
        "runner": {
            "hosts": ["gpu-1 slots=2", "gpu-2"],
            "env": {"A": "$HOME {{.Node.ID}}"},
            "script_args": ["--x", "$5 {{"],
            "secrets": {"KEY": "key"},
            "docker_config": {"docker_mounts": ["/mnt/$x{{y}}", "/data", "cache", "/cache"], "memory": "16g", "cpus": 2.5},
            "swarm": {"gpu": "reserve", "mtu": 9000, "labels": {"rack": "$1"}},
        },
        "topology": {"global_batch_size": 12, "micro_batch_size": 2},
        "training_groups": [{"group_name": "all", "parameters_include": ["."]}],
    },
    {
        "runner": {
            "runner_type": "slurm",
            "nodes": 2,
            "slurm": {
                "account": "lab",
                "time": "1-12:00:00",
                "gres": "gpu:4",
                "prelude": ["module load cuda"],
                "options": ["--nice=5"],
                "apptainer": {"image": "run.sif", "binds": ["/data:/data:ro"], "env": {"A": "$B"}},
            },
        },
    },
    {
        "runner": {
            "runner_type": "ssh_docker",
            "hosts": ["gpu-1 slots=0,1", "gpu-2"],
            "docker_config": {"docker_sudo": True, "docker_mounts": [["data", "/data"]], "volumes": {"data": {"o": "addr=10.0.0.1,$x"}}},
        },
    },
)
# fmt: off
HOSTILE_STRINGS = (
    "", " ", "\t", "\0", "\x1b[31m", "\u202e", "\ud800", "é🦊", "{{.Node.ID}}", "{{", "$", "${X}", "$$", "*", "&a b", "!tag", "<<",
    "- a", "a: b", "#", "1e400", "0x10", "0o7", "1_000", "190:20:30", "yes", "~", "null", ".nan", "2001-01-01", "/", "/dev/zero", "..",
    "a" * 63, "a" * 64, "a" * 5000, "9" * 400, "9" * 5000, "localhost", "host", "gpu-1 slots=4", "gpu-1\n", "(" * 200, "a{99999999999}",
    "[[", "SWARMTRAIN_X", "a.b.c", "0", "-1",
)
YAML_SNIPPETS = st.sampled_from((
    "\t", "{", "}", "[", "]", ":", "- ", "? ", "*a", "&a ", "!!int ", "!!python/object/apply:os.system ", "<<: *a\n", "---\n", "...\n",
    "%YAML 9.9\n", "|\n", ">\n", '"', "'", "#", "\0", "\x07", "\ufeff", "[" * 300, "- " * 300, "? " * 300, "\u2028", "{{", "$", "\\ud800",
    "\r\n",
))
# fmt: on
INTEGERS = st.one_of(st.integers(-3, 70_000), st.integers(), st.sampled_from([2**31, 2**63, 10**30, 10**400, -(10**30)]))
STRINGS = st.one_of(st.sampled_from(HOSTILE_STRINGS), st.text(max_size=20))
MAPPING_KEYS = st.one_of(STRINGS, STRINGS, st.none(), st.booleans(), INTEGERS, st.binary(max_size=5), st.dates())
SCALARS = st.one_of(MAPPING_KEYS, st.floats())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(MAPPING_KEYS, inner, max_size=4)),
    max_leaves=8,
)


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every key and item below `value`."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from iterate_paths(item, (*path, key))


@st.composite
def mutated_configs(draw: st.DrawFn) -> Any:
    """A valid config with one to four of its keys dropped, replaced, renamed, moved or added to."""
    config = copy.deepcopy(draw(st.sampled_from(VALID_CONFIGS)))
    for _ in range(draw(st.integers(1, 4))):
        *parents, last = draw(st.sampled_from(list(iterate_paths(config)) or [("x",)]))
        target = config
        for key in parents:
            target = target[key]
        if not isinstance(target, dict | list) or (isinstance(target, dict) and last not in target):
            continue
        change = draw(st.sampled_from(["drop", "replace", "replace", "rename", "add", "copy"]))
        if change == "drop":
            del target[last]
        elif change == "replace" or isinstance(target, list):
            target[last] = draw(VALUES)
        elif change == "rename":
            target[draw(MAPPING_KEYS)] = target.pop(last)
        elif change == "add":
            target[draw(MAPPING_KEYS)] = draw(VALUES)
        else:
            target[str(last)] = copy.deepcopy(draw(st.sampled_from(list(VALID_CONFIGS))))
    return config


@st.composite
def config_texts(draw: st.DrawFn) -> bytes:
    """What a config file may hold: a changed config, the same with its text torn, any text, any bytes."""
    kind = draw(st.sampled_from(["changed"] * 5 + ["torn"] * 3 + ["text", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    if kind == "text":
        text = draw(st.text(max_size=300))
    else:
        text = yaml.dump(
            draw(mutated_configs()), allow_unicode=draw(st.booleans()), default_flow_style=draw(st.sampled_from([None, True, False]))
        )
    for _ in range(draw(st.integers(1, 3)) if kind == "torn" else 0):
        position = draw(st.integers(0, len(text)))
        text = text[:position] + draw(st.one_of(YAML_SNIPPETS, st.text(max_size=3))) + text[position + draw(st.integers(0, 5)) :]
    return text.encode(errors="surrogatepass")


@st.composite
def permissive_configs(draw: st.DrawFn) -> bytes:
    """A config with any text wherever the config allows any: most of these are sound."""
    plain = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
    words = st.one_of(st.sampled_from([word for word in HOSTILE_STRINGS if word.isprintable() and len(word) < 100]), plain)
    names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
    paths = words.map(lambda word: f"/mnt/{word}")
    count = draw(st.integers(1, 6))
    config = {
        "runner": {
            "hosts": [
                f"{host}-{index}"
                for index, host in enumerate(draw(st.lists(st.from_regex(r"[a-z]{1,9}", fullmatch=True), min_size=count, max_size=count)))
            ],
            "env": draw(st.dictionaries(names, words, max_size=3)),
            "script_args": draw(st.lists(words, max_size=3)),
            "secrets": dict.fromkeys(draw(st.lists(names, max_size=2)), "key"),
            "stop_grace": draw(st.floats(5, 86400)),
            "docker_config": {
                "docker_mounts": [
                    [source, f"/at/{index}{target}"]
                    for index, (source, target) in enumerate(draw(st.lists(st.tuples(paths, words), max_size=2)))
                ],
                "shm_size": draw(st.integers(1, 2**62)),
                "cpus": draw(st.floats(0.01, 65536)),
            },
            "swarm": {
                "labels": draw(
                    st.dictionaries(
                        st.from_regex(r"[a-z]{2,9}", fullmatch=True), st.from_regex(r"[A-Za-z0-9 $.*-]{1,9}", fullmatch=True), max_size=2
                    )
                ),
                "encrypted": draw(st.booleans()),
            },
        },
        "logger": {"wandb_project": draw(words), "log_dir": draw(words)},
        "script": draw(
            st.dictionaries(
                words, st.one_of(words, st.floats(), st.lists(words, max_size=2), st.dictionaries(words, words, max_size=2)), max_size=3
            )
        ),
    }
    return yaml.dump(config, allow_unicode=draw(st.booleans())).encode(errors="surrogatepass")


KEYS = [".".join(map(str, path)) for config in VALID_CONFIGS for path in iterate_paths(config)]
OVERRIDES = st.one_of(
    st.builds(
        lambda key, value: f"{key}={value}",
        st.one_of(st.sampled_from(KEYS), st.sampled_from(HOSTILE_STRINGS), st.text(max_size=15), st.just("a" + ".a" * 400)),
        st.one_of(
            st.sampled_from(HOSTILE_STRINGS), st.text(max_size=15), VALUES.map(lambda value: yaml.dump(value, default_flow_style=True))
        ),
    ),
    st.text(max_size=30),
    st.sampled_from(HOSTILE_STRINGS),
)


def check_error_format(error: SwarmtrainError) -> None:
    problems = error.problems if isinstance(error, ConfigError) else ()
    assert error.message
    assert isinstance(error, ConfigError) or error.place
    for problem in problems:
        assert problem.message
        assert f"{problem.path}{problem.message}{problem.hint or ''}".isprintable()
        assert len(str(problem)) < 1000
    assert len(problems) <= 51
    for text, hint in error.messages_with_hints:
        assert all(line.isprintable() for line in f"{text}\n{hint or ''}".replace("\t", "\n").split("\n")), repr(text)
