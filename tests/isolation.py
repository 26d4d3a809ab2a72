"""No test writes outside folders that pytest made for it: what the commands it runs take for the user's home is one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# What would lead a command to an engine of the developer's, or to state that is not under the home of the tests.
_FROM_THE_SHELL = (
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
    "DOCKER_CERT_PATH",
    "DOCKER_TLS_VERIFY",
    "XDG_STATE_HOME",
    "XDG_CONFIG_HOME",
)
# Below the real home: where programs write that find it without the variable HOME, as ssh does.
_WATCHED = (".local/state/swarmtrain", ".config/swarmtrain", ".docker", ".ssh")


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the whole session a home of its own, and fail it at its end if anything was written to that or to the real one.

    The cache stays the user's: it holds the base image and downloads, which take minutes to make.
    """
    real, home = Path.home(), tmp_path_factory.mktemp("home")
    settings = {"HOME": str(home), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(real / ".cache")}
    pip = Path(os.environ.get("XDG_CONFIG_HOME") or real / ".config") / "pip" / "pip.conf"
    if pip.is_file():
        settings["PIP_CONFIG_FILE"] = str(pip)
    if (real / ".rustup").is_dir():
        settings["RUSTUP_HOME"] = str(real / ".rustup")  # pip asks rustc for its version, and rustup writes to a home that has no settings
    settings["WANDB_DATA_DIR"] = str(tmp_path_factory.mktemp("wandb"))
    before = snapshot(real)
    with pytest.MonkeyPatch.context() as patch:
        for name in _FROM_THE_SHELL:
            patch.delenv(name, raising=False)
        for name, value in settings.items():
            patch.setenv(name, value)
        yield home
    changed = changes(before, snapshot(real))
    assert changed == [], f"a test, or a command of yours meanwhile, has changed in {real}: {', '.join(changed)}"
    written = [str(path.relative_to(home)) for path in home.rglob("*")]
    assert written == [], f"tests wrote to the home folder that they share: {', '.join(written)}"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a state folder of its own, unless its class has one; return it. It is made when something is written there."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or tmp_path / "home")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


def snapshot(home: Path) -> dict[str, tuple[int, int]]:
    """Return time (ns) and size (bytes) of each file in the folders of `home` that are watched, by its path in it."""
    paths = (path for folder in _WATCHED for path in (home / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(home)): (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


def changes(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> list[str]:
    """Return the files that were added, changed or removed between two snapshots."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
