"""The one place that speaks to a Docker engine: its HTTP API as values, its errors as EngineError with a next step.

Requests go through docker-py's low-level client, for its transports (socket, TCP with TLS, SSH), contexts and registry
logins; bodies are our own, because docker-py's builders lack fields that services need.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from swarmtrain.errors import EngineError
from swarmtrain.launchers import endpoint
from swarmtrain.launchers.endpoint import Endpoint
from swarmtrain.launchers.tunnel import open_tunnel
from swarmtrain.process import uninterrupted

if TYPE_CHECKING:
    from docker import APIClient
    from docker.tls import TLSConfig
    from requests import Response

_STREAM_HEADER = 8
_AT_ONCE = 64 * 1024
_SILENCE = 15.0
# A log's part on a node that has just died is waited for by the manager, and by us no longer than this.
_BACKLOG = 8.0
_LAB = 'eval "$(swarmtrain lab env)" points to a lab on this machine'
# What the engine says when it cannot act for a swarm, and what to do about it.
_NO_SWARM = (
    (
        "Worker nodes can't be used",
        "this engine is a worker of its swarm, and only managers answer",
        "point DOCKER_HOST to a manager, or there: docker node promote THIS_NODE",
    ),
    ("not a swarm manager", "this engine is in no swarm", f"docker swarm init makes one; {_LAB}"),
    (
        "does not have a leader",
        "the swarm has lost most of its managers and can change nothing; containers run on",
        "start the managers that are down",
    ),
    ("needs to be unlocked", "the swarm is locked since its engine was restarted", "docker swarm unlock"),
)


class Engine:
    """A Docker engine: the one that the docker CLI would speak to. Safe to use from several threads."""

    def __init__(self, address: str | None = None, *, timeout: float = 60.0) -> None:
        """Connect. `timeout` in seconds bounds each request. Raises EngineError if no engine answers."""
        self.endpoint = Endpoint(address) if address else endpoint.find(os.environ)
        self.address = self.endpoint.address
        self._timeout = timeout
        self.client = self._connect()
        """docker-py's low-level client, for building and pushing images. It raises its own errors."""

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        """Return the JSON that the engine answers. Raises EngineError."""
        return self._request("GET", path, params).json()

    def listing(self, path: str, **filters: str) -> list[dict[str, Any]]:
        """Return the objects at `path` that pass `filters`. Raises EngineError."""
        params = {"filters": json.dumps({key: [value] for key, value in filters.items()})} if filters else None
        found: list[dict[str, Any]] = self.get(path, params) or []
        return found

    def post(self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None, *, image: str | None = None) -> Any:
        """Send `body` as JSON; with `image`, the login for its registry goes along. Raises EngineError."""
        headers = {"Content-Type": "application/json", **(self._login(image) if image else {})}
        response = self._request("POST", path, params, data=json.dumps(body), headers=headers)
        return response.json() if response.content else None

    def create(self, path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None) -> Any:
        """Do as post() does, uninterrupted: what was asked for is made even if nobody waits for it, and nobody would know of it.

        Raises EngineError.
        """
        with uninterrupted():
            return self.post(path, body, params)

    def put_files(self, container: str, files: Mapping[str, bytes], mode: int = 0o444) -> None:
        """Write files into a container, by their absolute paths; folders are made. Raises EngineError."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, content in files.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(content), mode
                archive.addfile(entry, io.BytesIO(content))
        headers = {"Content-Type": "application/x-tar"}
        self._request("PUT", f"/containers/{container}/archive", {"path": "/"}, data=packed.getvalue(), headers=headers)

    def file(self, container: str, path: str) -> bytes:
        """Return the content of a file in a container, which need not run. Raises EngineError."""
        response = self._request("GET", f"/containers/{container}/archive", {"path": path})
        with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
            entry = archive.next()
            content = archive.extractfile(entry) if entry else None
            return content.read() if content else b""

    def delete(self, path: str) -> bool:
        """Remove what is at `path`; False if it was gone already. Raises EngineError."""
        try:
            self._request("DELETE", path)
        except EngineError as error:
            if error.status == 404:
                return False
            raise
        return True

    def distribution(self, image: str) -> Any:
        """Return what the image's registry says of it: its descriptor with the digest, and its platforms. Raises EngineError."""
        path = f"/distribution/{image}/json"
        try:
            return self._request("GET", path, headers=self._login(image)).json()
        except EngineError as error:
            # It was the engine's registry that refused.
            message = error.message.removeprefix(_refusal("GET", path))
            raise EngineError(message, place=error.place, hint=error.hint, status=error.status) from None

    def frames(self, path: str, params: Mapping[str, str]) -> LogStream:
        """Open the log at `path`. Raises EngineError."""
        return LogStream(self._request("GET", path, params, stream=True), self.address)

    def _connect(self) -> APIClient:
        import docker
        import requests

        there = open_tunnel(self.address) if self.address.startswith("ssh://") else self.address
        try:
            return _client_class(self.endpoint)(base_url=there, timeout=int(self._timeout), tls=_tls(self.endpoint))
        except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as error:
            raise _unreachable(error, self.address) from None

    def _request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        data: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
    ) -> Response:
        import docker
        import requests

        client = self.client
        try:
            # A followed log that is silent for so long ends, and its reader asks anew: Docker's follow may keep the last
            # lines of a container to itself, and nothing wakes a reader that waits for the answer to begin.
            silence = (_SILENCE if "follow" in (params or {}) else _BACKLOG) if stream else self._timeout
            timeout = (self._timeout, silence)
            response = client.request(
                method,
                f"{client.base_url}/v{client.api_version}{path}",
                params=params,
                data=data,
                headers=dict(headers or {}),
                stream=stream,
                timeout=timeout,
            )
        except (requests.RequestException, docker.errors.DockerException, OSError) as error:
            raise _unreachable(error, self.address) from None
        if response.status_code >= 400:
            raise _refused(response, _refusal(method, path), self.address)
        return response

    def _login(self, image: str) -> dict[str, str]:
        from docker import auth
        from docker.errors import DockerException

        try:
            registry, _ = auth.resolve_repository_name(image)
            header = auth.get_config_header(self.client, registry)
        except DockerException as error:
            raise EngineError(f"the login for its registry cannot be read: {error}", place=f"image {image}", hint="docker login") from None
        return {"X-Registry-Auth": header.decode() if isinstance(header, bytes) else header} if header else {}


def gone(error: EngineError) -> bool:
    """Say whether the engine answered that there is no such thing."""
    return error.status == 404


class LogStream:
    """A multiplexed log. Iterate it for its lines; `close` from any thread breaks it off."""

    def __init__(self, response: Response, address: str) -> None:
        self._response, self._address = response, address
        self._closed = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (1 for stdout or 2 for stderr, bytes) until the engine ends the log. Raises EngineError if it breaks off."""
        import urllib3

        read = self._response.raw.read1
        held = b""
        try:
            while data := read(_AT_ONCE):
                held += data
                begin = 0
                while len(held) >= begin + _STREAM_HEADER:
                    stream, length = struct.unpack_from(">BxxxL", held, begin)
                    end = begin + _STREAM_HEADER + length
                    if len(held) < end:
                        break
                    yield stream, held[begin + _STREAM_HEADER : end]
                    begin = end
                held = held[begin:]
        except (urllib3.exceptions.HTTPError, OSError, AttributeError, ValueError) as error:
            # AttributeError and ValueError are what reading from a socket looks like that another thread closed.
            raise _unreachable(error, self._address) from None

    def close(self) -> None:
        """End the stream; a reader that waits for its next line is woken."""
        from docker.errors import DockerException
        from docker.types import CancellableStream

        if self._closed:
            return
        self._closed = True
        try:
            CancellableStream(iter(()), self._response).close()
        except (DockerException, OSError, AttributeError):
            self._response.close()


def _client_class(there: Endpoint) -> type[APIClient]:
    from docker import APIClient

    class OwnAuthority(APIClient):
        """An engine with its own authority: requests would put that of REQUESTS_CA_BUNDLE in its place."""

        trust_env = property(lambda _: False, lambda _, __: None)

    return OwnAuthority if there.tls else APIClient


def _tls(there: Endpoint) -> TLSConfig | bool:
    from docker.tls import TLSConfig

    keys = there.tls
    if keys is None:
        return False
    return TLSConfig(client_cert=(str(keys.cert), str(keys.key)), ca_cert=str(keys.ca), verify=keys.verify)


def _place(address: str) -> str:
    return f"Docker engine at {address}"


def _refusal(method: str, path: str) -> str:
    return f"the engine refused {method} {path}: "


def _refused(response: Response, refusal: str, address: str) -> EngineError:
    place = _place(address)
    try:
        message = str(response.json()["message"]).strip()
    except (ValueError, KeyError, TypeError):
        message = response.text.strip() or response.reason
    for fragment, reason, hint in _NO_SWARM:
        if fragment in message:
            return EngineError(reason, place=place, hint=hint, status=response.status_code)
    return EngineError(f"{refusal}{message}", place=place, status=response.status_code)


def _unreachable(error: BaseException, address: str) -> EngineError:
    place = _place(address)
    causes = list(_causes(error))
    if any(isinstance(cause, PermissionError) for cause in causes):
        return EngineError("no permission to use its socket", place=place, hint="sudo usermod -aG docker $USER, then log in again")
    if any(isinstance(cause, FileNotFoundError | ConnectionRefusedError) for cause in causes):
        return EngineError("no engine answers", place=place, hint=f"systemctl start docker, or set DOCKER_HOST; {_LAB}")
    reason = next((str(cause) for cause in reversed(causes) if str(cause)), type(error).__name__)
    return EngineError(f"no engine answers: {reason}", place=place, hint=f"docker -H {address} info shows the same; is DOCKER_HOST right?")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
