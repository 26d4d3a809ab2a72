"""docs/reference/errors.md holds the cases that the tests make, all of them and no other. REFRESH=1 puts them in order."""

from __future__ import annotations

import os

from error_cases import PAGE, collect_sections, read_sections, render_page


def test_each_section_has_its_case_and_each_case_its_section() -> None:
    if os.environ.get("REFRESH"):
        PAGE.write_text(render_page(read_sections()))
    titles = [case.title for case in collect_sections()]
    assert sorted(titles) == sorted(set(titles))
    assert list(read_sections()) == titles
    assert [title for title, text in read_sections().items() if not text] == []


def test_the_rest_of_the_page_is_current() -> None:
    assert PAGE.read_text() == render_page(read_sections())
