"""Project: the files from which an image is built. Files that the project's folder lacks are taken from those that swarmtrain ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import swarmtrain
from swarmtrain.cargo.docker_ignore import list_files
from swarmtrain.errors import ImageError

DOCKERFILE, PINS, LOCK, REQUIREMENTS = "Dockerfile", "requirements/image.txt", "requirements/image.lock", "requirements.txt"
# In a checkout these are symlinks to the files at its root; in a wheel they are the files themselves.
SHIPPED_FILES = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Project:
    """Project: the folder from which an image is built, and its files. All paths refer to existing files."""

    folder: Path
    dockerfile: Path
    pins: Path
    """File with the pinned versions of all packages in the image except swarmtrain."""
    lock: Path | None
    """Lock file: the pins without torch, with hashes. None if the folder has its own pins and no lock file next to them."""

    requirements: Path | None
    """The folder's own requirements.txt, with packages that the script needs in addition to the pins; None if the file does not exist."""

    code: tuple[Path, ...]
    """The Python files at the top level of the folder."""

    @property
    def wheel_folder(self) -> Path:
        """Folder of the wheels of the pinned packages; it may not exist yet."""
        return self.folder / "build" / "wheels"

    @property
    def extra_wheel_folder(self) -> Path:
        """Folder of the wheels of the packages in requirements.txt; it may not exist yet."""
        return self.folder / "build" / "extra"

    def list_wheels(self) -> list[Path]:
        """Return the wheels of the pinned packages."""
        return sorted(self.wheel_folder.glob("*.whl"))

    def list_extra_wheels(self) -> list[Path]:
        """Return the wheels of the packages in requirements.txt."""
        return sorted(self.extra_wheel_folder.glob("*.whl"))

    @property
    def copies_wheels(self) -> bool:
        """Whether the Dockerfile copies the wheels from the build context; otherwise it can install them from a server."""
        return "build/wheels" in self.dockerfile.read_text(errors="replace")

    @property
    def package_wheel_folder(self) -> Path:
        """Folder of swarmtrain's own wheel; it may not exist yet."""
        return self.folder / "build" / "package"


def find_project(folder: Path) -> Project:
    """Return the project in `folder`. Raises ImageError if there is no Python file in it."""
    code = tuple(path for name, path in list_files(folder, recursive=False) if name.endswith(".py")) if folder.is_dir() else ()
    if not code:
        raise ImageError("contains no Python file", place=str(folder), hint="run this command in the folder of your training script")
    has_own_pins = (folder / PINS).is_file()
    lock = (folder if has_own_pins else SHIPPED_FILES) / LOCK
    return Project(
        folder=folder,
        dockerfile=_find_own_or_shipped_file(folder, DOCKERFILE),
        pins=_find_own_or_shipped_file(folder, PINS),
        lock=lock if lock.is_file() else None,
        requirements=folder / REQUIREMENTS if (folder / REQUIREMENTS).is_file() else None,
        code=code,
    )


def find_source_checkout() -> Path | None:
    """Return the root of the source checkout from which swarmtrain runs; None if swarmtrain is installed as a package."""
    source_root = Path(swarmtrain.__file__).parents[1]
    return source_root if (source_root / "pyproject.toml").exists() else None


def _find_own_or_shipped_file(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_file() else SHIPPED_FILES / name
