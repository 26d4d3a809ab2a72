"""The sbatch scripts of two plans, without and with a container. REFRESH=1 pytest tests/golden rewrites them.

Apptainer is in no package registry: its command line is checked against its documented flags here, and not run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.launchers.planner import read_inventory
from swarmtrain.planning.plan import build_plan
from swarmtrain.render.sbatch_script import JobLayout, compute_job_digest, render_sbatch_script

GOLDEN = Path(__file__).parent / "slurm"
SITE = JobLayout(PurePosixPath("/home/ada/.local/state/swarmtrain/demo"), "/home/ada/my project", "/home/ada/venv/bin/python")
CONFIGS: dict[str, dict[str, Any]] = {
    "bare": {
        "nodes": 4,
        "min_nodes": 2,
        "max_nodes": 4,
        "env": {"NOTE": "it's $5"},
        "script_args": ["--note", "two words"],
        "slurm": {
            "account": "physics",
            "partition": "gpu",
            "qos": "long",
            "time": "1-12:00:00",
            "gpus_per_node": 4,
            "cpus_per_node": 32,
            "memory": "0",
            "constraint": "a100&ib",
            "exclude": "n[01-03,7]",
            "log_dir": "/scratch/ada/logs",
            "options": ["--reservation=mine", "--exclusive"],
            "prelude": ["module load cuda/12.4"],
        },
    },
    "apptainer": {
        "hosts": ["n04", "n05"],
        "default_gpu_count": 2,
        "master_port": 29500,
        "slurm": {
            "gres": "gpu:2",
            "requeue": False,
            "apptainer": {
                "image": "/images/train.sif",
                "nv": True,
                "binds": ["/scratch", "/data:/data:ro"],
                "home": "/home/ada:/root",
                "env": {"HF_HOME": "/scratch/hf"},
            },
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_script_of_a_config(name: str) -> None:
    made = render_demo_script(name)
    golden = GOLDEN / f"{name}.sbatch"
    if os.environ.get("REFRESH"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(made)
    assert made == golden.read_text()
    subprocess.run(["bash", "-n", str(golden)], check=True)
    assert "hush" not in made


def render_demo_script(name: str) -> str:
    config = Config.from_json(json.dumps({"runner": {"runner_type": "slurm", **CONFIGS[name]}, "trainer": {"save_dir": "/scratch/runs"}}))
    cargo = Cargo((RunFile.from_content("training_code.py", b""),), (RunFile.from_content("TOKEN", b"hush"),))
    plan = build_plan(config, read_inventory(config), cargo, run="demo")
    # The config's digest changes with every new key, and is irrelevant here.
    return render_sbatch_script(plan, SITE).replace(compute_job_digest(plan), "DIGEST")
