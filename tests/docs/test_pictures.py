"""The docs' pictures: each picture on a page exists, each picture is used, and the script that takes them works."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

from swarmtrain.config.loader import load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGES = ROOT / "docs" / "images"
SCRIPT = IMAGES / "take_screenshots.py"
MAX_BYTES = 400_000
_IMAGE_PATTERN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"[^>]* alt=\"([^\"]*)\"")


def read_alternative_texts() -> dict[Path, str]:
    """Return picture → alternative text for all pages."""
    return {
        (page.parent / (markdown or tag)).resolve(): text or alternative
        for page in PAGES
        for text, markdown, tag, alternative in _IMAGE_PATTERN.findall(page.read_text())
    }


def test_every_picture_of_a_page_exists_and_has_an_alternative_text() -> None:
    assert [path for path, text in read_alternative_texts().items() if not path.is_file() or not text] == []
    images = sum(len(re.findall(r"!\[|<img ", page.read_text())) for page in PAGES)
    assert images == sum(len(_IMAGE_PATTERN.findall(page.read_text())) for page in PAGES), "an image in a form that this test cannot read"


def test_every_picture_is_shown_and_none_is_large() -> None:
    pictures = sorted([*IMAGES.glob("*.png"), *IMAGES.glob("*.svg")])
    assert pictures
    assert [path.name for path in pictures if path not in read_alternative_texts()] == []
    assert [path.name for path in pictures if path.stat().st_size > MAX_BYTES] == []


def test_the_script_writes_the_screenshots_that_are_shown() -> None:
    written = set(re.findall(r'"([\w-]+\.png)"', SCRIPT.read_text()))
    assert written == {path.name for path in read_alternative_texts() if path.parent == IMAGES and path.suffix == ".png"}


def test_the_script_has_help() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "--keep" in done.stdout


def test_the_settings_of_the_runs_are_those_of_the_config() -> None:
    script = runpy.run_path(str(SCRIPT))
    for name, steps in (("TRAINING_SETTINGS", "STEPS"), ("LEAKING_SETTINGS", "STEPS"), ("CLUSTER_SETTINGS", "CLUSTER_STEPS")):
        overrides = [f"{key}={value}" for key, value in script[name].items()]
        config = load_config(ROOT / script["CONFIG"], overrides)
        assert config.trainer.train_iterations == script[steps]
        assert all((ROOT / path).is_file() for path in (config.runner.script, *config.runner.code))


def test_the_leaking_script_uses_what_the_training_script_has() -> None:
    tree = ast.parse((IMAGES / "leak.py").read_text())
    wanted = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "training_code" for name in node.names
    }
    defined = {
        node.name for node in ast.parse((ROOT / "training_code.py").read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert wanted
    assert wanted <= defined


def test_a_missing_browser_is_an_error_with_a_next_step() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env={"PATH": "/nonexistent"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "error: browser: chromium is not installed\nhint: sh requirements/system.sh\n"
