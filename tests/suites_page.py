"""docs/reference/tests.md, made from the table of suites and the `test_all_only` markers in the test files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from suites import ROOT, SUITES

_MARKER = "pytest.mark.test_all_only"
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
            marked.setdefault((str(path.relative_to(ROOT)), reason), []).append(name)
    tests = [[f"`{file}`", ", ".join(names), reason] for (file, reason), names in marked.items()]
    return "\n".join(
        [
            _HEAD + _table("The gate", ["suite", "what it shows"], gate),
            _table("Suites that only `make test-all` runs", ["suite", "what it shows", "why not in the gate"], rest),
            _table("Tests of other suites that only `make test-all` runs", ["file", "tests", "why not in the gate"], tests),
        ]
    )


def marked_tests(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each test function in a file that only `make test-all` runs, whole or for some of its parameters.

    Raises ValueError for a marker without a reason, and for a second assignment to pytestmark.
    """
    yield from _marked(ast.parse(path.read_text()), inherited="")


def _marked(scope: ast.Module | ast.ClassDef, inherited: str) -> Iterator[tuple[str, str]]:
    marks = [node.value for node in scope.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"]
    if len(marks) > 1:
        raise ValueError("of two assignments to pytestmark, pytest sees the last alone")
    inherited = next(_reasons([*marks, *getattr(scope, "decorator_list", [])]), inherited)
    for node in scope.body:
        if isinstance(node, ast.ClassDef):
            yield from _marked(node, inherited)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            whole = [mark for mark in node.decorator_list if not ast.unparse(mark).startswith("pytest.mark.parametrize")]
            if reason := next(_reasons(whole), inherited):
                yield f"`{node.name}`", reason
            else:
                yield from ((f"`{node.name}` (some parameters)", reason) for reason in _reasons(node.decorator_list))


def _reasons(marks: list[ast.expr]) -> Iterator[str]:
    """Yield the reasons of the `test_all_only` markers in expressions, those of single parameters included."""
    for node in (node for mark in marks for node in ast.walk(mark)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == _MARKER and node.args:
            yield str(ast.literal_eval(node.args[0]))
    texts = [ast.unparse(mark) for mark in marks]
    if any(text.count(_MARKER) != text.count(f"{_MARKER}(") for text in texts):
        raise ValueError(f"line {marks[0].lineno}: a test_all_only marker needs a reason")


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"## {title}\n", *(f"| {' | '.join(line)} |" for line in lines), ""])
