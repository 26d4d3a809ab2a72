"""HTTP server of the dashboard: checks access, and serves the routes of a run or of a cluster.

The server is a Starlette application on uvicorn; the extra `dashboard` installs both.
"""

from __future__ import annotations

import socket
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmtrain.errors import SwarmtrainError
from swarmtrain.view.console import print_message
from swarmtrain.view.dashboard import html_page
from swarmtrain.view.dashboard.access_policy import AccessPolicy, create_access_policy
from swarmtrain.view.dashboard.cluster_source import ClusterDataSource
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.dashboard.routes import build_routes

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

DEFAULT_PORT = 8265
_RESPONSE_HEADERS = {
    "Content-Security-Policy": html_page.SERVED_CSP,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_UNAUTHORIZED_TEXT = (
    "This page requires its token: open the address that `swarmtrain dashboard` printed, or send `Authorization: Bearer TOKEN`.\n"
)
_UNKNOWN_HOST_TEXT = "This page is served only to the machine that it runs on, under the names localhost and 127.0.0.1.\n"


def serve_dashboard(
    data_source: RunDataSource | ClusterDataSource, *, host: str, port: int, token_file: Path | None, open_browser: bool
) -> None:
    """Serve the dashboard of `data_source` until Ctrl-C. Raises SwarmtrainError if it cannot be served at `host` and `port`."""
    try:
        import uvicorn
        from starlette.applications import Starlette  # noqa: F401  # report whichever of the two is missing
    except ImportError as error:
        hint = (
            "pip install 'swarmtrain[dashboard]'; or use swarmtrain report RUN, which writes the same page to a file "
            "without further dependencies"
        )
        raise SwarmtrainError(f"needs {error.name}, which is not installed", place="dashboard", hint=hint) from None
    data_source.get_page_data()
    listener = _bind_socket(host, port)
    policy = create_access_policy(host, listener.getsockname()[1], token_file)
    url = _format_url(host, policy.port)
    token = f"?token={policy.token}" if policy.token and token_file is None else ""
    print_message(f"dashboard of {data_source.title}: {url}{token}")
    print_message("Ctrl-C stops the dashboard only")
    if open_browser:
        webbrowser.open(f"{url}?token={policy.token}" if policy.token else url)
    config = uvicorn.Config(create_app(data_source, policy), log_level="error", access_log=False, server_header=False, lifespan="off")
    config.timeout_graceful_shutdown = 2
    uvicorn.Server(config).run(sockets=[listener])


def create_app(data_source: RunDataSource | ClusterDataSource, policy: AccessPolicy) -> Starlette:
    """Return the dashboard of `data_source` as an ASGI application, of which `policy` protects every route."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware

    return Starlette(
        routes=build_routes(data_source),
        middleware=[Middleware(_AccessMiddleware, policy=policy), Middleware(GZipMiddleware, minimum_size=2000)],
    )


class _AccessMiddleware:
    """Middleware that rejects clients without access, moves the token from the URL into a cookie, and sets the headers of all responses."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self._app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request

        if scope["type"] != "http":
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_RESPONSE_HEADERS)
            await send(message)

        response = self._reject_request(Request(scope)) or self._app
        await response(scope, receive, send_with_headers)

    def _reject_request(self, request: Request) -> Response | None:
        from starlette.responses import PlainTextResponse, RedirectResponse

        if not self._policy.is_allowed_host(request.headers.get("host", "")):
            return PlainTextResponse(_UNKNOWN_HOST_TEXT, 421)
        if self._policy.has_access(request.cookies, request.headers.get("authorization", "")):
            return None
        if request.url.path == "/" and self._policy.is_valid_token(request.query_params.get("token", "")):
            response = RedirectResponse("/", 303)
            response.set_cookie(self._policy.cookie_name, self._policy.token, httponly=True, samesite="strict", path="/")
            return response
        return PlainTextResponse(_UNAUTHORIZED_TEXT, 401)


def _bind_socket(host: str, port: int) -> socket.socket:
    try:
        family, socket_type, _, _, socket_address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket_type)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        listener.listen()  # A client that opens the URL as soon as it is printed must wait, instead of getting "connection refused".
    except OSError as error:
        hint = "use --port 0 to choose a free port" if port else "use --host 127.0.0.1 to listen only on this machine"
        raise SwarmtrainError(f"cannot listen on this address: {error.strerror or error}", place=f"{host}:{port}", hint=hint) from None
    return listener


def _format_url(host: str, port: int) -> str:
    host_name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104  # any address
    return f"http://{host_name}:{port}/"
