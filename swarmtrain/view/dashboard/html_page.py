"""Static files of the dashboard page, and the export of the page with its data as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from swarmtrain.atomic_file import PUBLIC_MODE, write_files_atomically
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import SwarmtrainError
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.dashboard.page_data import PageData
from swarmtrain.view.dashboard.run_comparison import load_comparison

ASSET_TYPES = {
    **dict.fromkeys(("page.css", "uplot/uPlot.css"), "text/css"),
    **dict.fromkeys(("common.js", "charts.js", "page.js", "cluster.js", "compare.js", "uplot/uPlot.js"), "text/javascript"),
}
"""Media types of the files next to index.html, by the names under which the pages request them."""
_DATA_PLACEHOLDER = '<script type="application/json" id="data"></script>'
_CSP_TEMPLATE = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; {rest}"
SERVED_CSP = _CSP_TEMPLATE.format(rest="script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'")
"""Content-Security-Policy of the served page: nothing is loaded from other sites, and text of a run is never executed."""


def read_asset(name: str) -> str:
    """Return the text of the page's file `name`."""
    return files("swarmtrain.view.dashboard").joinpath("assets", name).read_text(encoding="utf-8")


def render_single_file_page(page_data: PageData, output_lines: list[PageData]) -> str:
    """Return the page of a run as one HTML document."""
    return _inline_assets("index.html", {"page": page_data, "lines": output_lines})


def render_single_file_comparison(comparison: PageData) -> str:
    """Return the comparison of two runs as one HTML document."""
    return _inline_assets("compare.html", {"page": comparison})


def _inline_assets(name: str, data: PageData) -> str:
    """Return the page `name` as one HTML document with inlined `data`, styles and scripts, which makes no requests."""
    page = read_asset(name)
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline_asset(match: re.Match[str]) -> str:
        element = "style" if match["link"] else "script"
        content = f"\n{read_asset(match['link'] or match['script'])}\n"
        hashes[element].append(f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'")
        return f"<{element}>{content}</{element}>"

    page = re.sub(r'<link rel="stylesheet" href="(?P<link>[^"]+)">|<script defer src="(?P<script>[^"]+)"></script>', inline_asset, page)
    policy = _CSP_TEMPLATE.format(rest=f"script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}")
    page = page.replace("<title>", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>', 1)
    return page.replace(_DATA_PLACEHOLDER, _DATA_PLACEHOLDER.replace("></", f">{_dump_script_safe_json(data)}</"), 1)


def write_html_report(sources: Sequence[RunDataSource], path: Path, *, overwrite: bool) -> None:
    """Write the current page of a run, or the comparison of two runs, as one HTML file to `path`.

    Raises ComparisonError if the runs cannot be compared. Raises SwarmtrainError if the file exists and may not be overwritten, or if a
    read or the write fails; then no file has changed.
    """
    if path.exists() and not overwrite:
        raise SwarmtrainError("already exists", place=str(path), hint="add --force to overwrite it, or use -o FILE")
    if len(sources) == 1:
        lines = sources[0].read_last_output_lines()
        text = render_single_file_page({**sources[0].get_page_data(), "written": time.time()}, lines)
    else:
        text = render_single_file_comparison({**load_comparison(sources), "written": time.time()})
    try:
        write_files_atomically({path: (text.encode(), PUBLIC_MODE)})
    except OSError as error:
        raise SwarmtrainError(
            f"cannot be written: {describe_os_error(error)}", place=str(path), hint="use -o FILE to write it to another path"
        ) from None


def _dump_script_safe_json(value: PageData) -> str:
    """Return `value` as JSON that is safe inside a script element, even if its strings contain markup."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
