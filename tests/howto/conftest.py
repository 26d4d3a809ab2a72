"""Labs, shells and a checkout for the tests that follow the pages, all in folders of their own.

If this machine cannot host a lab, or has one with the name that a page uses, the tests skip and print why; with CI=true they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from page import ROOT
from page_runner import Shell

from swarmtrain.errors import LabError
from swarmtrain.lab import DEFAULT_NAME, Lab, network

OpenShell = Callable[[Path, dict[str, str]], Shell]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home directory of a reader who has never used swarmtrain. The pages of a session share it."""
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="session")
def environment(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in which no variable points to an engine, and whose labs are in a directory of their own."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SWARMTRAIN_", "VIRTUAL_ENV"))},
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "SWARMTRAIN_LAB_DIR": f"{os.environ.get('SWARMTRAIN_LAB_DIR') or tmp_path_factory.mktemp('labs')}/howto",
    }


@pytest.fixture(scope="session")
def installed_environment(environment: dict[str, str]) -> dict[str, str]:
    """The same environment with swarmtrain on the PATH."""
    return {**environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"}


@pytest.fixture(scope="session")
def image_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that builds the image stores it for the others."""
    return tmp_path_factory.mktemp("images") / "built"


@pytest.fixture(scope="session")
def copy_checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that copies the repository, including the wheels that were downloaded for an earlier image."""
    copies = [ROOT]

    def copy_repository() -> Path:
        copies.append(_copy_repository(tmp_path_factory.mktemp("checkout") / "swarmtrain", wheel_sources=copies))
        return copies[-1]

    return copy_repository


@pytest.fixture
def open_shell(tmp_path: Path) -> Iterator[OpenShell]:
    """Return a function that opens shells. They are closed at the end."""
    shells: list[Shell] = []

    def make(folder: Path, env: dict[str, str]) -> Shell:
        shells.append(Shell(folder, tmp_path / "shells" / f"{len(shells)}.txt", env))
        return shells[-1]

    yield make
    for shell in shells:
        shell.close()


@pytest.fixture
def trainer_folder(tmp_path: Path) -> Path:
    """A folder with the files that a reader of the training pages copies there."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def create_lab(environment: dict[str, str]) -> Iterator[Callable[[str], Lab]]:
    """Return a function that creates a Lab by name, without starting it. Leftovers of a lab are removed at the end."""
    labs: list[Lab] = []
    before = os.environ.get("SWARMTRAIN_LAB_DIR")
    os.environ["SWARMTRAIN_LAB_DIR"] = environment["SWARMTRAIN_LAB_DIR"]

    def make(name: str) -> Lab:
        lab = Lab(name)
        try:
            lab.check_prerequisites()
            if network.get_namespace_name(name, "bridge") in network.list_namespaces():
                raise LabError("it is already running, and is not the tests' to touch", place=f"lab {name}", hint="swarmtrain lab down")
        except LabError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"this machine cannot do what the page says: {error}")
        labs.append(lab)
        return lab

    yield make
    for lab in labs:
        lab.tear_down(report_progress=print)
    if before is None:
        del os.environ["SWARMTRAIN_LAB_DIR"]
    else:
        os.environ["SWARMTRAIN_LAB_DIR"] = before


@pytest.fixture
def default_lab(create_lab: Callable[[str], Lab]) -> Iterator[Lab]:
    """The lab with the name that the pages use. The pages start it themselves."""
    lab = create_lab(DEFAULT_NAME)
    yield lab
    lab.tear_down(report_progress=print)


def _copy_repository(target: Path, *, wheel_sources: Sequence[Path]) -> Path:
    """Copy the repository to `target`, with the downloaded wheels of the first of `wheel_sources` that has them."""
    list_command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(list_command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    wheel_folders = [source / "build" / "wheels" for source in wheel_sources]
    if complete := [folder for folder in wheel_folders if (folder / ".complete").exists()]:
        shutil.copytree(complete[0], target / "build" / "wheels", copy_function=_link_or_copy)
    return target


def _link_or_copy(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # on another file system
        shutil.copy2(source, target)
