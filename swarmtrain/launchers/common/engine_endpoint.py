"""Find the Docker engine as the docker CLI does: DOCKER_HOST, DOCKER_CONTEXT, the current context, the local socket.

This module reads the contexts itself, because docker-py looks for them next to a config.json that may not exist.
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

DEFAULT_ADDRESS = "unix:///var/run/docker.sock"


@dataclass(frozen=True)
class TlsFiles:
    """The files of a TLS connection to an engine. With `verify`, the engine must present a certificate signed by `ca`."""

    ca: Path
    cert: Path
    key: Path
    verify: bool = True


@dataclass(frozen=True)
class Endpoint:
    """Endpoint of an engine: its address, the setting that configures it, and its TLS files.

    The setting (`setting_name`) is empty if the address is the default, comes from DOCKER_HOST, or was passed as an argument.
    """

    address: str
    setting_name: str = ""
    tls: TlsFiles | None = None

    def __str__(self) -> str:
        return f"{self.address} ({self.setting_name})" if self.setting_name else self.address


def find_endpoint(environ: Mapping[str, str]) -> Endpoint:
    """Return the endpoint of the configured engine. Raises EngineError for a context that does not exist or cannot be read."""
    folder = Path(environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    if address := environ.get("DOCKER_HOST"):
        return Endpoint(
            address, "", _find_tls_files(Path(environ.get("DOCKER_CERT_PATH") or folder)) if environ.get("DOCKER_TLS_VERIFY") else None
        )
    if name := environ.get("DOCKER_CONTEXT"):
        return _load_context_endpoint(folder, name, "DOCKER_CONTEXT")
    settings = folder / "config.json"
    if name := _read_json(settings).get("currentContext") if settings.exists() else None:
        return _load_context_endpoint(folder, str(name), str(settings))
    return Endpoint(DEFAULT_ADDRESS)


def is_engine_absent(environ: Mapping[str, str]) -> bool:
    """Return whether no engine is configured, and this machine has none at the default address. Raises EngineError as `find_endpoint`."""
    return find_endpoint(environ) == Endpoint(DEFAULT_ADDRESS) and not (
        environ.get("DOCKER_HOST") or Path(DEFAULT_ADDRESS.removeprefix("unix://")).exists()
    )


def _load_context_endpoint(config_folder: Path, context_name: str, setting_name: str) -> Endpoint:
    if context_name == "default":
        return Endpoint(DEFAULT_ADDRESS)
    contexts_folder, context_digest = config_folder / "contexts", hashlib.sha256(context_name.encode()).hexdigest()
    metadata_path = contexts_folder / "meta" / context_digest / "meta.json"
    if not metadata_path.exists():
        raise EngineError(
            f"unknown Docker context {context_name!r}", place=setting_name, hint="list the existing contexts with: docker context ls"
        )
    docker_endpoint = _get_nested_mapping(_get_nested_mapping(_read_json(metadata_path), "Endpoints"), "docker")
    if not isinstance(docker_endpoint.get("Host"), str):
        raise EngineError(
            "does not specify a Docker engine", place=f"docker context {context_name}", hint=f"docker context inspect {context_name}"
        )
    tls_folder = contexts_folder / "tls" / context_digest / "docker"
    tls = _find_tls_files(tls_folder, verify=not docker_endpoint.get("SkipTLSVerify", False)) if tls_folder.is_dir() else None
    return Endpoint(docker_endpoint["Host"], f"context {context_name}", tls)


def _find_tls_files(folder: Path, *, verify: bool = True) -> TlsFiles:
    """Return the three TLS files in `folder`, named as for the docker CLI. Raises EngineError if one cannot be read."""
    paths = [folder / name for name in ("ca.pem", "cert.pem", "key.pem")]
    if missing := [str(path) for path in paths if not os.access(path, os.R_OK)]:
        raise EngineError(
            f"cannot be read: {', '.join(missing)}",
            place="the TLS files of the Docker engine",
            hint="set DOCKER_CERT_PATH to the folder that contains them",
        )
    ca, cert, key = paths
    return TlsFiles(ca, cert, key, verify)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(
            f"cannot be read: {error}",
            place=str(path),
            hint="docker context ls shows the same error; set DOCKER_HOST to bypass the context",
        ) from None
    return content if isinstance(content, dict) else {}


def _get_nested_mapping(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = mapping.get(key)
    return value if isinstance(value, dict) else {}
