"""Tests write only to folders that pytest made. The commands that they run have one of these as the user's home."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Variables that could lead a command to an engine of the developer, or to state outside the tests' home.
_SHELL_VARIABLES = (
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
    "DOCKER_CERT_PATH",
    "DOCKER_TLS_VERIFY",
    "XDG_STATE_HOME",
    "XDG_CONFIG_HOME",
)
# Below the real home. Programs that find it without the variable HOME, such as ssh, write there.
_WATCHED_FOLDERS = (".local/state/swarmtrain", ".config/swarmtrain", ".docker", ".ssh")


@pytest.fixture(scope="session", autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the session its own home. At the end, fail if anything was written to it or to the real one.

    The cache directory stays the user's: it has the base image and downloads, which take minutes to make.
    """
    real, home = Path.home(), tmp_path_factory.mktemp("home")
    settings = {"HOME": str(home), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(real / ".cache")}
    pip = Path(os.environ.get("XDG_CONFIG_HOME") or real / ".config") / "pip" / "pip.conf"
    if pip.is_file():
        settings["PIP_CONFIG_FILE"] = str(pip)
    if (real / ".rustup").is_dir():
        settings["RUSTUP_HOME"] = str(real / ".rustup")  # pip runs rustc --version, and rustup writes to a home without settings
    settings["WANDB_DATA_DIR"] = str(tmp_path_factory.mktemp("wandb"))
    before = snapshot_files(real)
    with pytest.MonkeyPatch.context() as patch:
        for name in _SHELL_VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in settings.items():
            patch.setenv(name, value)
        yield home
    changed = list_changes(before, snapshot_files(real))
    assert changed == [], f"a test, or a command of yours meanwhile, has changed in {real}: {', '.join(changed)}"
    written = [str(path.relative_to(home)) for path in home.rglob("*")]
    assert written == [], f"tests wrote to the home folder that they share: {', '.join(written)}"


@pytest.fixture(autouse=True)
def isolated_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own state folder, unless its class has one; return it. It is created on the first write."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or tmp_path / "home")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def snapshot_files(home: Path) -> dict[str, tuple[int, int]]:
    """Return path → (modification time in ns, size in bytes) of each file in the watched folders of `home`."""
    paths = (path for folder in _WATCHED_FOLDERS for path in (home / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(home)): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def list_changes(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """Return the files that were added, changed or removed between two snapshots."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
