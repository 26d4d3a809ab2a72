"""docs/reference/tests.md, made from the table of suites and the `test_all_only` markers in the test files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from suites import ROOT, SUITES

PAGE = ROOT.parent / "docs" / "reference" / "tests.md"
_HEAD = """# Tests

`make test` is the gate: what every change has to pass, in at most 15 minutes on two idle cores from a fresh clone. `make test-all` runs
everything, and draws new examples for randomized tests from a seed that it prints. Both print the time of each suite, and take
`SUITES='fast trainer'`. `make chaos` and `make soak` are longer still. This page is made from the tests: `REFRESH=1 pytest tests/docs`.

"""


def write_page() -> str:
    """Return the page."""
    gate = [[f"`{name}`", suite.shows] for name, suite in SUITES.items() if not suite.test_all_only]
    rest = [[f"`{name}`", suite.shows, suite.test_all_only] for name, suite in SUITES.items() if suite.test_all_only]
    marked: dict[tuple[str, str], list[str]] = {}
    for path in sorted(ROOT.rglob("test_*.py")):
        for name, reason in marked_tests(path):
            marked.setdefault((str(path.relative_to(ROOT)), reason), []).append(f"`{name}`")
    tests = [[f"`{file}`", ", ".join(names), reason] for (file, reason), names in marked.items()]
    return "\n".join(
        [
            _HEAD + _table("The gate", ["suite", "what it shows"], gate),
            _table("Suites that only `make test-all` runs", ["suite", "what it shows", "why not in the gate"], rest),
            _table("Tests of other suites that only `make test-all` runs", ["file", "tests", "why not in the gate"], tests),
        ]
    )


def marked_tests(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each test function in a file that only `make test-all` runs.

    Raises ValueError for a marker without a reason.
    """
    yield from _marked(ast.parse(path.read_text()), inherited="")


def _marked(scope: ast.Module | ast.ClassDef, inherited: str) -> Iterator[tuple[str, str]]:
    marks = [node.value for node in scope.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    inherited = _reason([*marks, *getattr(scope, "decorator_list", [])]) or inherited
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            yield from _marked(node, inherited)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and (reason := _reason(node.decorator_list) or inherited):
            yield node.name, reason


def _reason(marks: list[ast.expr]) -> str:
    for mark in marks:
        if "pytest.mark.test_all_only" in ast.unparse(mark):
            if not isinstance(mark, ast.Call) or not mark.args:
                raise ValueError(f"line {mark.lineno}: a test_all_only marker needs a reason")
            return str(ast.literal_eval(mark.args[0]))
    return ""


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"## {title}\n", *(f"| {' | '.join(line)} |" for line in lines), ""])
