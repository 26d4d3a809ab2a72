"""docs/reference/tests.md lists the tests that the gate runs, and the reasons why others are left out. REFRESH=1 writes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from suites import ROOT, SUITES
from suites_page import PAGE, find_marked_tests, render_page


def test_the_page_is_what_the_suites_are() -> None:
    text = render_page()
    if os.environ.get("REFRESH"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text


def test_every_test_file_is_in_a_suite() -> None:
    places = [ROOT / place.partition("::")[0] for suite in SUITES.values() for place in suite.paths]
    left = [path for path in ROOT.rglob("test_*.py") if not any(path.is_relative_to(place) for place in places)]
    assert left == []


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ('@pytest.mark.test_all_only("slow")', [("`test_one`", "slow")]),
        ('pytestmark = pytest.mark.test_all_only("long")', [("`test_one`", "long"), ("`test_two`", "long")]),
        (
            '@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.test_all_only("big"))])',
            [("`test_one` (some parameters)", "big")],
        ),
        ("@pytest.mark.parametrize('x', [1])", []),
    ],
)
def test_markers_are_found_with_their_reasons(tmp_path: Path, mark: str, expected: list[tuple[str, str]]) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(f"import pytest\n{mark}\ndef test_one(): pass\ndef test_two(): pass\n")
    assert list(find_marked_tests(path)) == expected


def test_a_marker_without_a_reason_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("import pytest\n@pytest.mark.test_all_only\ndef test_one(): pass\n")
    with pytest.raises(ValueError, match="line 2: a test_all_only marker needs a reason"):
        list(find_marked_tests(path))


@pytest.mark.parametrize(
    ("target", "expected"),
    [("test", "tests/suites.py"), ("test-all", "tests/suites.py --all"), ("contract", "tests/suites.py --all contract")],
)
def test_a_make_target_runs_what_its_help_says(target: str, expected: str) -> None:
    """Without `--all`, `make contract` would run only 72 of 125 tests."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "SUITES")}  # set by `make test SUITES=…`
    argv = ["make", "--dry-run", target]
    shown = subprocess.run(argv, cwd=ROOT.parent, env=env, capture_output=True, text=True, check=True).stdout
    assert expected in [line.partition("bin/python ")[2].strip() for line in shown.splitlines()]
