"""The reference is complete: every variable that the code reads or sets, and every key of a stack file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
# Matches os.environ["X"], environ.get("X", …), environ.setdefault("X", …), "X" in os.environ, and torch's agent passing on its own.
_READ = re.compile(r'environ(?:\[|\.(?:get|setdefault|pop)\()"([A-Z][A-Z0-9_]+)"|"([A-Z][A-Z0-9_]+)" (?:not )?in (?:os\.)?environ')
_NAME = re.compile(r"`([A-Z][A-Z0-9_]+)`")


def find_variables_in_code() -> set[str]:
    code = [*(ROOT / "swarmtrain").rglob("*.py"), ROOT / "training_code.py", ROOT / "datautils.py"]
    return {first or second for path in code for first, second in _READ.findall(path.read_text())}


def test_the_pattern_finds_what_the_code_reads() -> None:
    assert {"DOCKER_HOST", "NO_COLOR", "RANK", "XDG_STATE_HOME", "SWARMTRAIN_LAB_DIR"} <= find_variables_in_code()


def test_every_variable_is_in_the_reference() -> None:
    documented = set(_NAME.findall((REFERENCE / "environment.md").read_text()))
    assert find_variables_in_code() - documented == set()


def test_what_torchs_agent_passes_to_its_ranks_is_in_the_reference() -> None:
    documented = set(_NAME.findall((REFERENCE / "environment.md").read_text()))
    agents = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}
    interfaces = set(re.findall(r'"([A-Z]+_SOCKET_IFNAME)"', (ROOT / "swarmtrain" / "entrypoint" / "network_interface.py").read_text()))
    assert len(interfaces) == 3
    assert (agents | interfaces) - documented == set()


def test_every_key_of_the_stack_file_is_explained() -> None:
    """In the text outside the excerpts: an excerpt shows a key but does not explain it."""
    page = re.sub(r"```.*?```", "", (REFERENCE / "stack-file.md").read_text(), flags=re.DOTALL)
    documented = set(re.findall(r"`([a-z_-]+)(?::[^`]*)?`", page))
    document = yaml.safe_load((ROOT / "compose" / "generated.yml").read_text())
    assert set(iterate_keys(document)) - documented == set()


def iterate_keys(value: Any, *, keys_are_names: bool = False) -> Iterator[str]:
    """Yield the keys that Docker defines. The keys of services, networks, configs, labels and environment are our own names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not keys_are_names:
                yield key
            yield from iterate_keys(
                inner, keys_are_names=not keys_are_names and key in ("services", "networks", "configs", "labels", "environment")
            )
    elif isinstance(value, list):
        for inner in value:
            yield from iterate_keys(inner)
