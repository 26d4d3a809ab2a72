"""Which engine is meant, found as the docker CLI finds it: DOCKER_HOST, DOCKER_CONTEXT, the context in use, the local socket.

The stores of contexts are read here, because docker-py looks for them beside a config.json that need not be there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmtrain.errors import EngineError

DEFAULT = "unix:///var/run/docker.sock"


@dataclass(frozen=True)
class Tls:
    """The files of a TLS connection. `verify`: the engine must show a certificate of `ca`."""

    ca: Path
    cert: Path
    key: Path
    verify: bool = True


@dataclass(frozen=True)
class Endpoint:
    """An engine's address, who names it (nobody: it is the default, or was given), and how to be let in."""

    address: str
    named_by: str = ""
    tls: Tls | None = None

    def __str__(self) -> str:
        return f"{self.address} ({self.named_by})" if self.named_by else self.address


def find(environ: Mapping[str, str]) -> Endpoint:
    """Return the engine that is meant. Raises EngineError for a context that is not there or cannot be read."""
    folder = Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    if address := environ.get("DOCKER_HOST"):
        return Endpoint(
            address, "", _from_folder(Path(environ.get("DOCKER_CERT_PATH") or folder)) if environ.get("DOCKER_TLS_VERIFY") else None
        )
    if name := environ.get("DOCKER_CONTEXT"):
        return _context(folder, name, "DOCKER_CONTEXT")
    settings = folder / "config.json"
    if name := _read(settings).get("currentContext") if settings.exists() else None:
        return _context(folder, str(name), str(settings))
    return Endpoint(DEFAULT)


def _context(folder: Path, name: str, asked_by: str) -> Endpoint:
    if name == "default":
        return Endpoint(DEFAULT)
    place, key = folder / "contexts", hashlib.sha256(name.encode()).hexdigest()
    about = place / "meta" / key / "meta.json"
    if not about.exists():
        raise EngineError(f"there is no docker context {name!r}", place=asked_by, hint="docker context ls shows those there are")
    found = _part(_part(_read(about), "Endpoints"), "docker")
    if not isinstance(found.get("Host"), str):
        raise EngineError("names no Docker engine", place=f"docker context {name}", hint=f"docker context inspect {name}")
    keys = place / "tls" / key / "docker"
    tls = _from_folder(keys, verify=not found.get("SkipTLSVerify", False)) if keys.is_dir() else None
    return Endpoint(found["Host"], f"context {name}", tls)


def _from_folder(folder: Path, *, verify: bool = True) -> Tls:
    """Return the three files in `folder`, by the names that the docker CLI gives them."""
    files = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    if missing := [str(path) for path in files if not os.access(path, os.R_OK)]:
        raise EngineError(
            f"cannot be read: {', '.join(missing)}",
            place="the keys of the Docker engine",
            hint="DOCKER_CERT_PATH names the folder they are in",
        )
    ca, cert, key = files
    return Tls(ca, cert, key, verify)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot be read: {error}", place=str(path), hint="docker context ls shows the same; DOCKER_HOST goes without it"
        ) from None
    return content if isinstance(content, dict) else {}


def _part(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}
