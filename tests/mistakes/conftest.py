"""Mistakes that need no cluster: hundreds of commands, so each starts from a process that has imported them."""

from __future__ import annotations

import pytest
from error_cases import ErrorCase


@pytest.fixture(autouse=True)
def _use_preloaded_fork(request: pytest.FixtureRequest) -> None:
    if "error_case" in request.fixturenames:
        error_case: ErrorCase = request.getfixturevalue("error_case")
        error_case.use_preloaded_fork = True
