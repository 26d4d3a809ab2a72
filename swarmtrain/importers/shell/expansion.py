"""Expand words as a shell does: parameters, arithmetic, word splitting. What has no value at import stays marked as unresolved."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Sequence

from swarmtrain.importers.shell.arithmetic import ArithmeticValueError, evaluate_arithmetic, find_arithmetic_names, parse_integer
from swarmtrain.importers.shell.scope import SCRIPT_NAME, Scope, Value
from swarmtrain.importers.shell.syntax import (
    ArithmeticExpansion,
    CommandSubstitution,
    Literal,
    ParameterExpansion,
    Part,
    Placeholder,
    ShellSyntaxError,
    Statement,
    Word,
)
from swarmtrain.importers.shell.text_operators import edit_text
from swarmtrain.importers.shell.unresolved import Unresolved, find_splitting, find_unresolved, is_resolved, mark_splitting

_MAX_FIELDS = 5_000
_MAX_LENGTH = 100_000  # of one word
_BRACES_PATTERN = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
_PATTERN_CHARACTERS = re.compile(r"[*?]|\[[^\]]+\]")
_SCRIPT_FOLDER_PATTERN = re.compile(r"""\$\(\s*dirname\s+(?:--\s+)?"?\$(?:0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(?:\[0\])?\})"?\s*\)""")
_TILDE_PATTERN = re.compile(r"(?:[A-Za-z_]\w*=)?(~)(?=/|$)")


class _Fields:
    """Fields of one word. `masks` has one letter per character: q quoted, l unquoted literal, e unquoted expansion."""

    def __init__(self, line: int) -> None:
        self._line = line
        self.texts: list[str] = []
        self.masks: list[str] = []
        self._is_open = False

    def add(self, text: str, mask: str) -> None:
        if not self._is_open:
            self.texts.append("")
            self.masks.append("")
            self._is_open = True
        if len(self.texts[-1]) + len(text) > _MAX_LENGTH:
            raise ShellSyntaxError("a word is too long once variables are expanded", self._line)
        self.texts[-1] += text
        self.masks[-1] += mask * len(text)

    def close(self) -> None:
        self._is_open = False

    def add_split(self, text: str) -> None:
        """Add the result of an unquoted expansion, which is split at blanks."""
        for piece in re.findall(r"\s+|\S+", text):
            self.close() if piece.isspace() else self.add(mark_splitting(piece, may_split=True), "e")

    def add_values(self, values: Sequence[str], *, is_quoted: bool) -> None:
        for index, value in enumerate(values):
            if index:
                self.close()
            self.add(value, "q") if is_quoted else self.add_split(value)
        if len(self.texts) > _MAX_FIELDS:
            raise ShellSyntaxError("expands to too many words", self._line)


def expand_words(words: Sequence[Word], scope: Scope, statement: Statement) -> list[str]:
    """Return the fields that `words` expand to. Raises ShellSyntaxError if they are too many, or if IFS is set."""
    fields = [field for word in words for field in _expand_word(word, scope, statement)]
    if len(fields) > _MAX_FIELDS:
        raise ShellSyntaxError("expands to too many words", statement.line)
    return fields


def expand_text(word: Word | None, scope: Scope, statement: Statement) -> str:
    """Return the text of `word` without word splitting, as in an assignment."""
    texts: list[str] = []
    for part in word.parts if word else ():
        value = _expand_part(part, scope, statement)
        texts.append(value if isinstance(value, str) else " ".join(value))
    text = mark_splitting("".join(texts), may_split=False)
    if word and re.match(r"~(?:/|$)", word.source):
        return _get_home(scope, statement) + text[1:]
    return text


def render_word(word: Word, scope: Scope, statement: Statement) -> str:
    """Return shell text for `word` in which the variables of known value are replaced by their values."""
    rendered = []
    for part in word.parts:
        value = _expand_part(part, scope, statement)
        text = value if isinstance(value, str) else " ".join(value)
        if isinstance(part, Literal):
            rendered.append(shlex.quote(text) if part.is_quoted and text else text)
        elif is_resolved(text):
            rendered.append(shlex.quote(text))
        else:
            rendered.append(f'"{part.source}"' if part.is_quoted and not isinstance(part, Placeholder) else part.source)
    return "".join(rendered)


def _expand_word(word: Word, scope: Scope, statement: Statement) -> list[str]:
    fields = _Fields(statement.line)
    for part in word.parts:
        value = _expand_part(part, scope, statement)
        if isinstance(part, Literal):
            fields.add(part.text, "q" if part.is_quoted else "l")
        elif isinstance(value, tuple):
            fields.add_values(value, is_quoted=part.is_quoted or _has_quoted_argument(part))
        elif part.is_quoted or _has_quoted_argument(part):
            fields.add(mark_splitting(value, may_split=False), "q")
        else:
            _check_splitting(word, scope, statement)
            fields.add_split(value)
    if match := _TILDE_PATTERN.match(word.source.replace("\\\n", "")):
        home = _get_home(scope, statement)
        fields.texts[0] = fields.texts[0][: match.start(1)] + home + fields.texts[0][match.end(1) :]
        fields.masks[0] = fields.masks[0][: match.start(1)] + "q" * len(home) + fields.masks[0][match.end(1) :]
    return [_finish_field(text, mask, statement) for text, mask in zip(fields.texts, fields.masks, strict=True)]


def _check_splitting(word: Word, scope: Scope, statement: Statement) -> None:
    if Literal("$", False) in word.parts:
        raise ShellSyntaxError("contains a $ without a name", statement.line)
    if scope.get("IFS") is not None:
        raise ShellSyntaxError("splits words at IFS, which the script changes", statement.line)


def _has_quoted_argument(part: Part) -> bool:
    """Return whether all of the argument of an expansion is quoted, as in ${X:+"$X"}, so that it is not split."""
    parts = part.argument.parts if isinstance(part, ParameterExpansion) and part.argument else ()
    return bool(parts) and all(inner.is_quoted for inner in parts)


def _finish_field(text: str, mask: str, statement: Statement) -> str:
    """Return the field `text`; braces and glob patterns are marked as unresolved."""
    literal = "".join(character if kind == "l" else "x" for character, kind in zip(text, mask, strict=True))
    unquoted = "".join(character if kind != "q" else "x" for character, kind in zip(text, mask, strict=True))
    if _BRACES_PATTERN.search(literal):
        return Unresolved("", text, statement.line, "expands to several words: write them out", may_split=True).to_mark()
    is_option = text.startswith("-") or "=" in text
    if _PATTERN_CHARACTERS.search(unquoted) and not is_option and (set(unquoted) & set("*?")):
        return Unresolved("", text, statement.line, "is a glob pattern: quote it, or write the names", may_split=True).to_mark()
    return text


def _get_home(scope: Scope, statement: Statement) -> str:
    home = scope.get("HOME")
    return home if isinstance(home, str) else Unresolved("HOME", "~", statement.line).to_mark()


def _expand_part(part: Part, scope: Scope, statement: Statement) -> Value:
    if isinstance(part, Literal):
        return part.text
    if isinstance(part, CommandSubstitution) and _SCRIPT_FOLDER_PATTERN.fullmatch(part.source):
        return _expand_script_folder(part, scope, statement)
    if isinstance(part, CommandSubstitution):
        return Unresolved("", part.source, statement.line, "is the output of a command").to_mark()
    if isinstance(part, Placeholder):
        value = scope.constants.get(part.name)
        return Unresolved(part.name, part.source, statement.line, "is a placeholder").to_mark() if value is None else value
    if isinstance(part, ArithmeticExpansion):
        return _expand_arithmetic(part, scope, statement)
    return _expand_parameter(part, scope, statement)


def _expand_script_folder(part: CommandSubstitution, scope: Scope, statement: Statement) -> str:
    """Return the folder of the script, $(dirname "$0"), which is known if the name of the script is."""
    name = scope.get(SCRIPT_NAME)
    if isinstance(name, str):
        return posixpath.dirname(name) or "."
    return Unresolved(SCRIPT_NAME, part.source, statement.line, "is the folder of the script").to_mark()


def _expand_arithmetic(part: ArithmeticExpansion, scope: Scope, statement: Statement) -> str:
    expression = expand_text(part.expression, scope, statement)

    def get_variable(name: str) -> int:
        value = scope.look_up(name)
        if not isinstance(value, str):
            raise ArithmeticValueError(name)
        if unresolved := find_unresolved(value):
            raise ArithmeticValueError(unresolved[0].name)
        return parse_integer(value)

    if assigned := find_arithmetic_names(expression):
        for name in assigned:
            scope.make_unresolved(name, statement.line, f"is computed in line {statement.line}")
        return Unresolved("", part.source, statement.line, "changes a variable").to_mark()
    if unresolved := find_unresolved(expression):
        return Unresolved(unresolved[0].name, part.source, statement.line).to_mark()
    try:
        return str(evaluate_arithmetic(expression, get_variable))
    except ArithmeticValueError as error:
        return Unresolved(error.name, part.source, statement.line, "" if error.name else "cannot be computed").to_mark()


def _expand_parameter(part: ParameterExpansion, scope: Scope, statement: Statement) -> Value:
    value = _look_up(part, scope, statement)
    if part.prefix == "#":
        return _get_length(part, value, statement)
    if part.operator.lstrip(":") in ("-", "=", "+", "?") and part.operator:
        return _apply_default(part, value, scope, statement)
    if value is None:
        return Unresolved(part.name, part.source, statement.line).to_mark()
    if part.operator:
        value = _apply_text_operator(part, value, scope, statement)
    is_joined = part.is_quoted and "*" in (part.name, part.index)
    return " ".join(value) if is_joined and isinstance(value, tuple) else value


def _look_up(part: ParameterExpansion, scope: Scope, statement: Statement) -> Value | None:
    """Return the value of the parameter, before its operator; None if it is not set."""
    if part.prefix == "!":
        return Unresolved("", part.source, statement.line, "is an indirect expansion").to_mark()
    if part.name in ("@", "*"):
        return _look_up_all_arguments(part, scope)
    if part.name == "#":
        splitting = find_splitting(scope.get_positional())
        return _build_unknown_count(part, splitting, statement) if splitting else str(len(scope.get_positional()))
    if part.name.isdigit() and part.name != "0":
        return _look_up_argument(part, scope, statement)
    if not part.name.isidentifier() and scope.get(part.name) is None:
        name = "0" if part.name == "0" else ""
        return Unresolved(name, part.source, statement.line, "is known only when the script runs").to_mark()
    return _select_element(part, scope.look_up(part.name), scope, statement)


def _build_unknown_count(part: ParameterExpansion, splitting: Unresolved, statement: Statement) -> str:
    reason = f"depends on the number of words in {splitting.source}"
    return Unresolved(splitting.name, part.source, statement.line, reason).to_mark()


def _look_up_argument(part: ParameterExpansion, scope: Scope, statement: Statement) -> Value | None:
    positional = scope.get_positional()
    if splitting := find_splitting(positional[: int(part.name) - 1]):
        return _build_unknown_count(part, splitting, statement)
    if int(part.name) <= len(positional):
        return positional[int(part.name) - 1]
    if part.name in scope.constants and not scope.has_positional():
        return scope.constants[part.name]
    return "" if scope.has_positional() and part.operator == "" else None


def _look_up_all_arguments(part: ParameterExpansion, scope: Scope) -> Value:
    arguments = scope.get_positional()
    if not arguments and not scope.has_positional():
        note = "the script passes its own arguments ($@) to a command: write them into runner.script_args"
        scope.notes.append(note) if note not in scope.notes else None
    return arguments


def _select_element(part: ParameterExpansion, value: Value | None, scope: Scope, statement: Statement) -> Value | None:
    if value is None:
        return None
    elements = value if isinstance(value, tuple) else (value,)
    if part.index in ("@", "*"):
        return elements
    if not part.index:
        return elements[0] if elements else ""
    name = part.index.strip("${}")
    index_value = name if name.isdigit() else scope.look_up(name)
    if isinstance(index_value, str) and index_value.isdigit() and all(is_resolved(element) for element in elements):
        return elements[int(index_value)] if int(index_value) < len(elements) else ""
    unresolved = find_unresolved(index_value) if isinstance(index_value, str) else []
    return Unresolved(unresolved[0].name if unresolved else name, part.source, statement.line).to_mark()


def _get_length(part: ParameterExpansion, value: Value | None, statement: Statement) -> str:
    if value is None or (isinstance(value, str) and not is_resolved(value)):
        return Unresolved(part.name, part.source, statement.line).to_mark()
    if isinstance(value, tuple) and (splitting := find_splitting(value)):
        return _build_unknown_count(part, splitting, statement)
    return str(len(value))


def _apply_default(part: ParameterExpansion, value: Value | None, scope: Scope, statement: Statement) -> Value:
    """Apply the operators -, =, + and ?, with or without a colon."""
    kind, text = part.operator[-1], "".join(value) if isinstance(value, tuple) else value
    if text is None and (scope.is_environment_variable(part.name) or (scope.sourced_line and part.name.isidentifier())):
        reason = f"may be set by what line {scope.sourced_line} reads" if scope.sourced_line else ""
        return Unresolved(part.name, part.source, statement.line, reason).to_mark()
    if value is not None and text is not None and not is_resolved(text):
        return Unresolved(find_unresolved(text)[0].name, part.source, statement.line).to_mark() if kind == "+" else value
    is_set = text is not None and not (text == "" and part.operator.startswith(":")) and value != ()
    if kind == "+":
        return _expand_alternative(part, scope, statement) if is_set else ()
    if is_set and value is not None:
        return " ".join(value) if part.is_quoted and "*" in (part.name, part.index) and isinstance(value, tuple) else value
    if kind == "?":
        return Unresolved(part.name, part.source, statement.line).to_mark()
    default = expand_text(part.argument, scope, statement)
    _note_default(part, scope, statement, text)
    if kind == "=" and part.name not in scope.constants:
        scope.assign(part.name, default, statement)
    return default


def _expand_alternative(part: ParameterExpansion, scope: Scope, statement: Statement) -> Value:
    """Return the value of ${X+word}. If the word is one array, as in ${X+"${X[@]}"}, its elements stay separate."""
    parts = part.argument.parts if part.argument else ()
    return _expand_part(parts[0], scope, statement) if len(parts) == 1 else expand_text(part.argument, scope, statement)


def _note_default(part: ParameterExpansion, scope: Scope, statement: Statement, text: str | None) -> None:
    if text is not None or (scope.has_positional() and part.name.isdigit()):
        return
    note = f"line {statement.line}: {part.name} is not set in the script, so its default applies: {part.source}"
    if note not in scope.notes and part.name.replace("@", "").replace("*", ""):
        scope.notes.append(note)


def _apply_text_operator(part: ParameterExpansion, value: Value, scope: Scope, statement: Statement) -> Value:
    """Apply the operators # ## % %% / // ^ , and slices; the result of others is unresolved."""
    if isinstance(value, tuple):
        return _slice_elements(part, value, statement)
    argument = expand_text(part.argument, scope, statement)
    unresolved = [*find_unresolved(value), *find_unresolved(argument)]
    if part.operator in ("/", "//"):
        result = None if unresolved else _replace_text(part, value, scope, statement)
    else:
        has_escapes = part.argument is not None and bool(set(part.argument.source) & set("'\"\\"))
        result = None if unresolved else edit_text(part.operator, value, argument, has_escapes=has_escapes)
    if result is not None:
        return result
    name = unresolved[0].name if unresolved else ""
    return Unresolved(name, part.source, statement.line, "" if unresolved else "is an unsupported expansion").to_mark()


def _slice_elements(part: ParameterExpansion, elements: tuple[str, ...], statement: Statement) -> Value:
    match = re.fullmatch(r"\s*(\d+)(?::(\d+))?", part.argument.source) if part.argument and part.operator == ":" else None
    if not match:
        return Unresolved("", part.source, statement.line, "is an unsupported expansion").to_mark()
    if splitting := find_splitting(elements):
        return _build_unknown_count(part, splitting, statement)
    start = int(match[1]) - (1 if part.name in ("@", "*") else 0)
    if start < 0:
        return Unresolved("", part.source, statement.line, "is an unsupported expansion").to_mark()  # ${@:0} begins with $0
    return elements[start:][: int(match[2]) if match[2] else None]


def _replace_text(part: ParameterExpansion, text: str, scope: Scope, statement: Statement) -> str | None:
    """Return the result of ${X/old/new} or ${X//old/new}; None if `old` is a pattern."""
    parts = part.argument.parts if part.argument else ()
    slash = next((index for index, inner in enumerate(parts) if inner == Literal("/", part.is_quoted)), len(parts))
    old, new = (expand_text(Word(half, "", statement.line), scope, statement) for half in (parts[:slash], parts[slash + 1 :]))
    if not old or set(old) & set("*?[#%\\") or "&" in new:
        return None
    return text.replace(old, new) if part.operator == "//" else text.replace(old, new, 1)
