"""The documentation site builds without network and without warnings, loads nothing from other hosts, and its links lead somewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
# Sphinx in a process that may not open a connection: the audit hook raises before the kernel is asked.
_BUILD_OFFLINE = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        raise PermissionError(f"{event}: the site has to build without network")
sys.addaudithook(refuse)
from sphinx.cmd.build import main
sys.exit(main(sys.argv[1:]))
"""
# What a browser loads by itself, by tag.
_LOADED_ATTRIBUTES = {"link": "href", "script": "src", "img": "src", "source": "src", "iframe": "src"}


@dataclass
class Page(HTMLParser):
    """What one page of the site contains: the ids of its elements, the addresses that it links to, and those that a browser loads."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if (address := values.get(_LOADED_ATTRIBUTES.get(tag, ""))) is not None:
            self.loaded.append(address)


def build_site(tree: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of `tree`/docs into `tree`/site, as `make site` does, but without network; pages of an earlier build are kept."""
    options = ["--fail-on-warning", "--quiet", "--doctree-dir", tree / "cache", tree / "docs", tree / "site"]
    return subprocess.run(
        [sys.executable, "-c", _BUILD_OFFLINE, *options], capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"}
    )


def find_broken_links(pages: dict[Path, Page]) -> list[str]:
    """Return each address in the pages that leads to a file or an anchor that does not exist, except addresses on other hosts."""
    broken = []
    for page in pages.values():
        for address in [*page.links, *page.loaded]:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                continue
            target = (page.path.parent / unquote(url.path)).resolve() if url.path else page.path
            anchors = pages[target].ids if target in pages else set()
            if not target.is_file() or (url.fragment and unquote(url.fragment) not in anchors):
                broken.append(f"{page.path.name}: {address}")
    return broken


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of docs/ that tests may change, its site, and links to everything else that pages refer to."""
    folder = tmp_path_factory.mktemp("tree").resolve()
    shutil.copytree(ROOT / "docs", folder / "docs")
    for path in ROOT.iterdir():
        if path.name != "docs" and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    result = build_site(folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def pages(tree: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in (tree / "site").rglob("*.html")}


def test_every_page_is_in_the_site_and_its_navigation(tree: Path, pages: dict[Path, Page]) -> None:
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    index = pages[tree / "site" / "index.html"]
    assert len(sources) > 70
    assert [source for source in sources if tree / "site" / source not in pages] == []
    assert [source for source in sources if source.as_posix() not in {*index.links, "README.html"}] == []


def test_links_and_anchors_lead_somewhere(pages: dict[Path, Page]) -> None:
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert find_broken_links(pages) == []


def test_broken_links_and_anchors_are_found(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "a.html"
    path.write_text('<h1 id="b">B</h1><a href="#b"></a><a href="a.html#b"></a><a href="#c"></a><a href="d.html"></a><img src="e.png">')
    assert find_broken_links({path: Page(path)}) == ["a.html: #c", "a.html: d.html", "a.html: e.png"]


def test_nothing_is_loaded_from_another_host(tree: Path, pages: dict[Path, Page]) -> None:
    addresses = [address for page in pages.values() for address in page.loaded]
    assert len(addresses) > 100
    assert [address for address in addresses if urlsplit(address).netloc] == []
    styles = "".join(path.read_text() for path in (tree / "site").rglob("*.css"))
    assert [mark for mark in ("@import", "url(http", "url(//", 'url("http', 'url("//') if mark in styles] == []


def test_text_is_found_by_search(tree: Path) -> None:
    index = json.loads((tree / "site" / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    assert "watchdog" in (ROOT / "docs" / "explanation" / "elasticity.md").read_text()
    assert "explanation/elasticity" in [index["docnames"][number] for number in index["terms"]["watchdog"]]


def test_a_file_outside_the_docs_is_part_of_the_site(tree: Path, pages: dict[Path, Page]) -> None:
    page = pages[tree / "site" / "explanation" / "architecture.html"]
    files = [page.path.parent / address for address in page.links if "_downloads" in address]
    assert (ROOT / "swarmtrain" / "planning" / "plan.py").read_bytes() in [path.read_bytes() for path in files]
    assert (ROOT / "swarmtrain" / "render" / "__init__.py").read_bytes() in [path.read_bytes() for path in files]


@pytest.mark.usefixtures("pages")  # they are read before this test adds a broken one
def test_a_page_in_no_list_a_broken_link_and_a_broken_anchor_fail_the_build(tree: Path) -> None:
    (tree / "docs" / "how-to" / "new.md").write_text("# New\n\n[a](missing.md) [b](lab.md#missing) [c](#missing) [d](../../missing.py)\n")
    result = build_site(tree)
    assert result.returncode == 1
    warnings = [line.partition("docs/how-to/new.md")[2] for line in result.stderr.splitlines() if "WARNING" in line]
    assert [warning.rpartition(" [")[2] for warning in warnings].count("toc.not_included]") == 1
    assert sum("missing" in warning for warning in warnings) == 4


def test_a_build_that_uses_the_network_fails(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "conf.py").write_text("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')\n")
    result = build_site(tmp_path)
    assert result.returncode != 0
    assert "without network" in result.stderr
