"""The tutorial from an empty folder: only the wheel is installed, into an empty environment, in an empty home directory."""

from __future__ import annotations

import zipfile
from pathlib import Path

import image_cache
import page
import pytest
from conftest import OpenShell
from page import ROOT
from page_runner import PageRunner

from swarmtrain.images.wheels import build_swarmtrain_wheel
from swarmtrain.lab import Lab


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build_swarmtrain_wheel(folder, report_progress=print)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_the_files_that_it_writes(wheel: Path) -> None:
    """In a checkout they are symlinks."""
    with zipfile.ZipFile(wheel) as archive:
        for name in ("training_code.py", "datautils.py", "examples/quickstart.yml"):
            assert archive.read(f"swarmtrain/config/shipped/{Path(name).name}") == (ROOT / name).read_bytes()


def test_the_tutorial_from_an_empty_folder(
    default_lab: Lab, environment: dict[str, str], wheel: Path, tmp_path: Path, open_shell: OpenShell
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    reader = PageRunner([open_shell(folder, environment)], {"WHEEL": str(wheel)})
    steps = page.read_page("docs/tutorial/from-an-empty-folder.md")
    image = next(number for number, step in enumerate(steps) if "image build" in step.text)
    image_cache.restore_registry(image_cache.find_shared_cache())
    reader.run_steps(steps[:image])
    image_cache.restore_images(default_lab, [node.node for node in default_lab.get_status()], image_cache.find_shared_cache())
    reader.run_steps(steps[image:])
    assert not default_lab.shared_disk.exists()
