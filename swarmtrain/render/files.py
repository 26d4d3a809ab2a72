"""Writing several files so that all of them are there afterwards, or everything is as it was before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

OPEN, SECRET = 0o644, 0o600


def write_all(files: Mapping[Path, tuple[bytes, int]]) -> None:
    """Write `files`, each a content and a mode, in this order. Raises OSError, having changed nothing.

    They are written aside first, for a full disk shows itself then, and renamed into place when all are there. A file is
    readable as its mode says from its first byte on.
    """
    asides = {path: path.with_name(f".{path.name}.new") for path in files}
    made = [folder for path in files for folder in _missing(path.parent)]
    try:
        for path, (content, mode) in files.items():
            if path.exists() and not path.is_file():
                raise FileExistsError(17, "it is a folder or a device", str(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            asides[path].unlink(missing_ok=True)
            with os.fdopen(os.open(asides[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
    except BaseException:
        with contextlib.suppress(OSError):
            for aside in asides.values():
                aside.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in sorted(made, reverse=True):
                folder.rmdir()
        raise
    for path, aside in asides.items():
        aside.replace(path)


def _missing(folder: Path) -> Iterator[Path]:
    while not folder.exists():
        yield folder
        folder = folder.parent
