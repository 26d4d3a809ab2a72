"""Operators of parameter expansions that change text, such as ${X%.*} and ${X:0:3}."""

from __future__ import annotations

import re
from fnmatch import translate


def edit_text(operator: str, text: str, argument: str) -> str | None:
    """Return the result of the operators # ## % %% ^^ ,, and : on `text`; None if it is not supported."""
    if operator in ("#", "##", "%", "%%"):
        return _strip_pattern(operator, text, argument)
    if operator in ("^^", ",,") and not argument:
        return text.upper() if operator == "^^" else text.lower()
    if operator == ":" and (match := re.fullmatch(r"(\d+)(?::(\d+))?", argument)):
        return text[int(match[1]) :][: int(match[2]) if match[2] else None]
    return None


def _strip_pattern(operator: str, text: str, pattern: str) -> str:
    """Return `text` without the shortest (# %) or longest (## %%) prefix (#) or suffix (%) that matches `pattern`."""
    compiled = re.compile(translate(pattern))
    if operator.startswith("#"):
        cuts = range(len(text) + 1) if operator == "#" else range(len(text), -1, -1)
        return next((text[cut:] for cut in cuts if compiled.match(text[:cut])), text)
    cuts = range(len(text), -1, -1) if operator == "%" else range(len(text) + 1)
    return next((text[:cut] for cut in cuts if compiled.match(text[cut:])), text)
