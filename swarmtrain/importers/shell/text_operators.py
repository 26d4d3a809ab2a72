"""Operators of parameter expansions that change text, such as ${X%.*} and ${X:0:3}."""

from __future__ import annotations

import re
from fnmatch import translate

_GLOB_CHARACTERS = frozenset("*?[")
_UNSUPPORTED_GLOB_PATTERN = re.compile(r"\[[:.=]|[*?+@!]\(|\\")  # character classes, extglob, escapes


def edit_text(operator: str, text: str, argument: str, *, has_escapes: bool = False) -> str | None:
    """Return the result of the operators # ## % %% ^^ ,, and : on `text`; None if it is not supported.

    `has_escapes`: the argument contains quotes or backslashes, which make characters of a glob pattern literal.
    """
    if operator in ("#", "##", "%", "%%"):
        if _UNSUPPORTED_GLOB_PATTERN.search(argument) or (has_escapes and _GLOB_CHARACTERS & set(argument)):
            return None
        return _strip_pattern(operator, text, argument)
    if operator in ("^^", ",,") and not argument and text.isascii():
        return text.upper() if operator == "^^" else text.lower()
    if operator == ":" and (match := re.fullmatch(r"(\d+)(?::(\d+))?", argument)):
        return text[int(match[1]) :][: int(match[2]) if match[2] else None]
    return None


def _strip_pattern(operator: str, text: str, pattern: str) -> str:
    """Return `text` without the shortest (# %) or longest (## %%) prefix (#) or suffix (%) that matches `pattern`."""
    compiled = re.compile(translate(pattern.replace("[^", "[!")))
    if operator.startswith("#"):
        cuts = range(len(text) + 1) if operator == "#" else range(len(text), -1, -1)
        return next((text[cut:] for cut in cuts if compiled.match(text[:cut])), text)
    cuts = range(len(text), -1, -1) if operator == "%" else range(len(text) + 1)
    return next((text[:cut] for cut in cuts if compiled.match(text[cut:])), text)
