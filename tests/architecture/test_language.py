"""Language: terms are not paraphrased (docs/reference/glossary.md), class names are unique, and functions are verbs."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BANNED = {
    r"held[- _]?out": "validation (loss, data, accuracy)",
    r"\bno number\b|\bunsound\b": "NaN or Inf, non-finite",
    r"\b(?:goes|go|going|gone|went) on\b": "continues; resumes from step N",
    r"\bmade again\b|\banew\b": "recomputed, restarted, again",
    r"\bpass(?:ed|es|ing) over\b": "skipped",
    r"\btorn\b(?! down)|\b(?:is|are) whole\b|\bwhole checkpoint": "corrupt or incomplete; complete or valid",
    r"\bcomes? to stand\b|\bst(?:ood|ands?) still\b": "committed; stalled",
    r"\basked to leave\b": "stop requested, exits gracefully",
    r"\bnotice board\b|\bthe board\b": "coordinator",
    r"\bverdict\b": "outcome",
    r"\brehears\w*|\bforet(?:ell|old)\w*": "simulate, estimate",
    r"\b(?:re-?)?dealt\b(?! with)": "assigned, sharded",
    r"\bscript of one's own\b": "custom script, your script",
    r"\btold\b": "logged, printed, raised, reported",
    r"\bbef(?:ell|all\w*)\b|\bwhoever\b|\bamid\b|\bbeside\b|\bfor ever\b|\bshall\b": "a present-day word",
    r"(?<!there )\b(?:is|are) no (?!longer\b)[a-z]+": "is not a …",
    r"\bcounted tokens\b": "loss tokens",
    r"\bsurvivors\b": "surviving ranks",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\b(?:put|written|moved) aside\b": "in a staging folder",
}
"""Pattern to what to write instead."""
_ANY = re.compile("|".join(BANNED), re.IGNORECASE)
_PARTICIPLE = re.compile(r"(?:[a-z]{2,}ed|[a-z]{2,}ing|made|found|told|seen|known|given|held|kept|gone|left|stood|come|done)")
_NOT_PARTICIPLES = {"embed": "a verb", "missing": "enum.Enum calls its hook _missing_"}


def list_texts() -> list[Path]:
    """Return the files that users and maintainers read. CHANGELOG.md names old words."""
    patterns = {"swarmtrain": ("*.py", "*.js", "*.html"), "docs": ("*.md", "*.py"), "benchmarks": ("*.py",), "examples": ("*.*",)}
    files = [path for folder, globs in patterns.items() for glob in globs for path in (ROOT / folder).rglob(glob)]
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "Dockerfile", "training_code.py", "datautils.py")
    return sorted([path for path in files if "uplot" not in path.parts and not path.is_symlink()] + [ROOT / name for name in names])


def list_definitions() -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef]]:
    for path in sorted((ROOT / "swarmtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield path, node


def test_no_term_is_paraphrased() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r}; write: {instead}"
        for path in list_texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if _ANY.search(line)
        for pattern, instead in BANNED.items()
        if (match := re.search(pattern, line, re.IGNORECASE))
    ]
    assert not found, "\n".join(found)


def test_class_names_are_unique() -> None:
    names = Counter(node.name for _, node in list_definitions() if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert [name for name, count in names.items() if count > 1] == []


def test_no_function_is_named_by_a_participle_alone() -> None:
    """Properties and context managers may be: `with timer.suspended():`."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path, node in list_definitions()
        if isinstance(node, ast.FunctionDef)
        and _PARTICIPLE.fullmatch(node.name.strip("_"))
        and node.name.strip("_") not in _NOT_PARTICIPLES
        and not any(re.search(r"property|contextmanager", ast.unparse(decorator)) for decorator in node.decorator_list)
    ]
    assert found == []
