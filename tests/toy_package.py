"""The package of docs/how-to/plugins.md, unpacked into a folder as pip would install it."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "howto"))

import page

PAGE = "docs/how-to/plugins.md"
_PROJECT_FOLDER = "toy/"


def install_toy_package(folder: Path) -> Path:
    """Write the page's package and its metadata to `folder`, for PYTHONPATH, and return `folder`."""
    files = {step.file_name: step.text for step in page.read_page(PAGE) if step.kind == "save"}
    project = tomllib.loads(files.pop(f"{_PROJECT_FOLDER}pyproject.toml"))["project"]
    for name, text in files.items():
        if name.startswith(_PROJECT_FOLDER):
            path = folder / name.removeprefix(_PROJECT_FOLDER)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
    write_metadata(folder, project["name"], project["version"], project["entry-points"])
    return folder


def write_metadata(folder: Path, name: str, version: str, groups: dict[str, dict[str, str]]) -> None:
    """Write the .dist-info folder of an installed package with entry points: group to name to `module:class`."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items()) for group, entries in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
