"""A base image where none can be pulled: Debian packages from wherever this machine's apt gets its own."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from swarmtrain import process
from swarmtrain.errors import ImageError
from swarmtrain.images.engine import Engine, Say, reason
from swarmtrain.images.transfer import follow_layers

DEFAULT_BASE = "python:3.11-slim-bookworm"
DEBIAN_BASE = "swarmtrain-base:bookworm"
_SUITE = "bookworm"
# python3 and not python3-minimal: the standard library has to be complete.
_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libgomp1")


def ensure_base(engine: Engine, wanted: str | None, *, say: Say) -> str:
    """Return a base image that the engine has: `wanted`, or Python's own by default, pulled if need be.

    Where the default cannot be pulled, one is made from Debian packages, and `say` is told so.
    Raises ImageError when `wanted` cannot be pulled, or nothing can be made.
    """
    base = wanted or DEFAULT_BASE
    if _has(engine, base):
        return base
    if wanted is None and _has(engine, DEBIAN_BASE):
        say(f"base image: {DEBIAN_BASE}, made here from Debian packages earlier")
        return DEBIAN_BASE
    try:
        say(f"pulling {base}")
        follow_layers(engine.pull(base, stream=True, decode=True), place=f"image {base}", say=say)
    except (OSError, ImageError) as error:
        why = reason(error) if isinstance(error, OSError) else error.message
        if wanted is not None:
            raise ImageError(
                f"cannot be pulled: {why}", place=f"image {base}", hint="name a base that the engine has, or leave --base out"
            ) from None
        say(f"{base} cannot be pulled ({why}); using Debian's own Python instead")
        return _make(engine, say)
    return base


def cache_directory() -> Path:
    """Return the directory in which things that take long to make are kept for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmtrain"


def apt_sources(suite: str, apt: Path = Path("/etc/apt")) -> list[Path]:
    """Return the files of this machine's apt configuration that name `suite` as a suite, and so know where to get it."""
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list")), *sorted((apt / "sources.list.d").glob("*.sources"))]
    named = re.compile(rf"^(?:deb\s.*|Suites:.*)\s{re.escape(suite)}(?:\s|$)", re.MULTILINE)
    return [file for file in files if file.is_file() and named.search(file.read_text(errors="replace"))]


def _has(engine: Engine, image: str) -> bool:
    try:
        engine.inspect_image(image)
    except OSError:
        return False
    return True


def _make(engine: Engine, say: Say) -> str:
    tar = cache_directory() / f"base-{_SUITE}-{'-'.join(_PACKAGES)}.tar"
    if not tar.exists():
        _bootstrap(tar, say)
    say(f"importing {tar} as {DEBIAN_BASE}")
    name, _, tag = DEBIAN_BASE.partition(":")
    try:
        answer = engine.import_image_from_file(str(tar), repository=name, tag=tag)
    except OSError as error:
        raise ImageError(reason(error), place=f"image {DEBIAN_BASE}", hint=f"rm {tar}") from None
    if "error" in answer:
        raise ImageError(answer.strip(), place=f"image {DEBIAN_BASE}", hint=f"rm {tar}")
    return DEBIAN_BASE


def _bootstrap(tar: Path, say: Say) -> None:
    if not shutil.which("mmdebstrap"):
        raise ImageError(
            "no base image: it cannot be pulled, and mmdebstrap, which could make one, is not here",
            hint="apt-get install -y mmdebstrap, or name an image that the engine has with --base",
        )
    say(f"making {tar} from Debian packages with mmdebstrap; this takes half a minute, once")
    tar.parent.mkdir(parents=True, exist_ok=True)
    fresh = tar.with_name(f".{os.getpid()}-{tar.name}")
    sources = [str(file) for file in apt_sources(_SUITE)]
    slim = [
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
    ]
    try:
        process.run(["mmdebstrap", "--variant=minbase", "--quiet", *slim, f"--include={','.join(_PACKAGES)}", _SUITE, str(fresh), *sources])
        fresh.rename(tar)
    finally:
        fresh.unlink(missing_ok=True)
