"""Read one word of a shell script: quotes, parameters, substitutions, arithmetic and placeholders."""

from __future__ import annotations

import re
from bisect import bisect_right

from swarmtrain.importers.shell.syntax import (
    ArithmeticExpansion,
    CommandSubstitution,
    Literal,
    ParameterExpansion,
    Part,
    Placeholder,
    ShellSyntaxError,
    Word,
)

_MAX_NESTING = 40
_WORD_END = " \t\n;&|()<>"
_PLAIN_PATTERN = re.compile(r"[\w.:,+-]+")
_PARAMETER_PATTERN = re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$!-])")
_BRACED_PATTERN = re.compile(
    r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]\[{}\s]*|\$\{?\w+\}?)\])?(?=([:}#%/^,@=+?-]))(:[-=?+]|[-=?+]|##?|%%?|//?|\^\^?|,,?|:|@)?"
)
_PLACEHOLDER_PATTERN = re.compile(r"<([A-Za-z_][\w./-]*(?: [\w./-]+){0,5})>")
_QUOTED_PLACEHOLDER_PATTERN = re.compile(r"<([A-Z][A-Z0-9_]{2,}(?:[ -][A-Z0-9_]+){0,5})>")
_ANSI_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "e": "\x1b", "0": "\0"}


class Cursor:
    """Position in the text of a script."""

    def __init__(self, text: str, first_line: int = 1) -> None:
        self.text = text
        self.position = 0
        self._first_line = first_line
        self._line_ends = [index for index, character in enumerate(text) if character == "\n"]

    def get_line(self, position: int | None = None) -> int:
        """Return the line number of `position`; of the current position if it is None."""
        return self._first_line + bisect_right(self._line_ends, (self.position if position is None else position) - 1)

    def peek(self, length: int = 1) -> str:
        """Return the next characters, without moving."""
        return self.text[self.position : self.position + length]

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return the match of `pattern` at the current position, and skip it."""
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def fail(self, message: str) -> ShellSyntaxError:
        """Return the error of a script that cannot be parsed at the current position."""
        return ShellSyntaxError(message, self.get_line(min(self.position, len(self.text))))


def read_word(cursor: Cursor) -> Word | None:
    """Return the word at the cursor; None if there is none. Raises ShellSyntaxError if the word is incomplete."""
    start = cursor.position
    parts = _read_parts(cursor, _WORD_END, is_quoted=False, depth=0)
    if cursor.position == start:
        return None
    return Word(tuple(parts), cursor.text[start : cursor.position], cursor.get_line(start))


def parse_text_as_word(text: str, line: int) -> Word:
    """Return `text` as one double-quoted word, with its parameters and substitutions. Raises ShellSyntaxError if one is incomplete."""
    cursor = Cursor(text, line)
    return Word(tuple(_read_parts(cursor, "", is_quoted=True, depth=0)), text, line)


def _read_parts(cursor: Cursor, end: str, *, is_quoted: bool, depth: int) -> list[Part]:
    if depth > _MAX_NESTING:
        raise cursor.fail("is nested too deeply")
    parts: list[Part] = []
    while cursor.position < len(cursor.text):
        character = cursor.peek()
        if character == "<" and (part := _read_angle_bracket(cursor, is_quoted=is_quoted)):
            parts.append(part)
        elif character in end:
            break
        else:
            parts += _read_part(cursor, character, is_quoted=is_quoted, depth=depth)
    return parts


def _read_part(cursor: Cursor, character: str, *, is_quoted: bool, depth: int) -> list[Part]:
    if character in "\\`":
        return _read_escape(cursor, is_quoted=is_quoted) if character == "\\" else [_read_backticks(cursor, is_quoted=is_quoted)]
    if character == "$":
        return _read_dollar(cursor, is_quoted=is_quoted, depth=depth)
    if character == '"' and not (is_quoted and depth == 0):
        return _read_double_quotes(cursor, depth)
    if character == "'" and not is_quoted:
        return [_read_single_quotes(cursor)]
    if match := cursor.match(_PLAIN_PATTERN):
        return [Literal(match[0], is_quoted)]
    cursor.position += 1
    return [Literal(character, is_quoted)]


def _read_angle_bracket(cursor: Cursor, *, is_quoted: bool) -> Part | None:
    start = cursor.position
    match = cursor.match(_QUOTED_PLACEHOLDER_PATTERN if is_quoted else _PLACEHOLDER_PATTERN)
    if match:
        return Placeholder(match[1] if match[1].isidentifier() else "", match[0], is_quoted)
    if not is_quoted and cursor.peek(2) == "<(":
        cursor.position += 1
        _skip_parentheses(cursor)
        return CommandSubstitution(cursor.text[start : cursor.position], is_quoted)
    return None


def _read_escape(cursor: Cursor, *, is_quoted: bool) -> list[Part]:
    escaped = cursor.text[cursor.position + 1 : cursor.position + 2]
    cursor.position += 1 + len(escaped)  # a backslash may be the last character of the script
    if escaped == "\n":
        return []
    if is_quoted and escaped not in '$`"\\':
        return [Literal(f"\\{escaped}", True)]
    return [Literal(escaped or "\\", True)]


def _read_single_quotes(cursor: Cursor) -> Part:
    end = cursor.text.find("'", cursor.position + 1)
    if end < 0:
        raise cursor.fail("a single quote is not closed")
    text = cursor.text[cursor.position + 1 : end]
    cursor.position = end + 1
    return Literal(text, True)


def _read_double_quotes(cursor: Cursor, depth: int) -> list[Part]:
    start = cursor.position
    cursor.position += 1
    parts = _read_parts(cursor, '"', is_quoted=True, depth=max(depth, 1) + 1)
    if cursor.peek() != '"':
        cursor.position = start
        raise cursor.fail("a double quote is not closed")
    cursor.position += 1
    return parts or [Literal("", True)]


def _read_dollar_quotes(cursor: Cursor, depth: int) -> list[Part]:
    if cursor.peek(2) == "$'":
        return [_read_ansi_quotes(cursor)]
    cursor.position += 1
    return _read_double_quotes(cursor, depth)


def _read_ansi_quotes(cursor: Cursor) -> Part:
    match = cursor.match(re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL))
    if not match:
        raise cursor.fail("a quote $' is not closed")
    escapes = set(re.findall(r"\\(.)", match[1], re.DOTALL)) - _ANSI_ESCAPES.keys()
    if escapes:
        raise cursor.fail(f"the escape \\{min(escapes)} in $'…' is not supported")
    return Literal(re.sub(r"\\(.)", lambda escape: _ANSI_ESCAPES[escape[1]], match[1]), True)


def _read_backticks(cursor: Cursor, *, is_quoted: bool) -> Part:
    match = cursor.match(re.compile(r"`(?:[^`\\]|\\.)*`", re.DOTALL))
    if not match:
        raise cursor.fail("a backtick is not closed")
    return CommandSubstitution(match[0], is_quoted)


def _read_dollar(cursor: Cursor, *, is_quoted: bool, depth: int) -> list[Part]:
    start, following = cursor.position, cursor.text[cursor.position + 1 : cursor.position + 3]
    if following == "((" and (part := _read_arithmetic(cursor, is_quoted=is_quoted)):
        return [part]
    if following[:1] == "(":
        cursor.position += 1
        _skip_parentheses(cursor)
        return [CommandSubstitution(cursor.text[start : cursor.position], is_quoted)]
    if following[:1] == "[":
        raise cursor.fail("arithmetic in $[…] is not supported")
    if following[:1] == "{":
        return [_read_braced_parameter(cursor, is_quoted=is_quoted, depth=depth)]
    if following[:1] in ("'", '"') and not is_quoted:
        return _read_dollar_quotes(cursor, depth)
    if match := cursor.match(_PARAMETER_PATTERN):
        if re.match(r"\\\n\w", cursor.peek(3)):
            raise cursor.fail("a line continues in the name of a variable")
        return [ParameterExpansion(match[1], match[0], is_quoted)]
    if following == "\\\n":
        raise cursor.fail("a line continues between $ and a name")
    cursor.position += 1
    return [Literal("$", is_quoted)]


def _read_arithmetic(cursor: Cursor, *, is_quoted: bool) -> Part | None:
    """Return the arithmetic expansion at the cursor; None if it is a substitution that begins with a subshell."""
    start = cursor.position
    cursor.position += 1
    _skip_parentheses(cursor)
    source = cursor.text[start : cursor.position]
    if not source.endswith("))"):
        cursor.position = start
        return None
    return ArithmeticExpansion(parse_text_as_word(source[3:-2], cursor.get_line(start)), source, is_quoted)


def _read_braced_parameter(cursor: Cursor, *, is_quoted: bool, depth: int) -> Part:
    start = cursor.position
    cursor.position += 2
    match = cursor.match(_BRACED_PATTERN)
    if not match:
        if cursor.peek(2) == "#}":
            cursor.position += 2
            return ParameterExpansion("#", "${#}", is_quoted)
        raise cursor.fail("a parameter expansion ${…} is not supported")
    argument_start = cursor.position
    parts = _read_parts(cursor, "}", is_quoted=is_quoted, depth=depth + 1)
    if cursor.peek() != "}":
        cursor.position = start
        raise cursor.fail("a parameter expansion ${ is not closed")
    argument = Word(tuple(parts), cursor.text[argument_start : cursor.position], cursor.get_line(start))
    cursor.position += 1
    source = cursor.text[start : cursor.position]
    return ParameterExpansion(match[2], source, is_quoted, match[3] or "", match[5] or "", argument, match[1])


def _skip_parentheses(cursor: Cursor) -> None:
    """Skip the parentheses that open at the cursor, with their content."""
    start, depth = cursor.position, 0
    symbol_pattern = re.compile(r"'[^']*'|\\.|[()]|\"|[^()'\"\\]+|.", re.DOTALL)
    in_quotes = False
    while match := cursor.match(symbol_pattern):
        symbol = match[0]
        if in_quotes and len(symbol) > 1 and symbol.startswith("'"):
            cursor.position = match.start() + 1
        elif symbol == '"':
            in_quotes = not in_quotes
        elif symbol == "(":
            depth += 1
        elif symbol == ")":
            depth -= 1
            if depth == 0:
                return
    cursor.position = start
    raise cursor.fail("a parenthesis is not closed")
