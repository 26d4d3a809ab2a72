"""Read simple commands of a shell script: assignments, words, redirections and here-documents."""

from __future__ import annotations

import re

from swarmtrain.importers.shell.syntax import Assignment, Literal, Redirection, SimpleCommand, Statement, Word
from swarmtrain.importers.shell.word_reader import Cursor, read_word

DECLARATIONS = frozenset(("export", "declare", "typeset", "local", "readonly"))
_MAX_STATEMENTS = 5_000
_BLANK_PATTERN = re.compile(r"(?:[ \t\r]|\\\n)+")
_COMMENT_PATTERN = re.compile(r"#[^\n]*")
_ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?=)")
_REDIRECTION_PATTERN = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>&|>>|>\||<|>)|(&>>|&>)")


class CommandReader:
    """Reads simple commands at a cursor, and collects the statements of the script in their order."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.statements: list[Statement] = []
        self._heredocs: list[tuple[str, bool]] = []

    def skip_blanks(self) -> None:
        """Skip blanks and a comment."""
        while self.cursor.match(_BLANK_PATTERN) or (self._is_at_word_start() and self.cursor.match(_COMMENT_PATTERN)):
            pass

    def _is_at_word_start(self) -> bool:
        return self.cursor.position == 0 or self.cursor.text[self.cursor.position - 1] in " \t\n;&|()"

    def skip_newlines(self) -> None:
        """Skip blanks, comments, newlines and the here-documents that begin there."""
        self.skip_blanks()
        while self.cursor.peek() == "\n":
            self.cursor.position += 1
            self._read_heredocs()
            self.skip_blanks()

    def _read_heredocs(self) -> None:
        pending, self._heredocs = self._heredocs, []
        for delimiter, strips_tabs in pending:
            while True:
                if self.cursor.position >= len(self.cursor.text):
                    raise self.cursor.fail(f"the here-document is not closed by {delimiter}")
                end = self.cursor.text.find("\n", self.cursor.position)
                end = len(self.cursor.text) if end < 0 else end
                line = self.cursor.text[self.cursor.position : end]
                self.cursor.position = min(end + 1, len(self.cursor.text))
                if (line.lstrip("\t") if strips_tabs else line) == delimiter:
                    break

    def add_statement(self, statement: Statement) -> None:
        """Add a statement to those of the script. Raises ShellSyntaxError if there are too many."""
        if len(self.statements) >= _MAX_STATEMENTS:
            raise self.cursor.fail("has too many commands")
        self.statements.append(statement)

    def read_simple_command(self) -> SimpleCommand:
        """Return the simple command at the cursor. Raises ShellSyntaxError if there is none."""
        start = self.cursor.position
        command = SimpleCommand(self.cursor.get_line(), "")
        self.add_statement(command)
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirections: list[Redirection] = []
        arguments: list[Word | Assignment] = []
        while True:
            self.skip_blanks()
            is_declaration = bool(words) and words[0].literal in DECLARATIONS
            if redirection := self.read_redirection():
                redirections.append(redirection)
            elif (not words or is_declaration) and (assignment := self._parse_assignment()):
                (arguments if words else assignments).append(assignment)
            elif word := read_word(self.cursor):
                (arguments if is_declaration else words).append(word)
            else:
                break
        if self.cursor.position == start:
            raise self.cursor.fail(f"{self.cursor.peek() or 'the end of the script'!r} is unexpected")
        command.source = self.cursor.text[start : self.cursor.position].strip()
        command.assignments, command.words = tuple(assignments), tuple(words)
        command.redirections, command.arguments = tuple(redirections), tuple(arguments)
        return command

    def _parse_assignment(self) -> Assignment | None:
        match = self.cursor.match(_ASSIGNMENT_PATTERN)
        if not match:
            return None
        value: Word | tuple[Word, ...] | None
        if self.cursor.peek() == "(":
            self.cursor.position += 1
            value = tuple(self._read_array())
        else:
            value = read_word(self.cursor)
        return Assignment(match[1], value, match[3] == "+=", has_index=bool(match[2]))

    def _read_array(self) -> list[Word]:
        words = []
        self.skip_newlines()
        while self.cursor.peek() != ")":
            word = read_word(self.cursor)
            if word is None:
                raise self.cursor.fail("an array is not closed")
            words.append(word)
            self.skip_newlines()
        self.cursor.position += 1
        return words

    def read_words(self) -> list[Word]:
        """Return the words at the cursor."""
        words = []
        self.skip_blanks()
        while word := read_word(self.cursor):
            words.append(word)
            self.skip_blanks()
        return words

    def read_redirection(self) -> Redirection | None:
        """Return the redirection at the cursor; None if there is none. Raises ShellSyntaxError if it has no target."""
        start = self.cursor.position
        if self.cursor.peek(2) in ("<(", ">("):
            return None
        if self.cursor.peek() == "<" and re.compile(r"<[A-Za-z_][\w./-]*(?: [\w./-]+){0,5}>").match(self.cursor.text, start):
            return None  # a placeholder
        match = self.cursor.match(_REDIRECTION_PATTERN)
        if not match:
            return None
        operator = match[1] or match[2]
        self.skip_blanks()
        target = read_word(self.cursor)
        if target is None:
            raise self.cursor.fail(f"{operator} has no target")
        if operator in ("<<", "<<-"):
            delimiter = "".join(part.text for part in target.parts if isinstance(part, Literal))
            self._heredocs.append((delimiter, operator == "<<-"))
        return Redirection(operator, target, self.cursor.text[start : self.cursor.position])
