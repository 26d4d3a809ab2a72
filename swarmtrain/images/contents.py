"""What went into an image, by digest: a label on it, from which one can tell what has changed since it was built."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import swarmtrain
from swarmtrain.images import folder as folders
from swarmtrain.images.pin import is_spread, untagged
from swarmtrain.images.project import Project
from swarmtrain.wire import LABEL_CONTENTS

HERE = "."
"""The name of the folder that one is in."""
_SELF = "swarmtrain"


@dataclass(frozen=True)
class Contents:
    """Digests by name: `swarmtrain` itself, files by their path in the folder that the image was built in."""

    built: Mapping[str, str]
    added: Mapping[str, str] = field(default_factory=dict)
    """Folders that were put above the image `below`."""
    below: str = ""

    def plus(self, name: str, entries: list[folders.Entry], *, below: str) -> Contents:
        """Return the contents of an image that has the folder `name` above `below`, whose contents these are."""
        beside = {entry: _file(path) for entry, path in entries if name == HERE and "/" not in entry}
        return replace(self, built={**self.built, **beside}, added={**self.added, name: _added(name, entries)}, below=below)

    def labels(self) -> dict[str, str]:
        """Return the label that says all of it."""
        return {LABEL_CONTENTS: json.dumps({"built": self.built, "added": self.added, "below": self.below}, sort_keys=True)}


def of(project: Project) -> Contents:
    """Return the contents of an image that is built from `project` now."""
    named = (project.dockerfile, project.pins, project.lock, project.requirements, *project.code)
    own = [path for path in named if path and path.is_relative_to(project.folder)]
    return Contents({_SELF: own_digest(), **{str(path.relative_to(project.folder)): _file(path) for path in own}})


def read(image: Mapping[str, object]) -> Contents:
    """Return what the label of an inspected image says; nothing if it has none, or one of another time."""
    config = image.get("Config")
    labels = config.get("Labels") if isinstance(config, dict) else None
    try:
        return Contents(**json.loads((labels or {})[LABEL_CONTENTS]))
    except (KeyError, ValueError, TypeError):
        return Contents({})


def changed(contents: Contents, here: Path, travels: Collection[str]) -> tuple[list[str], list[str]]:
    """Return what was built in and what was added that is otherwise in the folder `here` now; what is not here is not known.

    `travels` are names of files that come with each run, whatever the image has under them.
    """
    built = [name for name, digest in contents.built.items() if name not in travels and _now(name, here) not in (None, digest)]
    there = [(name, digest) for name, digest in contents.added.items() if (here / name).is_dir()]
    added = [name for name, digest in there if _added(name, folders.files(here / name)) != digest]
    return sorted(built), sorted(added)


def rebuild(image: str, contents: Contents, built: list[str], added: list[str]) -> str:
    """Return the command that makes `image` anew, now that these of its contents have changed."""
    spread = is_spread(image)
    tag = f"{untagged(image)}:TAG" if spread or "@" in image else image
    push = "" if spread else " --push"
    steps = [f"swarmtrain image build . --tag {contents.below or tag}{push}"] if built else []
    if contents.added and (added or built):
        steps += [f"swarmtrain image add {' '.join(sorted(contents.added))} --to {contents.below} --tag {tag}{push}"]
    return " && ".join([*steps, *([f"swarmtrain image spread {tag}"] if spread else [])])


def own_digest() -> str:
    """Return the digest of the swarmtrain that runs, with the Dockerfile and the requirements that come with it."""
    top = Path(swarmtrain.__file__).parent
    return folders.digest((name, path.resolve()) for name, path in folders.files(top) if not path.name.startswith("."))


def _now(name: str, here: Path) -> str | None:
    if name == _SELF:
        return own_digest()
    return _file(here / name) if (here / name).is_file() else None


def _added(name: str, entries: list[folders.Entry]) -> str:
    """Return the digest of a folder; the files in HERE itself have digests of their own, since some travel with each run."""
    return folders.digest(entry for entry in entries if name != HERE or "/" in entry[0])


def _file(path: Path) -> str:
    return folders.digest([(path.name, path.resolve())])
