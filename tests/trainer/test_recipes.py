"""CONTRIBUTING.md's recipes, followed to the letter in a copy of the package: a launcher, a metrics sink and an objective are built in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_package import page  # lies next to this folder
from worlds import ROOT, merge_config

_PLUGIN_FILES = {
    "toy/swarmtrain_toy/launcher.py": "swarmtrain/launchers/toy/__init__.py",
    "toy/swarmtrain_toy/sink.py": "swarmtrain/trainer/metrics/sinks/text_file.py",
}
_OBJECTIVE_FILE = "swarmtrain/trainer/objectives/focal_loss.py"


@pytest.fixture(scope="module")
def extended_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the three examples, saved where the recipes say and with the recipes' diffs applied."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "swarmtrain", tree / "swarmtrain", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "training_code.py", tree)
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("## Recipes")[2]
    saved = {step.file_name: step.text for step in page.read_page("docs/how-to/plugins.md") if step.kind == "save"}
    custom_objectives = (ROOT / "docs/explanation/model.md").read_text().partition("## Custom objectives")[2]
    files = {target: saved[source] for source, target in _PLUGIN_FILES.items()}
    files[_OBJECTIVE_FILE] = re.findall(r"^```python\n(.*?)^```$", custom_objectives, re.MULTILINE | re.DOTALL)[0]
    for name, text in files.items():
        assert re.search(rf"saved\s+as\s+`{re.escape(name)}`", recipes), name
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(f"{text.strip()}\n")
    diffs = re.findall(r"^```diff\n(.*?)^```$", recipes, re.MULTILINE | re.DOTALL)
    assert len(diffs) == len(files)
    for diff in diffs:
        subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=tree, input=diff, text=True, check=True)
    return tree


def run_python(tree: Path, folder: Path, *arguments: str) -> str:
    """Run Python with the package in `tree`, which must succeed; return its output."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def train(tree: Path, folder: Path, config: dict[str, Any], **objective: Any) -> list[float]:
    """Train three steps with the built-in sink of the recipe; return the loss of each step, as the sink has written it."""
    values = merge_config(config, trainer={"train_iterations": 3, "save_dir": None, **objective}, logger={"log_dir": "logs"})
    values["logger"] |= {"sinks": {"text_file": {"name": "losses.txt"}}, "audit_dir": None}
    folder.mkdir()
    (folder / "config.yml").write_text(yaml.safe_dump(values))
    run_python(tree, folder, str(tree / "training_code.py"), "config.yml")
    lines = [line.split() for line in (folder / "logs" / "losses.txt").read_text().splitlines()]
    assert [line[1] for line in lines] == ["1", "2", "3"]
    return [float(line[3]) for line in lines]


def test_the_launcher_of_the_recipe_deploys_a_run(extended_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.yml").write_text("runner: {runner_type: toy}\n")
    (tmp_path / "training_code.py").write_text("")
    assert "run toy by toy on the folder toy-runs" in run_python(extended_tree, tmp_path, "-m", "swarmtrain", "plan", "toy.yml")
    run_python(extended_tree, tmp_path, "-m", "swarmtrain", "deploy", "toy.yml", "--detach")
    assert "node0" in run_python(extended_tree, tmp_path, "-m", "swarmtrain", "status", "toy")
    assert "toy removed" in run_python(extended_tree, tmp_path, "-m", "swarmtrain", "down", "toy")


@pytest.mark.test_all_only("trains the recipes of a page; the gate has sinks and objectives of other packages")
def test_the_sink_and_the_objective_of_the_recipes_train(extended_tree: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    """With an exponent of 0 the focal loss is the cross-entropy, and with 2 it is smaller."""
    cross_entropy = train(extended_tree, tmp_path / "none", config)
    assert train(extended_tree, tmp_path / "zero", config, focal_config={"gamma": 0.0}) == pytest.approx(cross_entropy, rel=1e-6)
    focal = train(extended_tree, tmp_path / "two", config, focal_config={"gamma": 2.0})
    assert focal[0] < cross_entropy[0]
    assert focal[2] < focal[0]
