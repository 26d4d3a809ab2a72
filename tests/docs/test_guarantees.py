"""docs/reference/guarantees.md: every row names tests, and pytest collects each of them.

Collecting these files with pytest takes 20 s of CPU time, since they import torch and transformers. So they are parsed, with pytest's
rules, and one test compares the result with pytest's on a file that has every kind of code that is not collected.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "guarantees.md"
_ID = re.compile(r"`(tests/[^`\s]+?\.py::[^`]+)`")
_SAMPLE = """
import pytest

def test_one(): ...
async def test_asynchronous(): ...
@pytest.mark.parametrize("number", [1, 2])
def test_with_parameters(number): ...
@pytest.fixture
def test_fixture(): ...
def test_hidden(): ...
test_hidden = None
def helper_test(): ...
def outer():
    def test_inner(): ...
if False:
    def test_never(): ...
class TestClass:
    def test_method(self): ...
    test_not_here = None
class TestWithInit:
    def __init__(self): ...
    def test_method(self): ...
class Helper:
    def test_method(self): ...
class TestOff:
    __test__ = False
    def test_method(self): ...
"""


def read_rows() -> list[str]:
    """Return the rows of all tables on the page, without their headers."""
    lines = PAGE.read_text().splitlines()
    return [line for line in lines if line.startswith("|") and not line.startswith(("| Claim ", "| --- "))]


def read_test_ids() -> list[str]:
    """Return the test ids on the page, in order."""
    return _ID.findall(PAGE.read_text())


def collect_test_names(text: str) -> set[str]:
    """Return the names of the tests that pytest collects in a file with this text, as after `FILE::`: functions and methods of classes."""
    found = set()
    for name, node in _map_definitions(ast.parse(text).body).items():
        if isinstance(node, ast.ClassDef) and name.startswith("Test"):
            methods = _map_definitions(node.body)
            if "__init__" not in methods and not _is_collection_disabled(node.body):
                found |= {f"{name}::{method}" for method, each in methods.items() if _is_test(method, each)}
        elif _is_test(name, node):
            found.add(name)
    return found


def _map_definitions(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return name → definition in a module or class. Conditional definitions and imports are ignored; the last definition counts."""
    defined: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    return defined


def _is_collection_disabled(body: list[ast.stmt]) -> bool:
    node = _map_definitions(body).get("__test__")
    return isinstance(node, ast.Assign) and ast.unparse(node.value) == "False"


def _is_test(name: str, node: ast.stmt) -> bool:
    return (
        name.startswith("test")
        and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("pytest.fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
    )


def test_every_row_names_a_test() -> None:
    assert len(read_rows()) > 50
    assert [row for row in read_rows() if not _ID.findall(row)] == []
    assert len(re.findall(r"tests/\w+/test_\w+", PAGE.read_text().partition("## ")[2])) == len(read_test_ids()), "a path without a test"


def test_pytest_collects_every_test_that_is_named() -> None:
    files = {path: ROOT / path for path in {each.partition("::")[0] for each in read_test_ids()}}
    assert [path for path, file in files.items() if not file.exists() or not re.fullmatch(r"test_\w+\.py", file.name)] == []
    known = {f"{path}::{name}" for path, file in files.items() for name in collect_test_names(file.read_text())}
    assert [each for each in read_test_ids() if each not in known] == []


def test_no_named_file_is_left_out_of_collection() -> None:
    """For reasons that collect_test_names() does not handle."""
    texts = [(ROOT / each.partition("::")[0]).read_text() for each in read_test_ids()]
    conftests = [path.read_text() for path in (ROOT / "tests").rglob("conftest.py")]
    assert [text for text in texts if re.search(r"allow_module_level|^__test__|^pytestmark = .*skip", text, re.MULTILINE)] == []
    assert [text for text in conftests if re.search(r"collect_ignore|pytest_ignore_collect", text)] == []


def test_pytest_collects_by_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(_SAMPLE)
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    found = {line.partition("::")[2].partition("[")[0] for line in done.stdout.splitlines() if line.startswith("test_sample.py::")}
    assert found == collect_test_names(_SAMPLE) == {"test_one", "test_asynchronous", "test_with_parameters", "TestClass::test_method"}
