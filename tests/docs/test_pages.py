"""The parser of pages reads them as a person does, and a test follows every page with commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "howto"))

import page  # noqa: E402  # lies in the folder of the tests that need a lab

PAGES = sorted(path.relative_to(ROOT).as_posix() for part in ("tutorial", "how-to") for path in (ROOT / "docs" / part).glob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_followed_by_a_test(name: str) -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    assert f'"{name}"' in tests


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_commands_and_a_reason_for_each_that_is_not_typed(name: str) -> None:
    text = (ROOT / name).read_text()
    steps = page.parse_page(text)
    assert any(step.kind == "type" for step in steps)
    assert sum(step.kind == "shown" for step in steps) == text.count("<!-- shown: "), "a file without a name, or a mark without a block"
    assert text.count("<!--") == sum(text.count(f"<!-- {mark}: ") for mark in ("shown", "until")), "no other hidden text"


def test_a_page_is_read_as_its_reader_reads_it() -> None:
    steps = page.parse_page(
        """# Title
## Part
Save this on every machine as `/etc/a.json`:

```json
{}
```

Then, on each of the others:

```sh
one
two
```

```
seen …
```

<!-- shown: because -->
```sh
never
```

<!-- until: step +5/ -->
```sh
follow
```
"""
    )
    assert [(step.kind, step.machine, step.text) for step in steps] == [
        ("save", "every machine", "{}"),
        ("type", "each of the others", "one\ntwo"),
        ("see", "the first machine", "seen …"),
        ("shown", "the first machine", "never"),
        ("type", "the first machine", "follow"),
    ]
    assert (steps[0].file_name, steps[0].heading, steps[4].until_pattern) == ("/etc/a.json", "Part", "step +5/")


def test_what_is_seen_is_compared_loosely_but_compared() -> None:
    output = "node0   rank 3 | step  25/500  loss 2.0045  lr 2.54e-03\nready\n"
    assert page.find_missing_lines("node1 rank 0 | step 100/5000 loss 1.9 …\n…\nready", output) == []
    assert page.find_missing_lines("steady\nnode1 rank 0 | loss", output) == ["steady", "node1 rank 0 | loss"]
