"""Parse a shell script into a syntax tree. Syntax that is not supported raises ShellSyntaxError; nothing is skipped."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from swarmtrain.importers.shell.syntax import (
    Assignment,
    Branches,
    Chain,
    Function,
    Header,
    Literal,
    Loop,
    Node,
    Pipeline,
    Redirection,
    Sequence,
    ShellSyntaxError,
    SimpleCommand,
    Statement,
    Subshell,
    Word,
)
from swarmtrain.importers.shell.unresolved import has_reserved_characters
from swarmtrain.importers.shell.word_reader import Cursor, read_word

DECLARATIONS = frozenset(("export", "declare", "typeset", "local", "readonly"))
_MAX_DEPTH = 30
_MAX_LENGTH = 1_000_000
_MAX_STATEMENTS = 5_000
_BLANK_PATTERN = re.compile(r"(?:[ \t\r]|\\\n)+")
_COMMENT_PATTERN = re.compile(r"#[^\n]*")
_KEYWORD_PATTERN = re.compile(r"(?:[a-z]+|[!{}]|\[\[)(?=[\s;&|()<>]|$)")
_FUNCTION_PATTERN = re.compile(r"(?:function[ \t]+([\w.:-]+)[ \t]*(?:\([ \t]*\))?|([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\))\s*(?=[{(])")
_ASSIGNMENT_PATTERN = re.compile(r"([A-Za-z_]\w*)(\[[^\]\s]*\])?(\+?=)")
_REDIRECTION_PATTERN = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>&|>>|>\||<|>)|(&>>|&>)")
_CHAIN_PATTERN = re.compile(r"&&|\|\|")
_PIPE_PATTERN = re.compile(r"\|&?(?!\|)")
_SEPARATOR_PATTERN = re.compile(r";(?!;)|&(?![&>])")
_CLAUSE_END_PATTERN = re.compile(r";;&|;;|;&")
_CLOSING_KEYWORDS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}", "in"))


@dataclass
class ShellScript:
    """A parsed script: its syntax tree, and all its statements in source order."""

    body: Sequence
    statements: list[Statement] = field(default_factory=list)


def parse_script(text: str, first_line: int = 1) -> ShellScript:
    """Return the syntax tree of the script `text`, which begins at line `first_line`. Raises ShellSyntaxError if it cannot be read."""
    if len(text) > _MAX_LENGTH:
        raise ShellSyntaxError("is too long", first_line)
    parser = _Parser(Cursor(text, first_line))
    return ShellScript(parser.parse(), parser.statements)


def check_characters(text: str) -> None:
    """Check that no character of `text` is reserved. Raises ShellSyntaxError with the line of the first reserved character."""
    for number, line in enumerate(text.split("\n"), 1):
        if has_reserved_characters(line):
            raise ShellSyntaxError("contains a private-use character of Unicode", number)


class _Parser:
    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._depth = 0
        self._heredocs: list[tuple[str, bool]] = []
        self.statements: list[Statement] = []

    def parse(self) -> Sequence:
        body = self._parse_sequence()
        if self._cursor.position < len(self._cursor.text):
            raise self._cursor.fail(f"{self._cursor.peek()!r} is unexpected here")
        return body

    def _parse_sequence(self) -> Sequence:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._cursor.fail("is nested too deeply")
        sequence = Sequence()
        while not self._is_at_sequence_end():
            sequence.items.append(self._parse_chain())
            self._skip_blanks()
            if not self._cursor.match(_SEPARATOR_PATTERN) and self._cursor.peek() != "\n" and not self._is_at_sequence_end():
                raise self._cursor.fail(f"{self._cursor.peek()!r} is unexpected here")
        self._depth -= 1
        return sequence

    def _is_at_sequence_end(self) -> bool:
        while self._cursor.peek() in ("\n", " ", "\t", "\\", "#") and self._cursor.peek():
            start = self._cursor.position
            self._skip_newlines()
            if self._cursor.position == start:
                return False
        return (
            not self._cursor.peek()
            or self._cursor.peek() == ")"
            or self._cursor.peek(2) in (";;", ";&")
            or self._peek_keyword() in _CLOSING_KEYWORDS
        )

    def _skip_blanks(self) -> None:
        while self._cursor.match(_BLANK_PATTERN) or (self._is_at_word_start() and self._cursor.match(_COMMENT_PATTERN)):
            pass

    def _is_at_word_start(self) -> bool:
        return self._cursor.position == 0 or self._cursor.text[self._cursor.position - 1] in " \t\n;&|()"

    def _skip_newlines(self) -> None:
        self._skip_blanks()
        while self._cursor.peek() == "\n":
            self._cursor.position += 1
            self._read_heredocs()
            self._skip_blanks()

    def _read_heredocs(self) -> None:
        pending, self._heredocs = self._heredocs, []
        for delimiter, strips_tabs in pending:
            while True:
                if self._cursor.position >= len(self._cursor.text):
                    raise self._cursor.fail(f"the here-document is not closed by {delimiter}")
                end = self._cursor.text.find("\n", self._cursor.position)
                end = len(self._cursor.text) if end < 0 else end
                line = self._cursor.text[self._cursor.position : end]
                self._cursor.position = min(end + 1, len(self._cursor.text))
                if (line.lstrip("\t") if strips_tabs else line) == delimiter:
                    break

    def _peek_keyword(self) -> str:
        match = _KEYWORD_PATTERN.match(self._cursor.text, self._cursor.position)
        return match[0] if match else ""

    def _expect_keyword(self, *keywords: str) -> str:
        self._skip_newlines()
        while self._cursor.peek() == ";" and self._cursor.peek(2) != ";;":
            self._cursor.position += 1
            self._skip_newlines()
        keyword = self._peek_keyword()
        if keyword not in keywords:
            raise self._cursor.fail(f"{' or '.join(keywords)} is missing")
        self._cursor.position += len(keyword)
        return keyword

    def _parse_chain(self) -> Node:
        items = [("", self._parse_pipeline())]
        self._skip_blanks()
        while match := self._cursor.match(_CHAIN_PATTERN):
            self._skip_newlines()
            items.append((match[0], self._parse_pipeline()))
            self._skip_blanks()
        return items[0][1] if len(items) == 1 else Chain(items)

    def _parse_pipeline(self) -> Node:
        self._skip_blanks()
        while self._peek_keyword() == "!":
            self._cursor.position += 1
            self._skip_blanks()
        items = [self._parse_command()]
        self._skip_blanks()
        while self._cursor.match(_PIPE_PATTERN):
            self._skip_newlines()
            items.append(self._parse_command())
            self._skip_blanks()
        return items[0] if len(items) == 1 else Pipeline(items)

    def _parse_command(self) -> Node:
        constructs = {
            "if": self._parse_if,
            "for": self._parse_for,
            "select": self._parse_for,
            "while": self._parse_while,
            "until": self._parse_while,
            "case": self._parse_case,
            "{": self._parse_group,
            "[[": self._parse_test,
        }
        keyword = self._peek_keyword()
        if self._cursor.peek(2) == "((":
            return self._parse_arithmetic_command()
        if self._cursor.peek() == "(":
            return self._parse_subshell()
        if match := self._cursor.match(_FUNCTION_PATTERN):
            return self._parse_function(match)
        if keyword not in constructs:
            return self._parse_simple_command()
        node = constructs[keyword]()
        if keyword != "[[":
            self._parse_trailing_redirections()
        return node

    def _parse_trailing_redirections(self) -> None:
        self._skip_blanks()
        while self._parse_redirection():
            self._skip_blanks()

    def _add_header(self, start: int) -> Header:
        source = self._cursor.text[start : self._cursor.position]
        header = Header(self._cursor.get_line(start), source.strip(" \t\n;"))
        self._add_statement(header)
        return header

    def _add_statement(self, statement: Statement) -> None:
        if len(self.statements) >= _MAX_STATEMENTS:
            raise self._cursor.fail("has too many commands")
        self.statements.append(statement)

    def _parse_function(self, match: re.Match[str]) -> Node:
        header = self._add_header(match.start())
        body = self._parse_group() if self._cursor.peek() == "{" else self._parse_subshell()
        self._parse_trailing_redirections()
        return Function(header, match[1] or match[2], body)

    def _parse_group(self) -> Node:
        self._expect_keyword("{")
        body = self._parse_sequence()
        self._expect_keyword("}")
        return body

    def _parse_subshell(self) -> Node:
        self._cursor.position += 1
        body = self._parse_sequence()
        if self._cursor.peek() != ")":
            raise self._cursor.fail(") is missing")
        self._cursor.position += 1
        self._parse_trailing_redirections()
        return Subshell(body)

    def _parse_if(self) -> Node:
        start = self._cursor.position
        self._cursor.position += len("if")
        header = Header(self._cursor.get_line(start), self._get_rest_of_line(start))
        self._add_statement(header)
        alternatives: list[tuple[Sequence | None, Sequence]] = []
        keyword = "elif"
        while keyword == "elif":
            condition = self._parse_sequence()
            self._expect_keyword("then")
            alternatives.append((condition, self._parse_sequence()))
            keyword = self._expect_branch_keyword()
        if keyword == "else":
            alternatives.append((None, self._parse_sequence()))
            self._expect_keyword("fi")
        return Branches(header, alternatives, is_exhaustive=keyword == "else")

    def _expect_branch_keyword(self) -> str:
        keyword = self._expect_keyword("elif", "else", "fi")
        if keyword != "fi":
            self._add_header(self._cursor.position - len(keyword))
        return keyword

    def _get_rest_of_line(self, start: int) -> str:
        return self._cursor.text[start:].partition("\n")[0].strip()

    def _parse_for(self) -> Node:
        start = self._cursor.position
        match = self._cursor.match(re.compile(r"(?:for|select)[ \t]+(?:([A-Za-z_]\w*)|\(\([^\n]*?\)\))"))
        if not match:
            raise self._cursor.fail("the loop cannot be read")
        words: list[Word] | None = None
        self._skip_newlines()
        if self._peek_keyword() == "in":
            self._cursor.position += len("in")
            words = self._read_words()
        header = Header(self._cursor.get_line(start), self._cursor.text[start : self._cursor.position].strip())
        self._add_statement(header)
        body = self._parse_loop_body()
        return Loop(header, body, match[1] or "", None if words is None else tuple(words))

    def _parse_loop_body(self) -> Sequence:
        self._expect_keyword("do")
        body = self._parse_sequence()
        self._expect_keyword("done")
        return body

    def _parse_while(self) -> Node:
        start = self._cursor.position
        self._cursor.position += len("while")
        header = Header(self._cursor.get_line(start), self._get_rest_of_line(start))
        self._add_statement(header)
        condition = self._parse_sequence()
        return Loop(header, self._parse_loop_body(), condition=condition)

    def _parse_case(self) -> Node:
        start = self._cursor.position
        self._cursor.position += len("case")
        self._skip_blanks()
        if read_word(self._cursor) is None:
            raise self._cursor.fail("case has no word")
        self._expect_keyword("in")
        header = self._add_header(start)
        alternatives: list[tuple[Sequence | None, Sequence]] = []
        is_exhaustive = False
        self._skip_newlines()
        while self._peek_keyword() != "esac":
            is_exhaustive |= self._parse_case_patterns()
            alternatives.append((None, self._parse_sequence()))
            self._cursor.match(_CLAUSE_END_PATTERN)
            self._skip_newlines()
        self._expect_keyword("esac")
        return Branches(header, alternatives, is_exhaustive=is_exhaustive)

    def _parse_case_patterns(self) -> bool:
        """Parse the patterns of one clause. Return whether they match every word."""
        start = self._cursor.position
        match = self._cursor.match(re.compile(r"\(?((?:'[^']*'|\"[^\"]*\"|\\.|[^()'\"\\\n])+)\)"))
        if not match:
            raise self._cursor.fail("a pattern of case cannot be read")
        self._add_header(start)
        return "*" in [pattern.strip() for pattern in match[1].split("|")]

    def _parse_test(self) -> Node:
        match = re.compile(r"\[\[\s(?:'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^'\"\\])*?\s\]\](?=[\s;&|()]|$)", re.DOTALL)
        return self._parse_raw_command(match, "[[")

    def _parse_arithmetic_command(self) -> Node:
        return self._parse_raw_command(re.compile(r"\(\(.*?\)\)(?=[\s;&|)]|$)"), "((")

    def _parse_raw_command(self, pattern: re.Pattern[str], name: str) -> Node:
        start = self._cursor.position
        match = self._cursor.match(pattern)
        if not match:
            raise self._cursor.fail(f"{name} cannot be read")
        line = self._cursor.get_line(start)
        words = tuple(Word((Literal(text, True),), text, line) for text in (name, match[0][2:-2]))
        command = SimpleCommand(line, match[0], (), words)
        self._add_statement(command)
        return command

    def _parse_simple_command(self) -> Node:
        start = self._cursor.position
        command = SimpleCommand(self._cursor.get_line(), "")
        self._add_statement(command)
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirections: list[Redirection] = []
        arguments: list[Word | Assignment] = []
        while True:
            self._skip_blanks()
            is_declaration = bool(words) and words[0].literal in DECLARATIONS
            if redirection := self._parse_redirection():
                redirections.append(redirection)
            elif (not words or is_declaration) and (assignment := self._parse_assignment()):
                (arguments if words else assignments).append(assignment)
            elif word := read_word(self._cursor):
                (arguments if is_declaration else words).append(word)
            else:
                break
        if self._cursor.position == start:
            raise self._cursor.fail(f"{self._cursor.peek() or 'the end of the script'!r} is unexpected here")
        command.source = self._cursor.text[start : self._cursor.position].strip()
        command.assignments, command.words = tuple(assignments), tuple(words)
        command.redirections, command.arguments = tuple(redirections), tuple(arguments)
        return command

    def _parse_assignment(self) -> Assignment | None:
        match = self._cursor.match(_ASSIGNMENT_PATTERN)
        if not match:
            return None
        value: Word | tuple[Word, ...] | None
        if self._cursor.peek() == "(":
            self._cursor.position += 1
            value = tuple(self._read_array())
        else:
            value = read_word(self._cursor)
        return Assignment(match[1], value, match[3] == "+=", has_index=bool(match[2]))

    def _read_array(self) -> list[Word]:
        words = []
        self._skip_newlines()
        while self._cursor.peek() != ")":
            word = read_word(self._cursor)
            if word is None:
                raise self._cursor.fail("an array is not closed")
            words.append(word)
            self._skip_newlines()
        self._cursor.position += 1
        return words

    def _read_words(self) -> list[Word]:
        words = []
        self._skip_blanks()
        while word := read_word(self._cursor):
            words.append(word)
            self._skip_blanks()
        return words

    def _parse_redirection(self) -> Redirection | None:
        start = self._cursor.position
        if self._cursor.peek(2) in ("<(", ">("):
            return None
        if self._cursor.peek() == "<" and re.compile(r"<[A-Za-z_][\w./-]*(?: [\w./-]+){0,5}>").match(self._cursor.text, start):
            return None  # a placeholder
        match = self._cursor.match(_REDIRECTION_PATTERN)
        if not match:
            return None
        operator = match[1] or match[2]
        self._skip_blanks()
        target = read_word(self._cursor)
        if target is None:
            raise self._cursor.fail(f"{operator} has no target")
        if operator in ("<<", "<<-"):
            delimiter = "".join(part.text for part in target.parts if isinstance(part, Literal))
            self._heredocs.append((delimiter, operator == "<<-"))
        return Redirection(operator, target, self._cursor.text[start : self._cursor.position])
