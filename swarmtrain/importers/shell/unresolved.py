"""Parts of a shell word whose value is known only when the script runs, kept inside the text of the word."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

_START, _END, _SEPARATOR = "\ue000", "\ue001", "\0"
_SHIFT = 0xF0000  # the supplementary private use area: shifted characters are never syntax of the shell
_MAX_CHARACTER = 0xFFFD
_MARK_PATTERN = re.compile(f"{_START}([^{_END}]*){_END}")
_RESERVED_PATTERN = re.compile("[\ue000\ue001\U000f0000-\U000ffffd]")


@dataclass(frozen=True)
class Unresolved:
    """A part of a word that cannot be resolved at import."""

    name: str
    """Variable whose value resolves the part; empty if there is no such variable."""
    source: str
    """The part as the script contains it, such as `$DATA` or `$(date)`."""
    line: int
    reason: str = ""
    """Why the part is not resolvable, if it is not simply a variable that the script never sets."""
    may_split: bool = field(default=False, compare=False)
    """Whether the part may be any number of words, since it is not quoted."""

    def to_mark(self) -> str:
        """Return the text that stands for this part inside a word."""
        payload = _SEPARATOR.join((self.name, self.source, str(self.line), self.reason, "1" if self.may_split else ""))
        shifted = "".join(chr(_SHIFT + min(ord(character), _MAX_CHARACTER)) for character in payload)
        return f"{_START}{shifted}{_END}"


def find_unresolved(text: str) -> list[Unresolved]:
    """Return the unresolved parts of `text`, in order."""
    return [_decode_mark(match[1]) for match in _MARK_PATTERN.finditer(text)]


def is_resolved(text: str) -> bool:
    """Return whether `text` has no unresolved part."""
    return _START not in text


def is_unknown(text: str) -> bool:
    """Return whether `text` consists of unresolved parts only."""
    return not is_resolved(text) and not _MARK_PATTERN.sub("", text).strip()


def show_text(text: str) -> str:
    """Return `text` with its unresolved parts as the script contains them."""
    return _MARK_PATTERN.sub(lambda match: _decode_mark(match[1]).source, text)


def name_unresolved(text: str, name: str) -> str:
    """Return `text` with `name` as the variable of those unresolved parts that have none, since `name` is assigned `text`."""
    parts = _MARK_PATTERN.split(text)
    for index in range(1, len(parts), 2):
        part = _decode_mark(parts[index])
        parts[index] = (part if part.name else replace(part, name=name, source=f"${name}")).to_mark()
    return "".join(parts)


def mark_splitting(text: str, *, may_split: bool) -> str:
    """Return `text` with unresolved parts that may be any number of words, or that are one word."""
    return _MARK_PATTERN.sub(lambda match: replace(_decode_mark(match[1]), may_split=may_split).to_mark(), text)


def find_splitting(words: Iterable[str]) -> Unresolved | None:
    """Return the first unresolved part of `words` that may be any number of words, so that their count is unknown; None if it is known."""
    return next((part for word in words for part in find_unresolved(word) if part.may_split), None)


def has_reserved_characters(text: str) -> bool:
    """Return whether `text` contains characters that this module uses as marks."""
    return _RESERVED_PATTERN.search(text) is not None


def _decode_mark(shifted: str) -> Unresolved:
    payload = "".join(chr(ord(character) - _SHIFT) for character in shifted)
    name, source, line, reason, may_split = payload.split(_SEPARATOR)
    return Unresolved(name, source, int(line), reason, bool(may_split))
