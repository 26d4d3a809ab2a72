"""What an image is made of: the files of a folder and, where it has none of its own, those that come with swarmtrain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import swarmtrain
from swarmtrain.errors import ImageError
from swarmtrain.images import folder as folders

DOCKERFILE, PINS, LOCK, REQUIREMENTS = "Dockerfile", "requirements/image.txt", "requirements/image.lock", "requirements.txt"
# In a checkout these are links to the files at its top; in a wheel they are those files.
SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class Project:
    """A folder that an image is built from. All paths are of files that are there."""

    folder: Path
    dockerfile: Path
    pins: Path
    """What the image holds besides swarmtrain, by version."""
    lock: Path | None
    """The same but for torch, with hashes; None where the folder has pins of its own and no lock beside them."""

    requirements: Path | None
    """The folder's own requirements.txt, if it has one: what its script needs beyond the pins."""

    code: tuple[Path, ...]
    """The Python files beside each other in the folder."""

    @property
    def wheels(self) -> Path:
        """Where the wheels lie that the pins name; they may not be there yet."""
        return self.folder / "build" / "wheels"

    @property
    def extra(self) -> Path:
        """Where the wheels lie that its own requirements.txt adds; they may not be there yet."""
        return self.folder / "build" / "extra"

    @property
    def package(self) -> Path:
        """Where swarmtrain's own wheel lies; it may not be there yet."""
        return self.folder / "build" / "package"


def project(folder: Path) -> Project:
    """Return the project in `folder`. Raises ImageError for one that there is nothing to train with in."""
    code = tuple(path for name, path in folders.files(folder, deep=False) if name.endswith(".py")) if folder.is_dir() else ()
    if not code:
        raise ImageError("there is no Python file in it", place=str(folder), hint="run this in the folder of your training script")
    own = (folder / PINS).is_file()
    lock = (folder if own else SHIPPED) / LOCK
    return Project(
        folder=folder,
        dockerfile=_own_or_shipped(folder, DOCKERFILE),
        pins=_own_or_shipped(folder, PINS),
        lock=lock if lock.is_file() else None,
        requirements=folder / REQUIREMENTS if (folder / REQUIREMENTS).is_file() else None,
        code=code,
    )


def checkout() -> Path | None:
    """Return the checkout that swarmtrain runs from, or None if it was installed."""
    top = Path(swarmtrain.__file__).parents[1]
    return top if (top / "pyproject.toml").exists() else None


def _own_or_shipped(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_file() else SHIPPED / name
