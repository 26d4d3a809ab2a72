"""docs/reference/errors.md holds the cases that the tests make, all of them and no other. REFRESH=1 puts them in order."""

from __future__ import annotations

import os

from answers import PAGE, cases, page, sections


def test_each_section_has_its_case_and_each_case_its_section() -> None:
    if os.environ.get("REFRESH"):
        PAGE.write_text(page(sections()))
    titles = [case.title for case in cases()]
    assert sorted(titles) == sorted(set(titles))
    assert list(sections()) == titles
    assert [title for title, text in sections().items() if not text] == []


def test_the_rest_of_the_page_is_current() -> None:
    assert PAGE.read_text() == page(sections())
