"""The docs are tested: links have targets, every command is in the reference and has help, decisions are listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from swarmtrain.cli import build_app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def iterate_commands() -> Iterator[tuple[str, object]]:
    """Yield each command's name and the command itself."""
    pending: list[tuple[str, object]] = [("swarmtrain", typer.main.get_command(build_app()))]
    while pending:
        name, command = pending.pop()
        if isinstance(command, TyperGroup):
            pending += [(f"{name} {word}", found) for word, found in command.commands.items()]
        else:
            yield name, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [(page.parent / target).resolve() for target in _LINK.findall(page.read_text())]
    assert [str(target) for target in targets if not target.exists()] == []


def test_every_command_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert [name for name, _ in iterate_commands() if f"`{name}" not in reference] == []


def test_every_command_and_every_option_has_help() -> None:
    silent = []
    for name, command in iterate_commands():
        if not getattr(command, "help", None):
            silent.append(name)
        params = [item for item in getattr(command, "params", []) if item.name != "help"]
        silent += [f"{name} {item.name}" for item in params if not getattr(item, "help", None)]
    assert silent == []


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "explanation" / "decisions"
    listed = (folder / "README.md").read_text()
    assert [page.name for page in folder.glob("*.md") if page.name != "README.md" and page.name not in listed] == []


def test_commands_in_the_docs_exist() -> None:
    known = {name for name, _ in iterate_commands()}
    used = {
        line.strip().lstrip("$ ")
        for page in PAGES
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(), re.S)
        for line in block.splitlines()
        if line.strip().lstrip("$ ").startswith("swarmtrain ")
    }
    unknown = [line for line in used if not any(f"{line} ".startswith(f"{name} ") for name in known)]
    assert unknown == []


def test_the_generated_reference_is_current() -> None:
    import runpy

    folder = ROOT / "docs" / "reference"
    pages = runpy.run_path(str(folder / "generate.py"))["PAGES"]
    assert [page for page, text in pages.items() if (folder / page).read_text() != text()] == [], "python docs/reference/generate.py"
