"""The files that the page is made of, and all of them with the data in one, for people to whom it is sent."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from importlib.resources import files
from pathlib import Path

from swarmtrain.errors import SwarmtrainError
from swarmtrain.view.page.data import Data
from swarmtrain.view.page.source import Source

TYPES = {"page.css": "text/css", "page.js": "text/javascript", "uplot/uPlot.css": "text/css", "uplot/uPlot.js": "text/javascript"}
"""The files beside index.html, by the names under which it asks for them."""
_DATA = '<script type="application/json" id="data"></script>'
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; {rest}"
SERVED = _POLICY.format(rest="script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'")
"""The Content-Security-Policy of the page that is served: nothing comes from elsewhere, and no text of a run becomes a script."""


def read(name: str) -> str:
    """Return the text of one of the page's files."""
    return files("swarmtrain.view.page").joinpath("assets", name).read_text(encoding="utf-8")


def one_file(data: Data, lines: list[Data]) -> str:
    """Return the page with its data, styles and scripts in one text of HTML, which asks for nothing else."""
    page = read("index.html")
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inlined(match: re.Match[str]) -> str:
        kind = "style" if match["link"] else "script"
        text = f"\n{read(match['link'] or match['script'])}\n"
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
        return f"<{kind}>{text}</{kind}>"

    page = re.sub(r'<link rel="stylesheet" href="(?P<link>[^"]+)">|<script defer src="(?P<script>[^"]+)"></script>', inlined, page)
    policy = _POLICY.format(rest=f"script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}")
    page = page.replace("<title>", f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>', 1)
    return page.replace(_DATA, _DATA.replace("></", f">{_inert({'page': data, 'lines': lines})}</"), 1)


def write(source: Source, file: Path) -> None:
    """Write the page of `source` as it is now. Raises SwarmtrainError if it cannot be written."""
    lines = source.last_lines()
    data = {**source.page(), "written": time.time()}
    try:
        file.write_text(one_file(data, lines), encoding="utf-8")
    except OSError as error:
        raise SwarmtrainError(f"cannot be written: {error.strerror}", place=str(file), hint="-o FILE writes it somewhere else") from None


def _inert(value: Data) -> str:
    """Return JSON that ends no script element, whatever the texts in it are."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
