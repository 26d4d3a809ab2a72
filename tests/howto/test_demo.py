"""`swarmtrain demo`, on a lab and on local nodes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import image_cache
import pytest

from swarmtrain.lab import Lab

DEMO_LAB = "demo"


def run_demo(folder: Path, environment: dict[str, str], *options: str) -> str:
    """Run the demo in the empty folder `folder`, and return its output."""
    done = subprocess.run(
        ["swarmtrain", "demo", "here", "--yes", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def check_result(folder: Path, output: str) -> None:
    """Check that the model learned more than the baseline, and that the output ends with the newest checkpoint."""
    final_loss, baseline = re.findall(r"validation loss \S+ → (\S+), byte-bigram baseline (\S+)", output)[-1]
    assert float(final_loss) < float(baseline)
    checkpoint = output.splitlines()[-1]
    assert checkpoint == "here/runs/quickstart/step-00000500"
    assert (folder / checkpoint / "manifest.json").exists()


@pytest.mark.test_all_only("it builds the image and trains the quickstart")
def test_the_demo_on_a_swarm(create_lab: Callable[[str], Lab], installed_environment: dict[str, str], tmp_path: Path) -> None:
    lab, cache = create_lab(DEMO_LAB), image_cache.find_shared_cache()
    if cache is not None and cache.exists():  # the demo uses the lab that it finds, and builds only what the image of another suite lacks
        image_cache.restore_registry(cache)
        lab.bring_up(3, shared_folder=tmp_path / "here" / "runs", report_progress=print)
        image_cache.restore_images(lab, [node.node for node in lab.get_status()], cache)
    output = run_demo(tmp_path, installed_environment, "--lab")
    assert "a world of 3 ranks on 3 nodes has formed" in output
    check_result(tmp_path, output)
    assert not lab.directory.exists()


@pytest.mark.test_all_only("it trains the quickstart")
def test_the_demo_on_local_nodes(installed_environment: dict[str, str], tmp_path: Path) -> None:
    output = run_demo(tmp_path, installed_environment, "--local")
    check_result(tmp_path, output)
    listed = subprocess.run(["swarmtrain", "status"], cwd=tmp_path, env=installed_environment, capture_output=True, text=True, check=False)
    assert "no run exists" in listed.stderr
