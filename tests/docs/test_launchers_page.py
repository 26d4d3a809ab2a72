"""docs/reference/launchers.md is generated from the launchers' contract (tests/contract). REFRESH=1 writes it."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import contract
from features import LAUNCHERS, PAGE, render_page

from swarmtrain.config.schema.runner_types import BUILT_IN_LAUNCHERS

TESTS = Path(__file__).parents[1]


def find_contract_classes() -> dict[str, ast.ClassDef]:
    """Return launcher → the test class that runs the contract for it."""
    found = {}
    for path in (*(TESTS / "contract").glob("test_*.py"), TESTS / "lab" / "test_contract.py"):
        for definition in ast.parse(path.read_text()).body:
            if isinstance(definition, ast.ClassDef) and "Contract" in map(ast.unparse, definition.bases):
                assignments = {
                    line.targets[0].id: line.value
                    for line in definition.body
                    if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
                }
                found[ast.literal_eval(assignments["kind"])] = definition
    return found


def test_the_page_is_what_the_contract_asserts() -> None:
    made = render_page(contract.Contract)
    if os.environ.get("REFRESH"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made


def test_every_launcher_is_under_the_contract() -> None:
    assert set(find_contract_classes()) == set(LAUNCHERS)
    assert set(BUILT_IN_LAUNCHERS) == set(LAUNCHERS)


def test_what_is_not_run_is_denied() -> None:
    """A class leaves out a test of the contract with `test_… = None`, and overrides none."""
    tests = {name: test.feature for name, test in vars(contract.Contract).items() if hasattr(test, "feature")}
    for kind, each in find_contract_classes().items():
        own = [line for line in each.body if isinstance(line, ast.FunctionDef) and line.name in tests]
        out = [tests[line.targets[0].id] for line in each.body if isinstance(line, ast.Assign) and line.targets[0].id in tests]
        assert own == []
        assert set(out) <= set(LAUNCHERS[kind])
    assert {name for cannot in LAUNCHERS.values() for name in cannot} <= set(tests.values())
