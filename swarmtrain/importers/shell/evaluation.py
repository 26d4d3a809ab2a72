"""Follow a shell script in the order of its execution, without running it: which commands it starts, with which words and variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from swarmtrain.importers.shell.arithmetic import find_arithmetic_names
from swarmtrain.importers.shell.assigned_names import collect_assigned_names, find_read_names, iterate_commands
from swarmtrain.importers.shell.builtin_commands import (
    always_succeeds,
    apply_set,
    change_folder,
    find_local_names,
    is_environment_file,
    shift_arguments,
)
from swarmtrain.importers.shell.command_reader import DECLARATIONS
from swarmtrain.importers.shell.declarations import assign_variable, declare_variables
from swarmtrain.importers.shell.expansion import expand_text, expand_words
from swarmtrain.importers.shell.parser import parse_script
from swarmtrain.importers.shell.scope import POSITIONAL, Scope, Value
from swarmtrain.importers.shell.syntax import (
    AndOrList,
    Assignment,
    CommandList,
    Conditional,
    Function,
    Loop,
    Negation,
    Node,
    Pipeline,
    ShellSyntaxError,
    SimpleCommand,
    Statement,
    Subshell,
)
from swarmtrain.importers.shell.unresolved import is_resolved

_MAX_CALL_DEPTH = 25
_MAX_DEPTH = 60
_MAX_COMMANDS = 5_000
# Programs whose output, evaluated by eval, prepares the environment.
_ENVIRONMENT_PROGRAM_PATTERN = re.compile(r"\b(?:conda|mamba|micromamba|pyenv|spack|module|modulecmd|ssh-agent|direnv|brew)\b")
_ARGUMENT_LOOP_PATTERN = re.compile(r"\$#|\bgetopts\b|\$\{?1\b")


@dataclass(frozen=True)
class EvaluatedCommand:
    """A simple command that the script starts: its words and variables after expansion.

    `scope` is a copy of the script's variables at this point.
    """

    statement: Statement
    """The statement of the script that contains the command."""
    command: SimpleCommand
    argv: tuple[str, ...]
    variables: Mapping[str, str]
    """Variables set for this command only."""
    scope: Scope
    constructs: tuple[Statement, ...] = ()
    """Headers of the if, case and loops that contain the command."""
    unreached: str = ""
    """Why the command never runs; empty if it may run."""
    loop_variables: tuple[str, ...] = ()
    assigned: Mapping[str, Value] = field(default_factory=dict)
    """Variables that the command assigns, with their new values."""
    index: int = 0
    """Index of the command in the order of execution, to which `Scope.exclusive` refers."""

    @property
    def line(self) -> int:
        """Line number of the command (1-based)."""
        return self.statement.line


@dataclass
class ScriptEvaluator:
    """Evaluator of one script. `commands` are the evaluated commands, in the order of execution."""

    commands: list[EvaluatedCommand] = field(default_factory=list)
    skipped: list[tuple[Statement, str]] = field(default_factory=list)
    """Statements that were not evaluated, each with the reason."""
    _functions: list[Function] = field(default_factory=list)
    _called: set[int] = field(default_factory=set)
    """Ids of the bodies of the functions that the script calls."""
    _returned: list[Scope] = field(default_factory=list)
    """Variables at each `return` of the function that is running."""
    _failed: list[Scope] = field(default_factory=list)
    """The same for each `return` of a failure, such as `return 1`."""
    _exited: set[tuple[int, int]] = field(default_factory=set)
    """Ranges of commands that end the script."""
    _constructs: tuple[Statement, ...] = ()
    _loop_variables: tuple[str, ...] = ()
    _origin: Statement | None = None
    _unreached: str = ""
    _depth: int = 0

    def run(self, body: CommandList, scope: Scope) -> None:
        """Evaluate the script `body` in `scope`. Raises ShellSyntaxError if it is too complex."""
        self._run(body, scope)
        for function in list(self._functions):
            if id(function.body) not in self._called:
                with self._set(_unreached=f"the function {function.name} is never called"):
                    self._run(function.body, scope.copy())

    def is_function(self, name: str) -> bool:
        """Return whether the script defines a function `name`."""
        return any(function.name == name for function in self._functions)

    def is_called(self, name: str) -> bool:
        """Return whether the script calls its function `name`."""
        return any(function.name == name and id(function.body) in self._called for function in self._functions)

    def evaluate_text(self, text: str, scope: Scope, outer: EvaluatedCommand) -> list[EvaluatedCommand]:
        """Return the commands of the script `text`, which the command `outer` passes to a new shell. Raises ShellSyntaxError."""
        first = len(self.commands)
        with self._set(_constructs=outer.constructs, _loop_variables=outer.loop_variables, _unreached=outer.unreached):
            self._run_text(text, scope, outer.statement)
        commands = self.commands[first:]
        del self.commands[first:]
        return commands

    @contextmanager
    def _set(self, **values: Any) -> Any:
        before = {name: getattr(self, name) for name in values}
        if self._depth >= _MAX_DEPTH:
            raise ShellSyntaxError("is nested too deeply", self._origin.line if self._origin else 1)
        self._depth += 1
        for name, value in values.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            self._depth -= 1
            for name, value in before.items():
                setattr(self, name, value)

    def _run_text(self, text: str, scope: Scope, statement: Statement) -> None:
        script = parse_script(text, statement.line)
        with self._set(_origin=self._origin or statement):
            self._run(script.body, scope)

    def _run(self, node: Node, scope: Scope) -> None:
        runners: dict[type, Callable[[Any, Scope], None]] = {
            SimpleCommand: self._run_command,
            CommandList: self._run_list,
            AndOrList: self._run_and_or_list,
            Pipeline: self._run_pipeline,
            Negation: self._run_negation,
            Conditional: self._run_conditional,
            Loop: self._run_loop,
            Function: self._define_function,
            Subshell: self._run_subshell,
        }
        runners[type(node)](node, scope)

    def _run_list(self, command_list: CommandList, scope: Scope) -> None:
        for item in command_list.items:
            if scope.has_ended and not self._unreached:
                with self._set(_unreached="the script ends before it"):
                    self._run(item, scope.copy())
            else:
                self._run(item, scope)

    def _run_and_or_list(self, and_or_list: AndOrList, scope: Scope) -> None:
        """Run the items of an AND-OR list. What follows && may be skipped, so it is a branch, unless the item before it always succeeds."""
        previous, branch = and_or_list.items[0][1], scope
        self._run(previous, scope)
        first = len(self.commands)  # of those that && runs
        for operator, item in and_or_list.items[1:]:
            line = next((command.line for command in iterate_commands(item)), 0)
            if operator == "||" and branch is not scope:
                self._merge(scope, [(scope.copy(), None), (branch, (first, len(self.commands)))], line)
                branch = scope
            if branch is scope and (operator == "||" or not always_succeeds(previous)):
                branch = scope.copy()
            if operator == "||":
                branch.exclusive |= {(first, len(self.commands))}
                first = len(self.commands)
            condition = next(iterate_commands(and_or_list.items[0][1]), None)
            constructs = (condition,) if condition is not None and branch is not scope else ()
            with self._set(_constructs=(*self._constructs, *constructs)):
                self._run(item, branch)
            if operator == "||":
                self._merge(scope, [(scope.copy(), None), (branch, (first, len(self.commands)))], line)
                branch, first = scope, len(self.commands)
            previous = item
        if branch is not scope:
            self._merge(scope, [(scope.copy(), None), (branch, (first, len(self.commands)))], line)

    def _merge(self, scope: Scope, outcomes: list[tuple[Scope, tuple[int, int] | None]], line: int) -> None:
        """Continue `scope` with the outcomes of branches, each with the range of its commands.

        The commands of a branch exclude those that follow only if the branch ends the script.
        """
        self._exited |= {commands for outcome, commands in outcomes if outcome.has_exited and commands is not None}
        siblings = {commands for _, commands in outcomes if commands is not None} - scope.exclusive
        ended = {commands for outcome, commands in outcomes if outcome.has_ended and commands is not None}
        inside = {commands for outcome, _ in outcomes if not outcome.has_ended for commands in outcome.exclusive}
        before = scope.exclusive
        scope.merge([outcome for outcome, _ in outcomes], line)
        scope.exclusive = before | (inside - siblings) | ended

    def _run_pipeline(self, pipeline: Pipeline, scope: Scope) -> None:
        with self._set(_returned=[], _failed=[]):
            for item in pipeline.items:
                self._run(item, scope.copy())

    def _run_subshell(self, subshell: Subshell, scope: Scope) -> None:
        with self._set(_returned=[], _failed=[]):
            self._run(subshell.body, scope.copy())

    def _run_negation(self, negation: Negation, scope: Scope) -> None:
        self._run(negation.body, scope)

    def _run_conditional(self, conditional: Conditional, scope: Scope) -> None:
        outcomes: list[tuple[Scope, tuple[int, int] | None]] = []
        siblings: frozenset[tuple[int, int]] = frozenset()
        with self._set(_constructs=(*self._constructs, conditional.header)):
            for condition, body in conditional.alternatives:
                if condition is not None:
                    self._run(condition, scope)
                branch, first = scope.copy(), len(self.commands)
                branch.exclusive |= siblings
                self._run(body, branch)
                siblings |= {(first, len(self.commands))}
                outcomes.append((branch, (first, len(self.commands))))
        if not conditional.is_exhaustive:
            outcomes.append((scope.copy(), None))
        self._merge(scope, outcomes, conditional.header.line)

    def _run_loop(self, loop: Loop, scope: Scope) -> None:
        values = expand_words(loop.words, scope, loop.header) if loop.words is not None else list(scope.get_positional())
        counters = find_arithmetic_names(loop.expression)
        iterates_arguments = bool(_ARGUMENT_LOOP_PATTERN.search(loop.header.source)) and loop.condition is not None
        is_empty = (not values and loop.condition is None and bool(loop.variable)) or (iterates_arguments and not scope.get_positional())
        if is_empty:
            self._skip(loop, "the loop has nothing to iterate over: the script was imported without arguments")
            return
        line, before = loop.header.line, scope.copy()
        branch = scope.copy()
        bodies = [loop.body, *([loop.condition] if loop.condition else [])]
        names = {name for body in bodies for name in collect_assigned_names(body, scope.functions)}
        for name in names | counters | {loop.variable} - {""}:
            branch.make_unresolved(name, line, f"changes in the loop of line {line}")
        is_single = len(values) == 1 and is_resolved(values[0])
        if loop.variable and is_single:
            branch.variables[loop.variable] = values[0]
        variables = (*self._loop_variables, *([loop.variable] if loop.variable and not is_single else []), *sorted(counters))
        first = len(self.commands)
        with self._set(_constructs=(*self._constructs, loop.header), _loop_variables=variables):
            if loop.condition is not None:
                self._run(loop.condition, branch)
            self._run(loop.body, branch)
        branch.has_ended = branch.has_exited = False
        self._merge(scope, [(before, None), (branch, (first, len(self.commands)))], line)

    def _skip(self, loop: Loop, reason: str) -> None:
        self.skipped.append((loop.header, reason))
        self.skipped += [(command, reason) for command in iterate_commands(loop.body)]
        self.skipped += [(command, reason) for command in iterate_commands(loop.condition)] if loop.condition else []

    def _define_function(self, function: Function, scope: Scope) -> None:
        self._functions.append(function)
        scope.functions = {**scope.functions, function.name: function.body}

    def _run_command(self, command: SimpleCommand, scope: Scope) -> None:
        if len(self.commands) > _MAX_COMMANDS:
            raise ShellSyntaxError("starts too many commands", command.line)
        name = command.words[0].literal if command.words else ""
        if not command.words:
            self._record(command, (), {}, scope)
            for assignment in command.assignments:
                assign_variable(assignment, scope, self._origin or command)
            self._record_assigned([assignment.name for assignment in command.assignments], scope)
            return
        variables = {assignment.name: self._expand_variable(assignment.value, scope, command) for assignment in command.assignments}
        argv = tuple(expand_words(command.words, scope, command))
        self._record(command, argv, variables, scope)
        if name in DECLARATIONS:
            declare_variables(command, scope, self._origin or command)
            self._record_assigned([argument.name for argument in command.arguments if isinstance(argument, Assignment)], scope)
        for variable in find_read_names(command):
            scope.make_unresolved(variable, command.line, "is read when the script runs")
        if command.words[0].source == "((":
            for variable in find_arithmetic_names(command.source):
                scope.make_unresolved(variable, command.line, "is computed when the script runs")
        self._apply_builtin(argv, command, variables, scope)

    def _expand_variable(self, value: Any, scope: Scope, command: SimpleCommand) -> str:
        if isinstance(value, tuple):
            return " ".join(expand_words(value, scope, command))
        return expand_text(value, scope, command)

    def _record(self, command: SimpleCommand, argv: tuple[str, ...], variables: Mapping[str, str], scope: Scope) -> None:
        statement = self._origin or command
        self.commands.append(
            EvaluatedCommand(
                statement,
                command,
                argv,
                variables,
                scope.copy(),
                self._constructs,
                self._unreached,
                self._loop_variables,
                index=len(self.commands),
            )
        )

    def _record_assigned(self, names: list[str], scope: Scope) -> None:
        values = {name: value for name in names if (value := scope.get(name)) is not None}
        self.commands[-1] = replace(self.commands[-1], assigned=values)

    def _apply_builtin(self, argv: tuple[str, ...], command: SimpleCommand, variables: Mapping[str, str], scope: Scope) -> None:
        name, arguments = (argv[0], argv[1:]) if argv else ("", ())
        if name in scope.functions:
            with self._set_variables(variables, command, scope):
                self._call_function(name, arguments, command, scope)
        elif name in ("cd", "pushd", "popd"):
            scope.folder = change_folder(scope, name, arguments, command)
        elif name in ("exit", "return", "exec") and (name != "exec" or arguments):
            if name == "return" and not self._unreached:
                (self._failed if arguments and arguments[0].lstrip("0").isdigit() else self._returned).append(scope.copy())
            scope.has_ended, scope.has_exited = True, name != "return"
        elif name == "set":
            apply_set(arguments, scope)
        elif name in ("source", ".") and arguments and not is_environment_file(arguments[0]):
            scope.add_sourced_file(command.line)
        elif name == "shift":
            shift_arguments(arguments, scope, command.line)
        elif name == "unset" and arguments[:1] == ("-f",):
            scope.functions = {function: body for function, body in scope.functions.items() if function not in arguments}
        elif (
            name == "eval" and not is_resolved(" ".join(arguments).strip()[:1]) and not _ENVIRONMENT_PROGRAM_PATTERN.search(command.source)
        ):
            scope.add_sourced_file(command.line)
        elif name == "eval" and arguments and is_resolved(" ".join(arguments).strip()[:1]):
            self.commands.pop()
            with self._set_variables(variables, command, scope):
                self._run_text(" ".join(arguments), scope, self._origin or command)

    @contextmanager
    def _set_variables(self, variables: Mapping[str, str], command: SimpleCommand, scope: Scope) -> Any:
        """Set and export the variables before a command, such as LR=1 in `LR=1 train`, while the command runs."""
        names = [name for name in variables if name not in scope.constants]
        values = {name: scope.variables.get(name) for name in names}
        exported = {name: scope.exported[name] for name in names if name in scope.exported}
        for name in names:
            scope.exported[name] = self._origin or command
            scope.assign(name, variables[name], self._origin or command)
        yield
        for name, value in values.items():
            scope.variables.pop(name, None)
            scope.exported.pop(name, None)
            if value is not None:
                scope.variables[name] = value
        scope.exported |= exported

    def _call_function(self, name: str, arguments: tuple[str, ...], command: SimpleCommand, scope: Scope) -> None:
        body, first, caller = scope.functions[name], len(self.commands), scope.copy()
        self._mark_called(body)
        if self._depth > _MAX_CALL_DEPTH:
            raise ShellSyntaxError("functions call each other too deeply", command.line)
        local_names = find_local_names(body)
        before = {variable: scope.variables.get(variable) for variable in (*local_names, POSITIONAL)}
        knew_positional, scope.knows_positional = scope.knows_positional, True
        scope.variables[POSITIONAL] = arguments
        with self._set(_returned=[], _failed=[]):
            self._run(body, scope)
            self._merge_returns(scope, caller, (first, len(self.commands)), command.line)
        scope.knows_positional = knew_positional
        for variable, value in before.items():
            scope.variables.pop(variable, None)
            if value is not None:
                scope.variables[variable] = value

    def _merge_returns(self, scope: Scope, before: Scope, commands: tuple[int, int], line: int) -> None:
        """Continue after a function with the variables at each return. If it exits, only a return of success continues the script."""
        returned = self._returned if scope.has_exited else [*self._returned, *self._failed]
        if scope.has_exited and not returned:
            return
        end = scope.copy()
        self._merge(scope, [(end, commands if end.has_exited else None), *((outcome, None) for outcome in returned)], line)
        scope.has_ended = scope.has_exited = False
        scope.exclusive = before.exclusive | (scope.exclusive & self._exited)

    def _mark_called(self, body: Node) -> None:
        """Mark the function with this body as called, or the alternatives of one that is defined in several branches."""
        self._called.add(id(body))
        if isinstance(body, Conditional):
            for _, alternative in body.alternatives:
                for item in alternative.items:
                    self._mark_called(item)
