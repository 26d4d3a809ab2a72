"""The structure of the package: in each folder, modules and sub-packages form layers, and no folder has many modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULES = 17
PACKAGES = sorted(path.parent.relative_to(ROOT) for path in (ROOT / "swarmtrain").rglob("__init__.py"))


def list_imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports anywhere, also in functions and for type checking only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def build_import_graph(package: Path) -> dict[str, set[str]]:
    """Return the modules and sub-packages of `package` that each of them imports. The package's own `__init__` is not one of them."""
    name = ".".join(package.parts)
    children = {path.stem: path for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    graph: dict[str, set[str]] = {}
    for child, path in children.items():
        # Files in `shipped` folders are data: copies of the training script that `swarmtrain init` writes.
        files = [file for file in path.rglob("*.py") if file.parent.name != "shipped"] if path.is_dir() else [path]
        imported = {
            full.removeprefix(f"{name}.").split(".")[0]
            for file in files
            for full in list_imported_names(file)
            if f"{full}.".startswith(f"{name}.")
        }
        graph[child] = imported & children.keys() - {child, "__init__"}
    graph.pop("__init__")
    return graph


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_the_children_of_a_package_import_each_other_in_one_direction(package: Path) -> None:
    try:
        TopologicalSorter(build_import_graph(package)).prepare()
    except CycleError as error:
        pytest.fail(f"{package}: {' → '.join(error.args[1])}")


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_a_package_has_few_modules(package: Path) -> None:
    modules = [path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MAX_MODULES, "form a sub-package of modules that belong together"
