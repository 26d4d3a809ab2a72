"""Names of the variables that a part of a script may assign."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from swarmtrain.importers.shell.arithmetic import find_arithmetic_names
from swarmtrain.importers.shell.scope import POSITIONAL
from swarmtrain.importers.shell.syntax import (
    AndOrList,
    ArithmeticExpansion,
    Assignment,
    CommandList,
    Conditional,
    Loop,
    Negation,
    Node,
    ParameterExpansion,
    Part,
    Pipeline,
    SimpleCommand,
    Subshell,
    Word,
)

READ_COMMANDS = frozenset(("read", "mapfile", "readarray", "getopts", "unset", "let"))


def find_read_names(command: SimpleCommand) -> set[str]:
    """Return the names that a command such as read, mapfile, unset or printf -v assigns; empty for other commands."""
    words = [word.literal for word in command.words]
    name = words[0] if words else ""
    if name == "((" or (not name and command.words and command.words[0].source == "(("):
        return set()
    if name == "let":
        return find_arithmetic_names(" ".join(word.source for word in command.words[1:]))
    if name == "printf":
        return set(words[2:3]) if words[1:2] == ["-v"] else set()
    if name not in READ_COMMANDS:
        return set()
    defaults = {"read": "REPLY", "mapfile": "MAPFILE", "readarray": "MAPFILE", "getopts": "OPTARG"}
    return {word for word in words[1:] if word.isidentifier()} | {defaults.get(name, "")} - {""}


def collect_assigned_names(node: Node, functions: Mapping[str, Node], visited: frozenset[str] = frozenset()) -> set[str]:
    """Return the names that `node` may assign, including the functions that it calls."""
    names: set[str] = set()
    called: set[str] = set()
    for command in iterate_commands(node):
        names |= {assignment.name for assignment in command.assignments if not command.words}
        names |= {argument.name for argument in command.arguments if isinstance(argument, Assignment)}
        names |= find_read_names(command) | _find_expansion_names(command)
        name = command.words[0].literal if command.words else ""
        names |= {POSITIONAL} if name in ("shift", "set") else set()
        if command.words and command.words[0].source == "((":
            names |= find_arithmetic_names(command.source)
        called |= {name} & functions.keys()
    for name in sorted(called - visited):
        names |= collect_assigned_names(functions[name], functions, visited | called)
    return names


def _find_expansion_names(command: SimpleCommand) -> set[str]:
    """Return the names that expansions such as ${X:=1} and $((X++)) in the words and values of `command` assign."""
    names: set[str] = set()
    assignments = [*command.assignments, *(argument for argument in command.arguments if isinstance(argument, Assignment))]
    values = [assignment.value for assignment in assignments]
    words = [*command.words, *(argument for argument in command.arguments if isinstance(argument, Word))]
    words += [word for value in values for word in (value if isinstance(value, tuple) else (value,)) if word is not None]
    for part in [part for word in words for part in _iterate_parts(word)]:
        if isinstance(part, ArithmeticExpansion):
            names |= find_arithmetic_names(part.source)
        elif isinstance(part, ParameterExpansion) and part.operator in ("=", ":="):
            names.add(part.name)
    return names


def _iterate_parts(word: Word) -> Iterator[Part]:
    for part in word.parts:
        yield part
        if isinstance(part, ParameterExpansion) and part.argument:
            yield from _iterate_parts(part.argument)


def iterate_commands(node: Node) -> Iterator[SimpleCommand]:
    """Yield the simple commands in `node`, but not those of functions that it defines."""
    if isinstance(node, SimpleCommand):
        yield node
        return
    for child in _list_children(node):
        yield from iterate_commands(child)


def _list_children(node: Node) -> list[Node]:
    if isinstance(node, CommandList | Pipeline):
        return list(node.items)
    if isinstance(node, AndOrList):
        return [item for _, item in node.items]
    if isinstance(node, Conditional):
        return [part for alternative in node.alternatives for part in alternative if part is not None]
    if isinstance(node, Loop):
        return [part for part in (node.condition, node.body) if part is not None]
    return [node.body] if isinstance(node, Subshell | Negation) else []


def find_parameter_names(word: Word) -> set[str]:
    """Return the names of the parameters in `word`."""
    return {part.name for part in word.parts if isinstance(part, ParameterExpansion)}
