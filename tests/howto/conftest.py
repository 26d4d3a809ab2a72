"""Labs, shells and a checkout for the tests that do what the pages say, all in folders of their own.

Where this machine can host no lab, or has one of the name that a page uses, the tests skip and say why; with CI=true they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page import ROOT
from reader import Shell

from swarmtrain.errors import LabError
from swarmtrain.lab import DEFAULT_NAME, Lab, fabric

OpenShell = Callable[[Path, dict[str, str]], Shell]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a reader who has never used swarmtrain, which the pages of a session share."""
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="session")
def environment(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell in which nothing points to any engine, and whose labs are in a directory of their own."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SWARMTRAIN_", "VIRTUAL_ENV"))},
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "SWARMTRAIN_LAB_DIR": f"{os.environ.get('SWARMTRAIN_LAB_DIR') or tmp_path_factory.mktemp('labs')}/howto",
    }


@pytest.fixture(scope="session")
def installed(environment: dict[str, str]) -> dict[str, str]:
    """That environment, with swarmtrain installed."""
    return {**environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"}


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test that builds the image leaves it for the others."""
    return tmp_path_factory.mktemp("images") / "built"


@pytest.fixture(scope="session")
def new_checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that copies the repository, with the wheels that were downloaded for an image before."""
    return lambda: _copy(tmp_path_factory.mktemp("checkout") / "swarmtrain")


@pytest.fixture
def open_shell(tmp_path: Path) -> Iterator[OpenShell]:
    """Return a function that opens shells, which are closed at the end."""
    shells: list[Shell] = []

    def make(folder: Path, env: dict[str, str]) -> Shell:
        shells.append(Shell(folder, tmp_path / "shells" / f"{len(shells)}.txt", env))
        return shells[-1]

    yield make
    for shell in shells:
        shell.close()


@pytest.fixture
def trainer_folder(tmp_path: Path) -> Path:
    """A folder with what a person who trains copies there."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(ROOT / name, here / name)
    return here


@pytest.fixture(scope="session")
def labs(environment: dict[str, str]) -> Iterator[Callable[[str], Lab]]:
    """Return a function that gives the lab of a name, not up yet; what is left of one is removed at the end."""
    made: list[Lab] = []
    before = os.environ.get("SWARMTRAIN_LAB_DIR")
    os.environ["SWARMTRAIN_LAB_DIR"] = environment["SWARMTRAIN_LAB_DIR"]

    def make(name: str) -> Lab:
        lab = Lab(name)
        try:
            lab.check()
            if fabric.namespace(name, "fabric") in fabric.namespaces():
                raise LabError("it runs already, and is not the tests' to touch", place=f"lab {name}", hint="swarmtrain lab down")
        except LabError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"this machine cannot do what the page says: {error}")
        made.append(lab)
        return lab

    yield make
    for lab in made:
        lab.down(say=print)
    if before is None:
        del os.environ["SWARMTRAIN_LAB_DIR"]
    else:
        os.environ["SWARMTRAIN_LAB_DIR"] = before


@pytest.fixture
def default_lab(labs: Callable[[str], Lab]) -> Iterator[Lab]:
    """The lab of the name that the pages use, which they bring up themselves."""
    lab = labs(DEFAULT_NAME)
    yield lab
    lab.down(say=print)


def _copy(copy: Path) -> Path:
    listed = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    if (ROOT / "build" / "wheels" / ".complete").exists():
        shutil.copytree(ROOT / "build" / "wheels", copy / "build" / "wheels", copy_function=_link)
    return copy


def _link(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # another disk
        shutil.copy2(source, target)
