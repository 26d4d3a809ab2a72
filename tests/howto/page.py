"""A page of the docs as the steps that a reader takes: what to type and on which machine, what to save as a file, what is seen.

The page says all of it in words that its reader sees:

- a ```sh block is typed, on the machine that the text before it names: "on the first machine", "on each of the others",
  "on every machine", "on the connected machine"; on the first one if it names none;
- any other block after a text that ends in a file's name and a colon (`hello.py`:) is saved under that name;
- a block without a language that follows is what is seen, compared loosely: any number may stand for any other, and
  "…" for anything; lines may be missing from it.

Two marks in HTML comments, before a block, say what words cannot: `shown: WHY` is not typed, and why;
`until: PATTERN` is ended with Ctrl-C as soon as a line that matches is seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK = re.compile(r"<!-- (shown|until): (.+?) -->")
_FILE = re.compile(r"`([^`\s]+\.[a-z]+)`:$")
_WHERE = re.compile(r"\bon (the first machine|each of the others|every machine|the connected machine)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """One block of a page. `kind` is type, save, see or shown."""

    line: int
    heading: str
    kind: str
    text: str
    where: str = "the first machine"
    file: str = ""
    until: str = ""


def read(page: str) -> list[Step]:
    """Return the steps of the page at `page`, a path from the repository's root."""
    return parse((ROOT / page).read_text())


def parse(text: str) -> list[Step]:
    """Return the steps of a page."""
    steps: list[Step] = []
    heading, words, marks = "", "", {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if line.startswith("#"):
            heading, words = line.lstrip("# "), ""
        elif line.startswith("```"):
            block = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                block.append(inner)
            steps.append(_step(number, "\n".join(block), language=line[3:], heading=heading, words=words, marks=marks))
            words, marks = "", {}
        elif found := _MARK.fullmatch(line):
            marks[found[1]] = found[2]
        else:
            words = f"{words} {line}".strip()
    return steps


def seen(expected: str, output: str) -> list[str]:
    """Return the lines of `expected` that `output` does not show."""
    shown = [" ".join(line.split()) for line in output.splitlines()]
    return [line for line in expected.splitlines() if line.strip() != "…" and not any(_pattern(line).search(found) for found in shown)]


def _step(line: int, text: str, *, language: str, heading: str, words: str, marks: dict[str, str]) -> Step:
    where = _WHERE.findall(words)
    file = _FILE.search(words)
    kind = "type" if language == "sh" else "save" if file else "shown" if language else "see"
    return Step(
        line,
        heading,
        "shown" if "shown" in marks else kind,
        text,
        where[-1].lower() if where else "the first machine",
        file[1] if file and kind == "save" else "",
        marks.get("until", ""),
    )


def _pattern(line: str) -> re.Pattern[str]:
    parts = re.split(r"(…|\d[\d.,:e+-]*)", " ".join(line.split()))
    return re.compile("".join(".*" if part == "…" else r"[\d.,:e+-]+" if part[:1].isdigit() else re.escape(part) for part in parts))
