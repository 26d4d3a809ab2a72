"""compose/generated.yml equals the output of `swarmtrain generate --offline examples/quickstart.yml`, with the placeholders replaced by the
machines of a lab, node0, node1 and node2; this folder has more such pairs.

REFRESH=1 pytest tests/golden rewrites them all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def generate_stack(output: Path) -> None:
    argv = [sys.executable, "-m", "swarmtrain", "generate", "examples/quickstart.yml", "--offline", "--output", str(output)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    output.write_text(output.read_text().replace("HOST", "node"))


def read_folder(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_committed_stack_file_is_current(tmp_path: Path) -> None:
    if os.environ.get("REFRESH"):
        generate_stack(ROOT / "compose" / "generated.yml")
    generate_stack(tmp_path / "generated.yml")
    assert read_folder(tmp_path) == read_folder(ROOT / "compose")


@pytest.mark.parametrize("name", ["everything", "host-network", "one-engine"])
def test_the_stack_file_of_a_config(name: str, tmp_path: Path) -> None:
    config, golden = Path(__file__).with_name(f"{name}.yml"), Path(__file__).parent / "stacks" / f"{name}.yml"
    made = tmp_path / f"{name}.yml"
    argv = [sys.executable, "-m", "swarmtrain", "generate", str(config), "--output", str(made)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    if os.environ.get("REFRESH"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(made.read_text())
    assert made.read_text() == golden.read_text()


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        generate_stack(tmp_path / name / "generated.yml")
    assert read_folder(tmp_path / "one") == read_folder(tmp_path / "two")
