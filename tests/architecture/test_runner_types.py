"""Only config/schema/runner_types.py distinguishes launchers by name; all other modules use their capabilities."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from swarmtrain.config.schema.runner_types import BUILT_IN_LAUNCHERS

SOURCE = Path(__file__).parents[2] / "swarmtrain"


def iterate_comparisons(text: str) -> Iterator[ast.Compare]:
    """Yield the comparisons in `text` of a name or attribute `runner_type` with literal names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = {part.value for side in sides for part in ast.walk(side) if isinstance(part, ast.Constant)}
            names = {ast.unparse(side).rpartition(".")[2] for side in sides}
            if "runner_type" in names and (
                words & set(BUILT_IN_LAUNCHERS) or any(name.isupper() for name in names - {"BUILT_IN_LAUNCHERS"})
            ):
                yield node


def test_no_module_compares_runner_types() -> None:
    modules = [path for path in SOURCE.rglob("*.py") if path.parent.name != "importers" and path.name != "runner_types.py"]
    found = [f"{path.relative_to(SOURCE)}:{node.lineno}" for path in modules for node in iterate_comparisons(path.read_text())]
    assert found == []


def test_a_comparison_is_found() -> None:
    for text in ('config.runner.runner_type == "slurm"', 'runner.runner_type in ("ssh", "ssh_docker")', "runner_type in SSH_TYPES"):
        assert list(iterate_comparisons(text)), text
    assert list(iterate_comparisons("runner_type in BUILT_IN_LAUNCHERS")) == []
