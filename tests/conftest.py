"""For all suites: a home of their own (tests/isolation.py), and `answer`, the fixture of a case of bad input (tests/answers.py)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from answers import ROOT, Answer, cases
from hypothesis import settings
from isolation import own_home, own_state  # noqa: F401  # pytest finds fixtures by their names here

sys.path.append(str(Path(sys.prefix) / "determined"))  # where the Makefile has put it

# How long an example takes says nothing on a machine that is busy with other suites.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def answer(request: pytest.FixtureRequest, tmp_path: Path) -> Answer:
    """The case that this test is, in a project folder of its own."""
    name = f"{request.path.relative_to(ROOT)}::{request.node.originalname}"
    return Answer(next(case for case in cases() if case.test == name), tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On launchers other than the swarm, leave what a short life does not need to `make test-all`: see tests/contract/features.py."""
    for item in items:
        if isinstance(item, pytest.Function) and not getattr(item.function, "gate", True) and item.cls.kind != "swarm":
            item.add_marker(pytest.mark.test_all_only("the gate has this on the swarm"))


def pytest_collection_finish() -> None:
    """Leave what has been imported out of garbage collection, as ranks do: each collection would visit hundreds of thousands of objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A case that has come to its end makes its section of the page."""
    result = yield
    made = pyfuncitem.funcargs.get("answer")
    if isinstance(made, Answer):
        made.finish()
    return result
