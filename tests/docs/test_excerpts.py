"""Parts of pages that no test of tests/howto types: excerpts of configs load, and the README shows the errors that are really printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from toy_package import install_toy_package

from swarmtrain.config import Config
from swarmtrain.config.loader import load_config, parse_section
from swarmtrain.config.schema.queue_policy import QueuePolicy
from swarmtrain.errors import ConfigError

ROOT = Path(__file__).parents[2]
# These have invalid configs, and stack files.
_EXCLUDED_PAGES = {"errors.md", "stack-file.md"}
_BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)


def iterate_excerpts() -> Iterator[tuple[str, str]]:
    """Yield the page and text of every YAML block that has a section of a config."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for text in _BLOCK.findall(page.read_text()):
            keys = set(yaml.safe_load(text)) if page.name not in _EXCLUDED_PAGES else set()
            if keys & set(Config.model_fields):
                yield str(page.relative_to(ROOT)), text


def test_excerpts_of_configs_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install_toy_package(tmp_path / "packages")))
    found = list(iterate_excerpts())
    assert len(found) > 15
    for page, text in found:
        path = tmp_path / "config.yml"
        path.write_text(text.replace("PINNED", "registry.lab:5000/swarmtrain:1"))
        try:
            if "swarm_secret:" in text:  # notify is a section of the queue's policy, too
                parse_section(text, QueuePolicy)
            else:
                load_config(path, [])
        except ConfigError as error:
            pytest.fail(f"{page}: {error}\n{text}")


def test_the_readme_shows_the_errors_that_are_printed(tmp_path: Path) -> None:
    shown = re.search(r"```\n(error: config\.yml: .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    runner = ["runner:", "  script: train.py", "", "  nodes: 4", "  hosts: [gpu-1, gpu-2, gpu-3]"]
    (tmp_path / "config.yml").write_text("\n".join([*runner, "topology:", *[""] * 5, "  micro_batchsize: 2"]))
    argv = [sys.executable, "-m", "swarmtrain", "plan", "config.yml"]
    done = subprocess.run(argv, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.stderr == shown[1]
