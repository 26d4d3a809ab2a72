"""For all suites: an isolated home (tests/isolation.py), and `error_case`, the fixture of a test of bad input (tests/error_cases.py)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from error_cases import ROOT, ErrorCase, collect_sections
from hypothesis import settings
from isolation import isolated_home, isolated_state  # noqa: F401  # pytest finds the fixtures by these names

sys.path.append(str(Path(sys.prefix) / "determined"))  # installed there by the Makefile

# On a machine that is busy with other suites, the time of an example means nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture
def error_case(request: pytest.FixtureRequest, tmp_path: Path) -> ErrorCase:
    """The error case of the current test, in its own project folder."""
    name = f"{request.path.relative_to(ROOT)}::{request.node.originalname}"
    return ErrorCase(next(case for case in collect_sections() if case.test_id == name), tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests with `gate=False` in the gate for launchers other than the swarm: see tests/contract/features.py."""
    for item in items:
        if isinstance(item, pytest.Function) and not getattr(item.function, "gate", True) and item.cls.kind != "swarm":
            item.add_marker(pytest.mark.test_all_only("the gate has this on the swarm"))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, as ranks do: otherwise each collection visits hundreds of thousands of them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Compare or write the section of the page when an error case passes."""
    result = yield
    error_case = pyfuncitem.funcargs.get("error_case")
    if isinstance(error_case, ErrorCase):
        error_case.finish_section()
    return result
