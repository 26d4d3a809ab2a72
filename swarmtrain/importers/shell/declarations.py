"""Assign variables: plain assignments, and export, declare, typeset, local and readonly."""

from __future__ import annotations

from swarmtrain.importers.shell.expansion import expand_text, expand_words
from swarmtrain.importers.shell.scope import Scope, Value
from swarmtrain.importers.shell.syntax import Assignment, ShellSyntaxError, SimpleCommand, Statement, Word
from swarmtrain.importers.shell.unresolved import Unresolved


def assign_variable(assignment: Assignment, scope: Scope, statement: Statement) -> None:
    """Assign the variable in `scope`, unless its value is fixed. Raises ShellSyntaxError if the value is too long."""
    value = _expand_value(assignment, scope, statement)
    if assignment.name in scope.constants:
        if scope.exports_all:
            scope.exported[assignment.name] = statement
        return
    if assignment.has_index:
        scope.make_unresolved(assignment.name, statement.line, "is assigned element by element")
        return
    if assignment.is_append:
        value = _append(scope.get(assignment.name), value, assignment.name, statement)
    scope.assign(assignment.name, value, statement)


def declare_variables(command: SimpleCommand, scope: Scope, statement: Statement) -> None:
    """Apply export, declare, typeset, local or readonly, which is part of `statement`.

    Raises ShellSyntaxError for attributes that change later assignments: -n (reference), -i (integer), -l and -u (case).
    """
    name = command.words[0].literal
    flags = "".join(argument.literal[1:] for argument in command.arguments if isinstance(argument, Word) and argument.literal[:1] == "-")
    if name != "export" and (unsupported := next((flag for flag in flags if flag in "nilu"), "")):
        raise ShellSyntaxError(f"{name} -{unsupported} is not supported", command.line)
    if "f" in flags or "p" in flags:
        return
    is_export = (name == "export" and "n" not in flags) or ("x" in flags and name != "export")
    for argument in command.arguments:
        variable = _declare_variable(argument, scope, command, is_associative="A" in flags)
        if variable and is_export:
            scope.exported[variable] = statement
        elif variable and name == "export":
            scope.exported.pop(variable, None)


def _declare_variable(argument: Word | Assignment, scope: Scope, command: SimpleCommand, *, is_associative: bool) -> str:
    """Apply one argument of a declaration. Return the name of its variable; empty for an option."""
    if isinstance(argument, Assignment):
        assign_variable(argument, scope, command)
        if is_associative and argument.name not in scope.constants:
            scope.make_unresolved(argument.name, command.line, "is an associative array")
        return argument.name
    text = expand_text(argument, scope, command)
    name, equals, value = text.partition("=")
    if equals and name.isidentifier() and name not in scope.constants:
        scope.assign(name, value, command)
    return name if name.isidentifier() else ""


def _expand_value(assignment: Assignment, scope: Scope, statement: Statement) -> Value:
    if isinstance(assignment.value, tuple):
        return tuple(expand_words(assignment.value, scope, statement))
    return expand_text(assignment.value, scope, statement)


def _append(previous: Value | None, value: Value, name: str, statement: Statement) -> Value:
    """Return the value after name+=value."""
    if isinstance(value, tuple):
        elements = previous if isinstance(previous, tuple) else () if previous is None else (previous,)
        return (*elements, *value)
    if isinstance(previous, tuple):
        return (previous[0] + value, *previous[1:]) if previous else (value,)
    if previous is None:
        return Unresolved(name, f"${name}", statement.line).to_mark() + value
    return previous + value
