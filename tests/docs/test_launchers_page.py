"""docs/reference/launchers.md is made of the launchers' contract (tests/contract). REFRESH=1 writes it."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import contract
from features import LAUNCHERS, PAGE, page

from swarmtrain.launchers import _REGISTRY

TESTS = Path(__file__).parents[1]


def classes() -> dict[str, ast.ClassDef]:
    """Return the classes of tests that run the contract, by the launcher that each is about."""
    found = {}
    for path in (*(TESTS / "contract").glob("test_*.py"), TESTS / "lab" / "test_contract.py"):
        for each in ast.parse(path.read_text()).body:
            if isinstance(each, ast.ClassDef) and "Contract" in map(ast.unparse, each.bases):
                told = {
                    line.targets[0].id: line.value
                    for line in each.body
                    if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
                }
                found[ast.literal_eval(told["kind"])] = each
    return found


def test_the_page_is_what_the_contract_asserts() -> None:
    made = page(contract.Contract)
    if os.environ.get("REFRESH"):
        PAGE.write_text(made)
    assert PAGE.read_text() == made


def test_every_launcher_is_under_the_contract() -> None:
    assert set(classes()) == set(LAUNCHERS)
    assert {str(kind) for kind in _REGISTRY} == set(LAUNCHERS)


def test_what_is_not_run_is_denied() -> None:
    """A class leaves a test of the contract out by `test_… = None`, and changes none of them."""
    tests = {name: test.feature for name, test in vars(contract.Contract).items() if hasattr(test, "feature")}
    for kind, each in classes().items():
        own = [line for line in each.body if isinstance(line, ast.FunctionDef) and line.name in tests]
        out = [tests[line.targets[0].id] for line in each.body if isinstance(line, ast.Assign) and line.targets[0].id in tests]
        assert own == []
        assert set(out) <= set(LAUNCHERS[kind])
    assert {name for cannot in LAUNCHERS.values() for name in cannot} <= set(tests.values())
