"""`deploy --attach RANK`: one rank gets the terminal, the others run in the background."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.test_all_only("starts a debugger in a rank; no other part of a launcher depends on it")

ROOT = Path(__file__).parents[2]
TRAIN = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from lib import helper
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
if dist.get_rank() == 1:
    breakpoint()
dist.all_reduce(total)
print("sum", total.item(), helper.NAME, Path(os.environ["TOKEN_FILE"]).read_text(), sys.argv[1:])
dist.destroy_process_group()
sys.exit(dist.is_initialized() or int(os.environ["RANK"]) * 3)
"""
CONFIG = """
runner:
  nodes: 3
  script: src/train.py
  script_args: [--fast]
  code: [lib/helper.py]
  secrets: {TOKEN: token}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {"src/train.py": TRAIN, "lib/helper.py": "NAME = 'helped'\n", "token": "hidden", "config.yml": CONFIG}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run_deploy(project: Path, *options: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `swarmtrain deploy` in `project` with `stdin` as its input."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "swarmtrain", "deploy", "config.yml", *options]
    return subprocess.run(argv, cwd=project, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_a_rank_stops_at_its_breakpoint(project: Path) -> None:
    done = run_deploy(project, "--attach", "1", stdin="print('its number:', int(total))\ntotal += 10\ncontinue\n")
    assert "its number: 2" in done.stdout
    assert "sum 16 helped hidden ['--fast']" in done.stdout
    assert done.returncode == 3, done.stderr
    logs = {path.name: path.read_text() for path in (project / "home" / "swarmtrain" / "config").glob("rank*.log")}
    assert logs == dict.fromkeys(("rank0.log", "rank2.log"), "sum 16 helped hidden ['--fast']\n")
    assert "rank2 exited with code 6" in done.stderr


def test_a_rank_that_is_not_there_is_refused(project: Path) -> None:
    done = run_deploy(project, "--attach", "3")
    assert done.returncode == 1
    assert "error: --attach 3: unknown rank; valid ranks: 0 to 2" in done.stderr
