"""Store the login for a registry where the docker CLI, docker-py and so every deploy find it, as `docker login` does."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarmtrain.atomic_file import SECRET_MODE, write_text_atomically
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import EngineError
from swarmtrain.process import run_command


def store_docker_login(environ: Mapping[str, str], registry: str, user: str, password: str) -> str:
    """Store the login in docker's credential helper, if its config names one, else in its config.json; return where.

    Raises EngineError if config.json cannot be read or written, ProcessError if the helper fails.
    """
    path = (Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json").resolve()
    settings = _read_settings(path, registry)
    if helper := (settings.get("credHelpers") or {}).get(registry) or settings.get("credsStore"):
        program = f"docker-credential-{helper}"
        run_command([program, "store"], input=json.dumps({"ServerURL": registry, "Username": user, "Secret": password}))
        return program
    settings.setdefault("auths", {})[registry] = {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(settings, indent="\t") + "\n", mode=SECRET_MODE)
    except OSError as error:
        raise _build_error(path, describe_os_error(error), registry) from None
    return str(path)


def _read_settings(path: Path, registry: str) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except OSError as error:
        raise _build_error(path, describe_os_error(error), registry) from None
    except ValueError as error:
        raise _build_error(path, f"invalid JSON: {error}", registry) from None
    if not isinstance(settings, dict):
        raise _build_error(path, "is not a mapping", registry)
    return settings


def _build_error(path: Path, reason: str, registry: str) -> EngineError:
    return EngineError(f"the login for the registry cannot be stored: {reason}", place=str(path), hint=f"docker login {registry}")
