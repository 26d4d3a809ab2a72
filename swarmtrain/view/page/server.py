"""The page on a port: itself, its data as JSON, the lines of output, and /metrics. Starlette on uvicorn, the extra `dashboard`."""

from __future__ import annotations

import hashlib
import json
import socket
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmtrain.errors import SwarmtrainError
from swarmtrain.view.console import say
from swarmtrain.view.page import files, prometheus
from swarmtrain.view.page.guard import Guard, guard
from swarmtrain.view.page.source import Source

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

PORT = 8265
_HEADERS = {
    "Content-Security-Policy": files.SERVED,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_WITHOUT = "This page asks for its token: open the address that `swarmtrain dashboard` printed, or send `Authorization: Bearer TOKEN`.\n"
_STRANGER = "This page is for the machine it runs on, and goes by the names localhost and 127.0.0.1.\n"


def serve(source: Source, *, host: str, port: int, token_file: Path | None, open_it: bool) -> None:
    """Serve the page of `source` until Ctrl-C. Raises SwarmtrainError if it cannot be served there."""
    try:
        import uvicorn
        from starlette.applications import Starlette  # noqa: F401  # whichever of both is missing
    except ImportError as error:
        hint = "pip install 'swarmtrain[dashboard]'; swarmtrain report RUN writes the same page to a file, and needs nothing more"
        raise SwarmtrainError(f"needs {error.name}, which is not installed", place="dashboard", hint=hint) from None
    source.page()
    listening = _listen(host, port)
    keeper = guard(host, listening.getsockname()[1], token_file)
    address = _address(host, keeper.port)
    say(f"the page of {source.run} is at {address}{f'?token={keeper.token}' if keeper.token and token_file is None else ''}")
    say("Ctrl-C ends it; the run goes on")
    if open_it:
        webbrowser.open(f"{address}?token={keeper.token}" if keeper.token else address)
    config = uvicorn.Config(application(source, keeper), log_level="error", access_log=False, server_header=False, lifespan="off")
    config.timeout_graceful_shutdown = 2
    uvicorn.Server(config).run(sockets=[listening])


def application(source: Source, keeper: Guard) -> Starlette:
    """Return the page of `source` as an ASGI application."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    def index(_: Request) -> Response:
        return Response(files.read("index.html"), media_type="text/html")

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        kind = files.TYPES.get(name)
        return Response(files.read(name), media_type=kind) if kind else PlainTextResponse("no such file\n", 404)

    def page(request: Request) -> Response:
        try:
            data = source.page()
        except SwarmtrainError as error:
            return Response(json.dumps({"error": str(error)}), 503, media_type="application/json")
        body = json.dumps(data, allow_nan=False, separators=(",", ":"), default=str)
        version = hashlib.sha256(body.encode()).hexdigest()[:16]
        age = {"Swarmtrain-Age": f"{source.age():.0f}"}
        if request.query_params.get("have") == version:
            return Response(status_code=204, headers=age)
        return Response(f'{{"version":"{version}","page":{body}}}', headers=age, media_type="application/json")

    def lines(request: Request) -> Response:
        after = request.query_params.get("after", "0")
        found, last = source.lines(int(after) if after.isdecimal() else 0)
        return Response(json.dumps({"lines": found, "last": last}, allow_nan=False), media_type="application/json")

    def metrics(_: Request) -> Response:
        try:
            text = prometheus.text(source.page(), time.time())
        except SwarmtrainError as error:
            return PlainTextResponse(f"{error}\n", 503)
        return Response(text, media_type=prometheus.TYPE)

    routes = [
        Route("/", index),
        Route("/api/page", page),
        Route("/api/lines", lines),
        Route("/metrics", metrics),
        Route("/{name:path}", asset),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Door, keeper=keeper), Middleware(GZipMiddleware, minimum_size=2000)])


class _Door:
    """Turns away who may not see the page, takes the token from the address into a cookie, and sets the headers of all answers."""

    def __init__(self, app: ASGIApp, keeper: Guard) -> None:
        self._app, self._keeper = app, keeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request

        if scope["type"] != "http":
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        await answer(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        from starlette.responses import PlainTextResponse, RedirectResponse

        if not self._keeper.knows(request.headers.get("host", "")):
            return PlainTextResponse(_STRANGER, 421)
        if self._keeper.admits(request.cookies, request.headers.get("authorization", "")):
            return None
        if request.url.path == "/" and self._keeper.fits(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self._keeper.cookie, self._keeper.token, httponly=True, samesite="strict", path="/")
            return answer
        return PlainTextResponse(_WITHOUT, 401)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen()  # who opens the address as soon as it is printed waits, and is not refused
    except OSError as error:
        hint = "--port 0 takes a free one" if port else "--host 127.0.0.1 is this machine alone"
        raise SwarmtrainError(f"cannot listen there: {error.strerror or error}", place=f"{host}:{port}", hint=hint) from None
    return made


def _address(host: str, port: int) -> str:
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104  # any address
    return f"http://{name}:{port}/"
