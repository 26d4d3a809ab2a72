"""Syntax tree of a shell script: words with their parts, simple commands, and the constructs that contain commands."""

from __future__ import annotations

from dataclasses import dataclass, field


class ShellSyntaxError(ValueError):
    """The script contains syntax that the reader does not support. `line` is 1-based."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Literal:
    """Text; `is_quoted` if it is protected from splitting and patterns."""

    text: str
    is_quoted: bool


@dataclass(frozen=True)
class ParameterExpansion:
    """Parameter expansion, such as $X, ${X:-v}, ${X[@]} or $@."""

    name: str
    source: str
    is_quoted: bool
    index: str = ""
    operator: str = ""
    argument: Word | None = None
    prefix: str = ""
    """`#` for the length, `!` for indirection."""


@dataclass(frozen=True)
class CommandSubstitution:
    """Output of a command: $(…), backticks, or <(…)."""

    source: str
    is_quoted: bool


@dataclass(frozen=True)
class ArithmeticExpansion:
    """Arithmetic expansion $((…))."""

    expression: Word
    source: str
    is_quoted: bool


@dataclass(frozen=True)
class Placeholder:
    """Text in angle brackets that the reader of a page replaces, such as <YOUR_PATH>."""

    name: str
    source: str
    is_quoted: bool


Part = Literal | ParameterExpansion | CommandSubstitution | ArithmeticExpansion | Placeholder


@dataclass(frozen=True)
class Word:
    """A word: its parts, the text in the script, and its line number (1-based)."""

    parts: tuple[Part, ...]
    source: str
    line: int

    @property
    def literal(self) -> str:
        """Text of an unquoted word without expansions; empty for any other word."""
        texts = [part.text for part in self.parts if isinstance(part, Literal) and not part.is_quoted]
        return "".join(texts) if len(texts) == len(self.parts) else ""


@dataclass(frozen=True)
class Assignment:
    """Assignment of a variable: `value` is one word, or the elements of an array."""

    name: str
    value: Word | tuple[Word, ...] | None
    is_append: bool = False
    has_index: bool = False


@dataclass
class Redirection:
    """Redirection; for here-documents, `target` is the delimiter."""

    operator: str
    target: Word
    source: str


@dataclass(eq=False)
class Statement:
    """A simple command, or the header of a construct: everything that has its own row in a migration report."""

    line: int
    source: str


@dataclass(eq=False)
class SimpleCommand(Statement):
    """A simple command with its assignments, words and redirections."""

    assignments: tuple[Assignment, ...] = ()
    words: tuple[Word, ...] = ()
    redirections: tuple[Redirection, ...] = ()
    arguments: tuple[Word | Assignment, ...] = ()
    """Arguments of export, declare and similar commands."""


@dataclass(eq=False)
class Header(Statement):
    """First line of a construct: if, elif, else, for, while, until, case, a pattern of case, a function."""


@dataclass(eq=False)
class CommandList:
    """Commands that run one after the other."""

    items: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class AndOrList:
    """Commands joined by && and ||; the operator stands before its command, and is empty for the first one."""

    items: list[tuple[str, Node]]


@dataclass(eq=False)
class Pipeline:
    """Commands joined by pipes."""

    items: list[Node]


@dataclass(eq=False)
class Negation:
    """Pipeline after `!`, which succeeds if the pipeline fails."""

    body: Node


@dataclass(eq=False)
class Conditional:
    """If or case: alternatives, each with its condition (None for else and case). `is_exhaustive`: one of them always runs."""

    header: Header
    alternatives: list[tuple[CommandList | None, CommandList]]
    is_exhaustive: bool


@dataclass(eq=False)
class Loop:
    """Loop for (with `variable`), while or until (with `condition`)."""

    header: Header
    body: CommandList
    variable: str = ""
    words: tuple[Word, ...] | None = None
    condition: CommandList | None = None
    expression: str = ""
    """Arithmetic of a C-style loop: for ((i=0; i<3; i++))."""


@dataclass(eq=False)
class Function:
    """Definition of a function."""

    header: Header
    name: str
    body: Node


@dataclass(eq=False)
class Subshell:
    """Commands in parentheses."""

    body: CommandList


Node = SimpleCommand | CommandList | AndOrList | Pipeline | Negation | Conditional | Loop | Function | Subshell
