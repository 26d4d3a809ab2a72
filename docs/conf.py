"""The documentation site: `make site` builds it with Sphinx from the Markdown of this folder, which also reads well on GitHub.

Sphinx with MyST is the builder since both are maintained, and since MyST reads Markdown as GitHub does (CommonMark, the same anchors of
headings). MkDocs has had no release since 2024, and the theme Material for MkDocs is past its end of life (November 2026).

Links and navigation need nothing that GitHub does not show:

- The navigation is made from the lists of links in README.md and explanation/decisions/README.md. If a page is in no list, the build fails.
- A link to a file outside this folder (`../../examples/digits.py`) becomes a download: Sphinx copies the file into the site. The site is
  therefore complete without network, at any address. A link to a package leads to its `__init__.py`, whose docstring describes the package.
- Broken links and anchors are warnings, and `--fail-on-warning` makes them errors.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx

project = "swarmtrain"
root_doc = "README"
source_suffix = {".md": "markdown"}
extensions = ["myst_parser"]
myst_enable_extensions = ["html_image"]  # <img src> counts as an image of the page, whose file is copied
myst_heading_anchors = 6
nitpicky = True
smartquotes = False
highlight_language = "text"  # of blocks that name no language
suppress_warnings = ["misc.highlighting_failure"]  # some pages show invalid YAML on purpose
html_theme = "furo"
html_title = "swarmtrain"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_use_index = False

_SECTION_PATTERN = re.compile(r"^\*\*(?P<title>[\w-]+)\.\*\*", re.M)
_PAGE_PATTERN = re.compile(r"^- .*?\]\((?P<page>[\w/-]+)\.md\)", re.M)
_PACKAGE_LINK_PATTERN = re.compile(r"\]\((?P<path>\.\./[\w/.-]*/\w+)\)")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("source-read", point_package_links_to_files)
    app.connect("build-finished", write_index)


def add_navigation(_app: Sphinx, document: str, content: list[str]) -> None:
    """Append a hidden table of contents to a page of links: one for each section `**Title.**`, or one for the whole page."""
    if Path(document).name != "README":
        return
    before, *sections = _SECTION_PATTERN.split(content[0])
    titles, texts = sections[::2] or ["Pages"], sections[1::2] or [before]
    for title, text in zip(titles, texts, strict=True):
        pages = "\n".join(_PAGE_PATTERN.findall(text))
        content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{pages}\n```\n"


def point_package_links_to_files(app: Sphinx, document: str, content: list[str]) -> None:
    """Replace links to packages outside docs/ with links to their `__init__.py`, since a folder cannot be downloaded."""
    folder = (app.srcdir / document).parent

    def replace_link(link: re.Match[str]) -> str:
        return f"]({link['path']}/__init__.py)" if (folder / link["path"]).is_dir() else link[0]

    content[0] = _PACKAGE_LINK_PATTERN.sub(replace_link, content[0])


def write_index(app: Sphinx, exception: Exception | None) -> None:
    """Copy the page of README.md to index.html, which is what a web server shows for the folder."""
    if exception is None and app.builder.name == "html":
        shutil.copyfile(app.outdir / "README.html", app.outdir / "index.html")
