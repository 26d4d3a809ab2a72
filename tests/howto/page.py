"""A page of the docs as the steps that a reader takes: what to type and on which machine, which file to save, which output to expect.

The visible text of the page decides all of it:

- a ```sh block is typed, on the machine that the text before it names: "on the first machine", "on each of the others",
  "on every machine", "on the connected machine"; by default on the first one;
- any other block after a text that ends in a file name and a colon (`hello.py`:) is saved under that name;
- a block without a language after that is expected output, compared loosely: a number matches any number, and "…" matches
  anything; the output may have more lines.

Two marks in HTML comments before a block cannot be expressed in visible text: `shown: WHY` is not typed, with the reason;
`until: PATTERN` is ended with Ctrl-C as soon as a line matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MARK_PATTERN = re.compile(r"<!-- (shown|until): (.+?) -->")
_FILE_PATTERN = re.compile(r"`([^`\s]+\.[a-z]+)`:$")
_MACHINE_PATTERN = re.compile(r"\bon (the first machine|each of the others|every machine|the connected machine)\b", re.IGNORECASE)


@dataclass(frozen=True)
class PageStep:
    """One block of a page. `kind` is type, save, see or shown."""

    line: int
    heading: str
    kind: str
    text: str
    machine: str = "the first machine"
    file_name: str = ""
    until_pattern: str = ""


def read_page(page: str) -> list[PageStep]:
    """Return the steps of the page at `page`, a path relative to the repository's root."""
    return parse_page((ROOT / page).read_text())


def parse_page(text: str) -> list[PageStep]:
    """Return the steps of a page with this text."""
    steps: list[PageStep] = []
    heading, paragraph, marks = "", "", {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if line.startswith("#"):
            heading, paragraph = line.lstrip("# "), ""
        elif line.startswith("```"):
            block = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                block.append(inner)
            steps.append(_build_step(number, "\n".join(block), language=line[3:], heading=heading, paragraph=paragraph, marks=marks))
            paragraph, marks = "", {}
        elif found := _MARK_PATTERN.fullmatch(line):
            marks[found[1]] = found[2]
        else:
            paragraph = f"{paragraph} {line}".strip()
    return steps


def find_missing_lines(expected: str, output: str) -> list[str]:
    """Return the lines of `expected` that match no line of `output`."""
    output_lines = [" ".join(line.split()) for line in output.splitlines()]
    return [
        line
        for line in expected.splitlines()
        if line.strip() != "…" and not any(_compile_line(line).search(found) for found in output_lines)
    ]


def _build_step(line: int, text: str, *, language: str, heading: str, paragraph: str, marks: dict[str, str]) -> PageStep:
    machines = _MACHINE_PATTERN.findall(paragraph)
    file = _FILE_PATTERN.search(paragraph)
    kind = "type" if language == "sh" else "save" if file else "shown" if language else "see"
    return PageStep(
        line,
        heading,
        "shown" if "shown" in marks else kind,
        text,
        machines[-1].lower() if machines else "the first machine",
        file[1] if file and kind == "save" else "",
        marks.get("until", ""),
    )


def _compile_line(line: str) -> re.Pattern[str]:
    parts = re.split(r"(…|\d[\d.,:e+-]*)", " ".join(line.split()))
    return re.compile("".join(".*" if part == "…" else r"[\d.,:e+-]+" if part[:1].isdigit() else re.escape(part) for part in parts))
