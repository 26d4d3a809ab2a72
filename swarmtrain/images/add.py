"""A folder of code above an image that is there already: a layer of its own, built and pushed in seconds."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from swarmtrain.errors import ImageError
from swarmtrain.images import build, contents
from swarmtrain.images import folder as folders
from swarmtrain.images.engine import Engine, Say
from swarmtrain.images.transfer import megabytes, obtain
from swarmtrain.render.mounts import WORKSPACE


def add(engine: Engine, code: Sequence[Path], below: str, tag: str, *, here: Path, say: Say) -> None:
    """Tag as `tag` the image `below` with the folders `code` beside where a run puts its script.

    Each lies there as it lies in the folder `here`, or under its own name if it is elsewhere; the same files make the
    same layer, whenever and wherever that is done. Raises ImageError.
    """
    image = obtain(engine, below, say)
    config = image["Config"]
    found = contents.read(image)
    owner = f"--chown={config['User']} " if config.get("User") else ""
    dockerfile = [f"FROM {image['Id']}"]
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for number, path in enumerate(code):
                name, entries = _name(path, here), _entries(path)
                found = found.plus(name, entries, below=below)
                there = f"{number}{WORKSPACE}"
                inside = [(str(PurePosixPath(there, name, entry)), file) for entry, file in entries]
                folders.pack(archive, inside, open_to_all=there)
                # WORKSPACE itself is packed too: a builder that touches it would give it the time of day.
                dockerfile.append(f"COPY {owner}{number}/ /")
                say(f"{path}: {len(entries)} files, {megabytes(sum(file.lstat().st_size for _, file in entries))}")
            folders.pack_text(archive, "Dockerfile", "\n".join(dockerfile) + "\n")
        build.run(engine, packed, tag, labels=found.labels(), say=say)


def _name(path: Path, here: Path) -> str:
    full, top = path.resolve(), here.resolve()
    return str(full.relative_to(top)) if full.is_relative_to(top) else full.name


def _entries(path: Path) -> list[folders.Entry]:
    if not path.is_dir():
        raise ImageError(
            "is no folder" if path.exists() else "there is no such folder", place=str(path), hint="single files travel as runner.code"
        )
    if not (found := folders.files(path)):
        raise ImageError(f"there is nothing in it, or {folders.IGNORE} excludes all", place=str(path))
    return found
