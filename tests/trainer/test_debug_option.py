"""A plain DistributedDataParallel script over gloo, with the environment of `deploy --debug`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swarmtrain.cli.options import DEBUG_OVERRIDES

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""
ENVIRONMENT = dict(override.removeprefix("runner.env.").split("=") for override in DEBUG_OVERRIDES if override.startswith("runner.env."))


@pytest.mark.parametrize(
    ("level", "is_complete"),
    [
        (ENVIRONMENT["TORCH_DISTRIBUTED_DEBUG"], True),
        pytest.param("DETAIL", False, marks=pytest.mark.test_all_only("a fault of torch")),
    ],
)
def test_a_ddp_script_survives_the_option_and_crashes_at_the_level_of_which_plans_warn(
    tmp_path: Path, level: str, *, is_complete: bool
) -> None:
    """If torch no longer crashes with DETAIL, the warning in plan.py can go, and --debug can set DETAIL."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(tmp_path / "script.py")]
    environment = {**os.environ, **ENVIRONMENT, "TORCH_DISTRIBUTED_DEBUG": level, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (result.returncode == 0) == is_complete, result.stderr
    assert ("SIGSEGV" in result.stderr) != is_complete
