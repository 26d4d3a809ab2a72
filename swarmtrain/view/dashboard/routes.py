"""The routes of the dashboard: of one run, and of a cluster, which has those of each of its runs below /runs/RUN/."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from swarmtrain.errors import AmbiguousRun, ComparisonError, RunNotFound, SwarmtrainError
from swarmtrain.view.dashboard import cluster_metrics, html_page, prometheus
from swarmtrain.view.dashboard.cluster_source import ClusterDataSource
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.dashboard.page_data import PageData
from swarmtrain.view.dashboard.run_comparison import check_run_count, load_comparison

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

_LINE_NUMBER_PATTERN = re.compile(r"[0-9]{1,18}")
_ERROR_STATUSES = {RunNotFound: 404, AmbiguousRun: 404, ComparisonError: 400}


def build_routes(data_source: RunDataSource | ClusterDataSource) -> list[BaseRoute]:
    """Return the routes of the dashboard of `data_source`."""
    if isinstance(data_source, ClusterDataSource):
        return _build_cluster_routes(data_source)
    return _build_run_routes(lambda _: data_source)


def _build_run_routes(find_source: Callable[[Request], RunDataSource]) -> list[BaseRoute]:
    """Return the routes of a run's page. `find_source` returns the data source of the run of a request, or raises RunNotFound."""
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    @_report_errors
    def serve_page_data(request: Request) -> Response:
        source = find_source(request)
        return _send_page_data(request, source.get_page_data(), source.compute_data_age())

    @_report_errors
    def serve_output_lines(request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if not _LINE_NUMBER_PATTERN.fullmatch(after):
            return PlainTextResponse("after must be a line number of at most 18 digits\n", 400)
        new_lines, last_number = find_source(request).get_output_lines(int(after))
        return Response(json.dumps({"lines": new_lines, "last": last_number}, allow_nan=False), media_type="application/json")

    @_report_errors
    def serve_metrics(request: Request) -> Response:
        text = prometheus.render_metrics(find_source(request).get_page_data(), time.time())
        return Response(text, media_type=prometheus.CONTENT_TYPE)

    return [
        Route("/", _build_page_handler("index.html")),
        Route("/api/page", serve_page_data),
        Route("/api/lines", serve_output_lines),
        Route("/metrics", serve_metrics),
        Route("/{name:path}", _serve_asset),
    ]


def _build_cluster_routes(data_source: ClusterDataSource) -> list[BaseRoute]:
    """Return the routes of a cluster's page, of the comparison of two runs, and of the pages of all runs."""
    from starlette.responses import Response
    from starlette.routing import Mount, Route

    @_report_errors
    def serve_cluster_data(request: Request) -> Response:
        return _send_page_data(request, data_source.get_page_data(), data_source.compute_data_age())

    @_report_errors
    def serve_metrics(_: Request) -> Response:
        text = cluster_metrics.render_cluster_metrics(
            data_source.get_page(), data_source.load_run_pages(), time.time(), is_reachable=not data_source.connection_error
        )
        return Response(text, media_type=prometheus.CONTENT_TYPE)

    @_report_errors
    def serve_comparison(request: Request) -> Response:
        keys = request.query_params.getlist("run")
        check_run_count(keys)
        sources = [data_source.find_run_source(key) for key in keys]
        return _send_page_data(request, load_comparison(sources), max(source.compute_data_age() for source in sources))

    return [
        Route("/", _build_page_handler("cluster.html")),
        Route("/api/cluster", serve_cluster_data),
        Route("/compare", _build_page_handler("compare.html")),
        Route("/api/compare", serve_comparison),
        Route("/metrics", serve_metrics),
        Mount("/runs/{run}", routes=_build_run_routes(lambda request: data_source.find_run_source(request.path_params["run"]))),
        Route("/{name:path}", _serve_asset),
    ]


def _send_page_data(request: Request, page_data: PageData, age: float) -> Response:
    """Return a response with `page_data` and its version; without content, if the client has this version."""
    from starlette.responses import Response

    body = json.dumps(page_data, allow_nan=False, separators=(",", ":"), default=str)
    version = hashlib.sha256(body.encode()).hexdigest()[:16]
    headers = {"Swarmtrain-Age": f"{age:.0f}"}
    if request.query_params.get("version") == version:
        return Response(status_code=204, headers=headers)
    return Response(f'{{"version":"{version}","page":{body}}}', headers=headers, media_type="application/json")


def _build_page_handler(name: str) -> Callable[[Request], Response]:
    from starlette.responses import Response

    return lambda _: Response(html_page.read_asset(name), media_type="text/html")


def _serve_asset(request: Request) -> Response:
    from starlette.responses import PlainTextResponse, Response

    name = request.path_params["name"]
    media_type = html_page.ASSET_TYPES.get(name)
    return Response(html_page.read_asset(name), media_type=media_type) if media_type else PlainTextResponse("no such file\n", 404)


def _report_errors(handle: Callable[[Request], Response]) -> Callable[[Request], Response]:
    """Return `handle` with a response for each SwarmtrainError, of status 503 unless the request is at fault."""

    @wraps(handle)
    def handle_and_report(request: Request) -> Response:
        from starlette.responses import Response

        try:
            return handle(request)
        except SwarmtrainError as error:
            status = next((status for kind, status in _ERROR_STATUSES.items() if isinstance(error, kind)), 503)
            return Response(json.dumps({"error": str(error), "hint": error.hint}), status, media_type="application/json")

    return handle_and_report
