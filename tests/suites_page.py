"""docs/reference/tests.md, generated from SUITES and the `test_all_only` markers in the test files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from suites import ROOT, SUITES

_MARKER = "pytest.mark.test_all_only"
PAGE = ROOT.parent / "docs" / "reference" / "tests.md"
_HEADER = """# Tests

`make test` is the gate, which every change must pass: 20 to 35 min on two idle cores from a fresh clone. `make test-all` runs
all tests, and generates new examples for randomized tests from a seed that it prints. Both print the duration of each suite; select
suites with `SUITES='fast trainer'`. `make chaos` and `make soak` take longer. `REFRESH=1 pytest tests/docs` generates this page.

"""


def render_page() -> str:
    """Return the page."""
    gate = [[f"`{name}`", suite.description] for name, suite in SUITES.items() if not suite.test_all_only]
    others = [[f"`{name}`", suite.description, suite.test_all_only] for name, suite in SUITES.items() if suite.test_all_only]
    marked: dict[tuple[str, str], list[str]] = {}
    for path in sorted(ROOT.rglob("test_*.py")):
        for name, reason in find_marked_tests(path):
            marked.setdefault((str(path.relative_to(ROOT)), reason), []).append(name)
    tests = [[f"`{file}`", ", ".join(names), reason] for (file, reason), names in marked.items()]
    return "\n".join(
        [
            _HEADER + _format_table("The gate", ["suite", "what it shows"], gate),
            _format_table("Suites that only `make test-all` runs", ["suite", "what it shows", "why not in the gate"], others),
            _format_table("Tests of other suites that only `make test-all` runs", ["file", "tests", "why not in the gate"], tests),
        ]
    )


def find_marked_tests(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each test function that only `make test-all` runs, for all or some of its parameters.

    Raises ValueError for a marker without a reason, and for a second assignment to pytestmark.
    """
    yield from _find_marked(ast.parse(path.read_text()), inherited="")


def _find_marked(scope: ast.Module | ast.ClassDef, inherited: str) -> Iterator[tuple[str, str]]:
    marks = [node.value for node in scope.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    if len(marks) > 1:
        raise ValueError("of two assignments to pytestmark, pytest sees the last alone")
    inherited = next(_find_reasons([*marks, *getattr(scope, "decorator_list", [])]), inherited)
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            yield from _find_marked(node, inherited)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            test_marks = [mark for mark in node.decorator_list if not ast.unparse(mark).startswith("pytest.mark.parametrize")]
            if reason := next(_find_reasons(test_marks), inherited):
                yield f"`{node.name}`", reason
            else:
                yield from ((f"`{node.name}` (some parameters)", reason) for reason in _find_reasons(node.decorator_list))


def _find_reasons(marks: list[ast.expr]) -> Iterator[str]:
    """Yield the reasons of the `test_all_only` markers in expressions, including those of single parameters."""
    for node in (node for mark in marks for node in ast.walk(mark)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == _MARKER and node.args:
            yield str(ast.literal_eval(node.args[0]))
    texts = [ast.unparse(mark) for mark in marks]
    if any(text.count(_MARKER) != text.count(f"{_MARKER}(") for text in texts):
        raise ValueError(f"line {marks[0].lineno}: a test_all_only marker needs a reason")


def _format_table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"## {title}\n", *(f"| {' | '.join(line)} |" for line in lines), ""])
