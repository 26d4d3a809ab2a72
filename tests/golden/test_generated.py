"""compose/generated.yml is what `swarmtrain generate examples/quickstart.yml` writes. REFRESH=1 pytest tests/golden rewrites it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOSTS = "runner.hosts=[node0, node1, node2]"


def generate(output: Path) -> None:
    argv = [sys.executable, "-m", "swarmtrain", "generate", "examples/quickstart.yml", "-o", HOSTS, "--output", str(output)]
    subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_committed_stack_file_is_current(tmp_path: Path) -> None:
    if os.environ.get("REFRESH"):
        generate(ROOT / "compose" / "generated.yml")
    generate(tmp_path / "generated.yml")
    assert contents(tmp_path) == contents(ROOT / "compose")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        generate(tmp_path / name / "generated.yml")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
