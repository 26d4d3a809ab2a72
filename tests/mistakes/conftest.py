"""Mistakes that need no cluster: hundreds of commands, so each starts from a process that has imported them."""

from __future__ import annotations

import pytest
from answers import Answer


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest) -> None:
    if "answer" in request.fixturenames:
        made: Answer = request.getfixturevalue("answer")
        made.forked = True
