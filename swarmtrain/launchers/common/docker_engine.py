"""Client of the Docker engine's HTTP API. Responses are Python values, errors are EngineErrors with a hint.

No other module sends requests to an engine. Requests go through docker-py's low-level client, for its transports (socket, TCP with TLS,
SSH), contexts and registry credentials. The request bodies are built by swarmtrain, because docker-py's builders lack fields that services
need.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarmtrain.errors import EngineError, SwarmAbsentError
from swarmtrain.launchers.common import engine_endpoint
from swarmtrain.launchers.common.engine_endpoint import Endpoint
from swarmtrain.launchers.common.ssh_tunnel import open_tunnel
from swarmtrain.process import defer_signals

if TYPE_CHECKING:
    from docker import APIClient
    from docker.tls import TLSConfig
    from requests import Response

_STREAM_HEADER_BYTES = 8
_READ_CHUNK_BYTES = 64 * 1024
_FOLLOW_READ_TIMEOUT_SECONDS = 15.0
# When a node has just died, the manager delays the response while it waits for the node's log; this is the maximum wait.
_BACKLOG_READ_TIMEOUT_SECONDS = 8.0
_LAB_HINT = 'to use a lab on this machine: eval "$(swarmtrain lab env)"'
# Also part of the message of a worker.
_NO_SWARM_FRAGMENT = "not a swarm manager"
# Error messages of an engine that cannot manage its swarm, each with an explanation and a hint.
_SWARM_ERRORS = (
    (
        "Worker nodes can't be used",
        "this engine is a swarm worker, but only managers accept this request",
        "point DOCKER_HOST to a manager, or run on a manager: docker node promote THIS_NODE",
    ),
    (
        "does not have a leader",
        "the swarm has lost its manager quorum and cannot be changed; running containers continue",
        "start the managers that are down",
    ),
    ("needs to be unlocked", "the swarm has been locked since its engine restarted", "docker swarm unlock"),
)


class DockerEngine:
    """A Docker engine, by default the one that the docker CLI would use. Thread-safe."""

    def __init__(self, address: str | None = None, *, timeout: float = 60.0) -> None:
        """Connect to the engine at `address`. `timeout` limits each request, in seconds. Raises EngineError if no engine answers."""
        self.endpoint = Endpoint(address) if address else engine_endpoint.find_endpoint(os.environ)
        self.address = self.endpoint.address
        self._timeout = timeout
        self.client = self._connect_client()
        """docker-py's low-level client, for building and pushing images. It raises docker-py's own errors."""

    def build_cli_argv(self) -> list[str]:
        """Return the docker CLI's command prefix for this engine: without an address if the CLI itself would find this engine."""
        return ["docker"] if self.endpoint == engine_endpoint.find_endpoint(os.environ) else ["docker", "--host", self.address]

    def get(self, api_path: str, params: Mapping[str, str] | None = None) -> Any:
        """Return the engine's JSON response to GET `api_path`. Raises EngineError if the engine is unreachable, or refuses the request."""
        return self._send_request("GET", api_path, params).json()

    def list_objects(self, api_path: str, **filters: str) -> list[dict[str, Any]]:
        """Return the objects at `api_path` that match `filters`. Raises EngineError if the engine is unreachable or refuses the request."""
        params = {"filters": json.dumps({key: [value] for key, value in filters.items()})} if filters else None
        objects: list[dict[str, Any]] = self.get(api_path, params) or []
        return objects

    def post(self, api_path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None, *, image: str | None = None) -> Any:
        """POST `body` as JSON and return the JSON response; with `image`, also send the credentials for the image's registry.

        Raises EngineError if the engine cannot be reached, or refuses the request.
        """
        headers = {"Content-Type": "application/json", **(self._build_auth_header(image) if image else {})}
        response = self._send_request("POST", api_path, params, data=json.dumps(body), headers=headers)
        return response.json() if response.content else None

    def post_with_deferred_signals(self, api_path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None) -> Any:
        """POST as `post` does, with signals deferred: an interrupted request could leave an object whose id is unknown.

        Raises EngineError if the engine cannot be reached, or refuses the request.
        """
        with defer_signals():
            return self.post(api_path, body, params)

    def put_files(self, container: str, files: Mapping[str, bytes], mode: int = 0o444) -> None:
        """Write `files`, by absolute path, into a container, with permissions `mode`; create missing folders.

        Raises EngineError if that fails.
        """
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, content in files.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(content), mode
                archive.addfile(entry, io.BytesIO(content))
        headers = {"Content-Type": "application/x-tar"}
        self._send_request("PUT", f"/containers/{container}/archive", {"path": "/"}, data=buffer.getvalue(), headers=headers)

    def read_file(self, container: str, path: str) -> bytes:
        """Return the content of a file in a container, which may be stopped. Raises EngineError if it cannot be read."""
        response = self._send_request("GET", f"/containers/{container}/archive", {"path": path})
        with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
            entry = archive.next()
            content = archive.extractfile(entry) if entry else None
            return content.read() if content else b""

    def delete(self, api_path: str) -> bool:
        """Remove the object at `api_path`. Return False if it does not exist. Raises EngineError if the engine refuses."""
        try:
            self._send_request("DELETE", api_path)
        except EngineError as error:
            if error.status == 404:
                return False
            raise
        return True

    def inspect_distribution(self, image: str) -> Any:
        """Return the registry's response about the image: the descriptor with the digest, and the platforms.

        Raises EngineError if the registry does not have the image, or cannot be reached.
        """
        path = f"/distribution/{image}/json"
        try:
            return self._send_request("GET", path, headers=self._build_auth_header(image)).json()
        except EngineError as error:
            # The registry refused the request, not the engine.
            message = error.message.removeprefix(_format_refusal_prefix("GET", path))
            raise EngineError(message, place=error.place, hint=error.hint, status=error.status) from None

    def open_log_stream(self, api_path: str, params: Mapping[str, str]) -> LogStream:
        """Open the log at `api_path` as a stream. Raises EngineError if the engine cannot be reached, or refuses the request."""
        return LogStream(self._send_request("GET", api_path, params, stream=True), self.address)

    def stream_events(self, *object_types: str) -> Iterator[dict[str, Any]]:
        """Yield the engine's events about objects of these types, such as service or node, as they happen. Raises EngineError."""
        import docker
        import requests
        import urllib3

        try:
            yield from self.client.events(decode=True, filters={"type": list(object_types)})
        except (requests.RequestException, docker.errors.DockerException, urllib3.exceptions.HTTPError, OSError) as error:
            raise _build_unreachable_error(error, self.address) from None

    def _connect_client(self) -> APIClient:
        import docker
        import requests

        base_url = open_tunnel(self.address) if self.address.startswith("ssh://") else self.address
        try:
            return _select_client_class(self.endpoint)(base_url=base_url, timeout=int(self._timeout), tls=_build_tls_config(self.endpoint))
        except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as error:
            raise _build_unreachable_error(error, self.address) from None

    def _send_request(
        self,
        method: str,
        api_path: str,
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
            # A followed log that is silent for this long ends, and its reader requests it again: Docker's follow mode may withhold the last
            # lines of a container, and nothing wakes a reader that waits for the response to begin.
            read_timeout = (
                (_FOLLOW_READ_TIMEOUT_SECONDS if "follow" in (params or {}) else _BACKLOG_READ_TIMEOUT_SECONDS) if stream else self._timeout
            )
            timeout = (self._timeout, read_timeout)
            response = client.request(
                method,
                f"{client.base_url}/v{client.api_version}{api_path}",
                params=params,
                data=data,
                headers=dict(headers or {}),
                stream=stream,
                timeout=timeout,
            )
        except (requests.RequestException, docker.errors.DockerException, OSError) as error:
            raise _build_unreachable_error(error, self.address) from None
        if response.status_code >= 400:
            raise _build_refused_error(response, _format_refusal_prefix(method, api_path), self.address)
        return response

    def _build_auth_header(self, image: str) -> dict[str, str]:
        from docker import auth
        from docker.errors import DockerException

        try:
            registry, _ = auth.resolve_repository_name(image)
            auth_header = auth.get_config_header(self.client, registry)
        except DockerException as error:
            raise EngineError(f"cannot read the login for its registry: {error}", place=f"image {image}", hint="docker login") from None
        return {"X-Registry-Auth": auth_header.decode() if isinstance(auth_header, bytes) else auth_header} if auth_header else {}


def build_exec_argv(docker_argv: Sequence[str], container: str, argv: Sequence[str], *, with_terminal: bool) -> list[str]:
    """Return the command that runs `argv` in a running container; `docker_argv` is the docker CLI's command prefix."""
    return [*docker_argv, "exec", "--interactive", *(["--tty"] if with_terminal else []), container, *argv]


def is_not_found_error(error: EngineError) -> bool:
    """Return whether `error` means that the object does not exist (HTTP 404)."""
    return error.status == 404


def is_outdated_version_error(error: EngineError) -> bool:
    """Return whether `error` means that a Swarm object has changed since the version that an update named, so that nothing was changed."""
    return "out of sequence" in error.message


class LogStream:
    """A multiplexed log of the Docker engine. Iterating it yields its frames; `close`, from any thread, ends the iteration."""

    def __init__(self, response: Response, address: str) -> None:
        self._response, self._address = response, address
        self._closed = False

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield (1 for stdout or 2 for stderr, bytes) until the engine ends the log. Raises EngineError if the connection breaks."""
        import urllib3

        read_chunk = self._response.raw.read1
        buffer = b""
        try:
            while chunk := read_chunk(_READ_CHUNK_BYTES):
                buffer += chunk
                start = 0
                while len(buffer) >= start + _STREAM_HEADER_BYTES:
                    stream, length = struct.unpack_from(">BxxxL", buffer, start)
                    end = start + _STREAM_HEADER_BYTES + length
                    if len(buffer) < end:
                        break
                    yield stream, buffer[start + _STREAM_HEADER_BYTES : end]
                    start = end
                buffer = buffer[start:]
        except (urllib3.exceptions.HTTPError, OSError, AttributeError, ValueError) as error:
            # Reading from a socket that another thread has closed raises AttributeError or ValueError.
            raise _build_unreachable_error(error, self._address) from None

    def close(self) -> None:
        """Close the stream. A reader that waits for the next line is unblocked."""
        from docker.errors import DockerException
        from docker.types import CancellableStream

        if self._closed:
            return
        self._closed = True
        try:
            CancellableStream(iter(()), self._response).close()
        except (DockerException, OSError, AttributeError):
            self._response.close()


def _select_client_class(endpoint: Endpoint) -> type[APIClient]:
    from docker import APIClient

    class OwnAuthority(APIClient):
        """API client for an engine with its own certificate authority: the requests library would use REQUESTS_CA_BUNDLE instead."""

        trust_env = property(lambda _: False, lambda _, __: None)

    return OwnAuthority if endpoint.tls else APIClient


def _build_tls_config(endpoint: Endpoint) -> TLSConfig | bool:
    from docker.tls import TLSConfig

    tls_files = endpoint.tls
    if tls_files is None:
        return False
    return TLSConfig(client_cert=(str(tls_files.cert), str(tls_files.key)), ca_cert=str(tls_files.ca), verify=tls_files.verify)


def _describe_engine(address: str) -> str:
    return f"Docker engine at {address}"


def _format_refusal_prefix(method: str, api_path: str) -> str:
    return f"the engine refused {method} {api_path}: "


def _build_refused_error(response: Response, message_prefix: str, address: str) -> EngineError:
    place = _describe_engine(address)
    try:
        message = str(response.json()["message"]).strip()
    except (ValueError, KeyError, TypeError):
        message = response.text.strip() or response.reason
    for fragment, reason, hint in _SWARM_ERRORS:
        if fragment in message:
            return EngineError(reason, place=place, hint=hint, status=response.status_code)
    if _NO_SWARM_FRAGMENT in message:
        hint = f"create one with docker swarm init; {_LAB_HINT}"
        return SwarmAbsentError("this engine is not part of a swarm", place=place, hint=hint, status=response.status_code)
    return EngineError(f"{message_prefix}{message}", place=place, status=response.status_code)


def _build_unreachable_error(error: BaseException, address: str) -> EngineError:
    place = _describe_engine(address)
    causes = list(_iterate_exception_causes(error))
    if any(isinstance(cause, PermissionError) for cause in causes):
        return EngineError("no permission to access its socket", place=place, hint="sudo usermod -aG docker $USER, then log in again")
    if any(isinstance(cause, FileNotFoundError | ConnectionRefusedError) for cause in causes):
        return EngineError("no engine is reachable", place=place, hint=f"run systemctl start docker, or set DOCKER_HOST; {_LAB_HINT}")
    reason = next((str(cause) for cause in reversed(causes) if str(cause)), type(error).__name__)
    return EngineError(
        f"no engine is reachable: {reason}", place=place, hint=f"docker -H {address} info shows the same error; check DOCKER_HOST"
    )


def _iterate_exception_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
