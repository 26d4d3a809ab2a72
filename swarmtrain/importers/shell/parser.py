"""Parse a shell script into a syntax tree. Syntax that is not supported raises ShellSyntaxError; nothing is skipped."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from swarmtrain.importers.shell.command_reader import CommandReader
from swarmtrain.importers.shell.syntax import (
    AndOrList,
    CommandList,
    Conditional,
    Function,
    Header,
    Literal,
    Loop,
    Negation,
    Node,
    Pipeline,
    ShellSyntaxError,
    SimpleCommand,
    Statement,
    Subshell,
    Word,
)
from swarmtrain.importers.shell.unresolved import has_reserved_characters
from swarmtrain.importers.shell.word_reader import Cursor, read_word

_MAX_DEPTH = 30
_MAX_LENGTH = 1_000_000
_KEYWORD_PATTERN = re.compile(r"(?:[a-z]+|[!{}]|\[\[)(?=[\s;&|()<>]|$)")
_FUNCTION_PATTERN = re.compile(r"(?:function[ \t]+([\w.:-]+)[ \t]*(?:\([ \t]*\))?|([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\))\s*(?=[{(])")
_AND_OR_PATTERN = re.compile(r"&&|\|\|")
_PIPE_PATTERN = re.compile(r"\|&?(?!\|)")
_SEPARATOR_PATTERN = re.compile(r";(?!;)|&(?![&>])")
_CLAUSE_END_PATTERN = re.compile(r";;&|;;|;&")
_CLOSING_KEYWORDS = frozenset(("then", "elif", "else", "fi", "do", "done", "esac", "}", "in"))


@dataclass
class ShellScript:
    """A parsed script: its syntax tree, and all its statements in source order."""

    body: CommandList
    statements: list[Statement] = field(default_factory=list)


def parse_script(text: str, first_line: int = 1) -> ShellScript:
    """Return the syntax tree of the script `text`, which begins at line `first_line`. Raises ShellSyntaxError if it cannot be parsed."""
    if len(text) > _MAX_LENGTH:
        raise ShellSyntaxError("is too long", first_line)
    parser = _Parser(Cursor(text, first_line))
    return ShellScript(parser.parse(), parser.statements)


def check_characters(text: str) -> None:
    """Check that no character of `text` is reserved. Raises ShellSyntaxError with the line of the first reserved character."""
    for number, line in enumerate(text.split("\n"), 1):
        if has_reserved_characters(line):
            raise ShellSyntaxError("contains a private-use character of Unicode", number)


class _Parser(CommandReader):
    def __init__(self, cursor: Cursor) -> None:
        super().__init__(cursor)
        self._depth = 0

    def parse(self) -> CommandList:
        body = self._parse_list()
        if self.cursor.position < len(self.cursor.text):
            raise self.cursor.fail(f"{self.cursor.peek()!r} is unexpected")
        return body

    def _parse_list(self) -> CommandList:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self.cursor.fail("is nested too deeply")
        command_list = CommandList()
        while not self._is_at_list_end():
            command_list.items.append(self._parse_and_or_list())
            self.skip_blanks()
            if not self.cursor.match(_SEPARATOR_PATTERN) and self.cursor.peek() != "\n" and not self._is_at_list_end():
                raise self.cursor.fail(f"{self.cursor.peek()!r} is unexpected")
        self._depth -= 1
        return command_list

    def _is_at_list_end(self) -> bool:
        while self.cursor.peek() in ("\n", " ", "\t", "\\", "#") and self.cursor.peek():
            start = self.cursor.position
            self.skip_newlines()
            if self.cursor.position == start:
                return False
        return (
            not self.cursor.peek()
            or self.cursor.peek() == ")"
            or self.cursor.peek(2) in (";;", ";&")
            or self._peek_keyword() in _CLOSING_KEYWORDS
        )

    def _peek_keyword(self) -> str:
        match = _KEYWORD_PATTERN.match(self.cursor.text, self.cursor.position)
        return match[0] if match else ""

    def _expect_keyword(self, *keywords: str) -> str:
        self.skip_newlines()
        while self.cursor.peek() == ";" and self.cursor.peek(2) != ";;":
            self.cursor.position += 1
            self.skip_newlines()
        keyword = self._peek_keyword()
        if keyword not in keywords:
            raise self.cursor.fail(f"{' or '.join(keywords)} is missing")
        self.cursor.position += len(keyword)
        return keyword

    def _parse_and_or_list(self) -> Node:
        items = [("", self._parse_pipeline())]
        self.skip_blanks()
        while match := self.cursor.match(_AND_OR_PATTERN):
            self.skip_newlines()
            items.append((match[0], self._parse_pipeline()))
            self.skip_blanks()
        return items[0][1] if len(items) == 1 else AndOrList(items)

    def _parse_pipeline(self) -> Node:
        self.skip_blanks()
        is_negated = False
        while self._peek_keyword() == "!":
            is_negated = True
            self.cursor.position += 1
            self.skip_blanks()
        items = [self._parse_command()]
        self.skip_blanks()
        while self.cursor.match(_PIPE_PATTERN):
            self.skip_newlines()
            items.append(self._parse_command())
            self.skip_blanks()
        pipeline = items[0] if len(items) == 1 else Pipeline(items)
        return Negation(pipeline) if is_negated else pipeline

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
        if self.cursor.peek(2) == "((":
            return self._parse_arithmetic_command()
        if self.cursor.peek() == "(":
            return self._parse_subshell()
        if match := self.cursor.match(_FUNCTION_PATTERN):
            return self._parse_function(match)
        if keyword not in constructs:
            return self.read_simple_command()
        node = constructs[keyword]()
        if keyword != "[[":
            self._parse_trailing_redirections()
        return node

    def _parse_trailing_redirections(self) -> None:
        self.skip_blanks()
        while self.read_redirection():
            self.skip_blanks()

    def _add_header(self, start: int) -> Header:
        source = self.cursor.text[start : self.cursor.position]
        header = Header(self.cursor.get_line(start), source.strip(" \t\n;"))
        self.add_statement(header)
        return header

    def _parse_function(self, match: re.Match[str]) -> Node:
        header = self._add_header(match.start())
        body = self._parse_group() if self.cursor.peek() == "{" else self._parse_subshell()
        self._parse_trailing_redirections()
        return Function(header, match[1] or match[2], body)

    def _parse_group(self) -> Node:
        self._expect_keyword("{")
        body = self._parse_list()
        self._expect_keyword("}")
        return body

    def _parse_subshell(self) -> Node:
        self.cursor.position += 1
        body = self._parse_list()
        if self.cursor.peek() != ")":
            raise self.cursor.fail(") is missing")
        self.cursor.position += 1
        self._parse_trailing_redirections()
        return Subshell(body)

    def _parse_if(self) -> Node:
        start = self.cursor.position
        self.cursor.position += len("if")
        header = Header(self.cursor.get_line(start), self._get_rest_of_line(start))
        self.add_statement(header)
        alternatives: list[tuple[CommandList | None, CommandList]] = []
        keyword = "elif"
        while keyword == "elif":
            condition = self._parse_list()
            self._expect_keyword("then")
            alternatives.append((condition, self._parse_list()))
            keyword = self._expect_branch_keyword()
        if keyword == "else":
            alternatives.append((None, self._parse_list()))
            self._expect_keyword("fi")
        return Conditional(header, alternatives, is_exhaustive=keyword == "else")

    def _expect_branch_keyword(self) -> str:
        keyword = self._expect_keyword("elif", "else", "fi")
        if keyword != "fi":
            self._add_header(self.cursor.position - len(keyword))
        return keyword

    def _get_rest_of_line(self, start: int) -> str:
        return self.cursor.text[start:].partition("\n")[0].strip()

    def _parse_for(self) -> Node:
        start = self.cursor.position
        match = self.cursor.match(re.compile(r"(?:for|select)[ \t]+(?:([A-Za-z_]\w*)|\(\(([^\n]*?)\)\))"))
        if not match:
            raise self.cursor.fail("the loop cannot be parsed")
        words: list[Word] | None = None
        self.skip_newlines()
        if self._peek_keyword() == "in":
            self.cursor.position += len("in")
            words = self.read_words()
        header = Header(self.cursor.get_line(start), self.cursor.text[start : self.cursor.position].strip())
        self.add_statement(header)
        body = self._parse_loop_body()
        return Loop(header, body, match[1] or "", None if words is None else tuple(words), expression=match[2] or "")

    def _parse_loop_body(self) -> CommandList:
        self._expect_keyword("do")
        body = self._parse_list()
        self._expect_keyword("done")
        return body

    def _parse_while(self) -> Node:
        start = self.cursor.position
        self.cursor.position += len("while")
        header = Header(self.cursor.get_line(start), self._get_rest_of_line(start))
        self.add_statement(header)
        condition = self._parse_list()
        return Loop(header, self._parse_loop_body(), condition=condition)

    def _parse_case(self) -> Node:
        start = self.cursor.position
        self.cursor.position += len("case")
        self.skip_blanks()
        if read_word(self.cursor) is None:
            raise self.cursor.fail("case has no word")
        self._expect_keyword("in")
        header = self._add_header(start)
        alternatives: list[tuple[CommandList | None, CommandList]] = []
        is_exhaustive = False
        self.skip_newlines()
        while self._peek_keyword() != "esac":
            is_exhaustive |= self._parse_case_patterns()
            alternatives.append((None, self._parse_list()))
            self.cursor.match(_CLAUSE_END_PATTERN)
            self.skip_newlines()
        self._expect_keyword("esac")
        return Conditional(header, alternatives, is_exhaustive=is_exhaustive)

    def _parse_case_patterns(self) -> bool:
        """Parse the patterns of one clause. Return whether they match every word."""
        start = self.cursor.position
        match = self.cursor.match(re.compile(r"\(?((?:'[^']*'|\"[^\"]*\"|\\.|[^()'\"\\\n])+)\)"))
        if not match:
            raise self.cursor.fail("a pattern of case cannot be parsed")
        self._add_header(start)
        return "*" in [pattern.strip() for pattern in match[1].split("|")]

    def _parse_test(self) -> Node:
        match = re.compile(r"\[\[\s(?:'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^'\"\\])*?\s\]\](?=[\s;&|()]|$)", re.DOTALL)
        return self._parse_raw_command(match, "[[")

    def _parse_arithmetic_command(self) -> Node:
        return self._parse_raw_command(re.compile(r"\(\(.*?\)\)(?=[\s;&|)]|$)"), "((")

    def _parse_raw_command(self, pattern: re.Pattern[str], name: str) -> Node:
        start = self.cursor.position
        match = self.cursor.match(pattern)
        if not match:
            raise self.cursor.fail(f"{name} cannot be parsed")
        line = self.cursor.get_line(start)
        words = tuple(Word((Literal(text, True),), text, line) for text in (name, match[0][2:-2]))
        command = SimpleCommand(line, match[0], (), words)
        self.add_statement(command)
        return command
