"""Variables of a shell script at one point of its execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmtrain.importers.shell.syntax import CommandList, Conditional, Header, Node, ShellSyntaxError, Statement
from swarmtrain.importers.shell.unresolved import Unresolved, name_unresolved

Value = str | tuple[str, ...]
POSITIONAL = "@"
SCRIPT_NAME = "0"
_MAX_VARIABLES = 500
_MAX_VALUE_LENGTH = 50_000
# Variables that every login shell or Slurm job has, so that a default such as ${HOME:-/root} does not apply.
_ENVIRONMENT_VARIABLES = frozenset(("HOME", "USER", "LOGNAME", "PWD", "OLDPWD", "PATH", "SHELL", "HOSTNAME", "TMPDIR", "UID", "RANDOM"))
_ENVIRONMENT_PREFIXES = ("SLURM_",)


@dataclass
class Scope:
    """Variables, exported names and working folder."""

    constants: Mapping[str, str] = field(default_factory=dict)
    """Variables with a fixed value (`--set`): assignments do not change them."""
    provided: Mapping[str, str] = field(default_factory=dict)
    """Variables that the job sets before the script runs."""
    variables: dict[str, Value] = field(default_factory=dict)
    exported: dict[str, Statement | None] = field(default_factory=dict)
    """Exported names, each with the statement that exported or assigned it last; None: it was inherited."""
    folder: str = ""
    """Working folder, relative to the folder in which the script starts."""
    knows_positional: bool = False
    """Whether the positional parameters are known, as in a function."""
    exports_all: bool = False
    has_ended: bool = False
    """Whether nothing that follows runs: after exit, exec, or return."""
    has_exited: bool = False
    """Whether the whole script has ended, not only a function."""
    sourced_line: int = 0
    """Line that reads another file, which may set any variable; 0: none."""
    sourced_names: Mapping[str, int] = field(default_factory=dict)
    """Variables that were assigned before the script read another file, each with the line that reads it."""
    functions: Mapping[str, Node] = field(default_factory=dict)
    exclusive: frozenset[tuple[int, int]] = frozenset()
    """Ranges of evaluated commands that do not run if what follows runs: other branches, and those that end the script."""
    notes: list[str] = field(default_factory=list)

    def copy(self) -> Scope:
        """Return a copy whose variables can change independently; notes are shared."""
        return Scope(
            self.constants,
            self.provided,
            dict(self.variables),
            dict(self.exported),
            self.folder,
            self.knows_positional,
            self.exports_all,
            self.has_ended,
            self.has_exited,
            self.sourced_line,
            dict(self.sourced_names),
            dict(self.functions),
            self.exclusive,
            self.notes,
        )

    def get(self, name: str) -> Value | None:
        """Return the value of the variable `name`; None if the script has not set it."""
        if name in self.constants:
            return self.constants[name]
        return self.variables.get(name, self.provided.get(name))

    def look_up(self, name: str) -> Value | None:
        """Return the value that `name` expands to, which is unknown if a file that the script reads may have changed it."""
        value = self.get(name)
        if value is None or name in self.constants or name not in self.sourced_names:
            return value
        line = self.sourced_names[name]
        mark = Unresolved(name, f"${name}", line, f"may be set by what line {line} reads", may_split=True).to_mark()
        return mark if isinstance(value, str) else (mark,)

    def add_sourced_file(self, line: int) -> None:
        """Note that line `line` reads a file that may set any variable."""
        self.sourced_line = self.sourced_line or line
        names = [name for name in self.variables if name.isidentifier()]
        self.sourced_names = dict.fromkeys(names, line) | dict(self.sourced_names)

    def get_positional(self) -> tuple[str, ...]:
        """Return the positional parameters."""
        value = self.variables.get(POSITIONAL)
        if isinstance(value, tuple):
            return value
        arguments: list[str] = []
        while not self.knows_positional and str(len(arguments) + 1) in self.constants:
            arguments.append(self.constants[str(len(arguments) + 1)])
        return tuple(arguments)

    def has_positional(self) -> bool:
        """Return whether the positional parameters are known, from a call, `set --` or `--set`."""
        return self.knows_positional or POSITIONAL in self.variables

    def assign(self, name: str, value: Value, statement: Statement) -> None:
        """Assign `value` to `name`. Raises ShellSyntaxError if the value is too long."""
        if sum(map(len, value)) > _MAX_VALUE_LENGTH:
            raise ShellSyntaxError(f"the value of {name} is too long once variables are expanded", statement.line)
        if len(self.variables) > _MAX_VARIABLES:
            raise ShellSyntaxError("sets too many variables", statement.line)
        named = tuple(name_unresolved(text, name) for text in value) if isinstance(value, tuple) else name_unresolved(value, name)
        self.variables[name] = named
        self._forget_sourced(name)
        if self.exports_all or name in self.exported:
            self.exported[name] = statement

    def make_unresolved(self, name: str, line: int, reason: str) -> None:
        """Make the value of `name` unknown."""
        self._forget_sourced(name)
        self.variables[name] = Unresolved(name, f"${name}", line, reason, may_split=True).to_mark()
        if name == POSITIONAL:
            self.variables[name] = (Unresolved("", "$@", line, reason, may_split=True).to_mark(),)

    def _forget_sourced(self, name: str) -> None:
        self.sourced_names = {other: line for other, line in self.sourced_names.items() if other != name}

    def is_environment_variable(self, name: str) -> bool:
        """Return whether `name` has a value in every environment, although the script does not set it."""
        return name in _ENVIRONMENT_VARIABLES or name.startswith(_ENVIRONMENT_PREFIXES)

    def get_exported_values(self) -> dict[str, str]:
        """Return the exported variables that have a value."""
        values = {name: self.get(name) for name in self.exported}
        return {name: value for name, value in values.items() if isinstance(value, str)}

    def build_child(self, variables: Mapping[str, str], arguments: tuple[str, ...]) -> Scope:
        """Return the scope of a new shell that this one starts with `arguments` from $0: only exported variables are inherited."""
        inherited: dict[str, Value] = {**self.get_exported_values(), **variables}
        exported = dict.fromkeys(inherited)
        return Scope(
            self.constants,
            self.provided,
            {**inherited, **({SCRIPT_NAME: arguments[0]} if arguments else {}), POSITIONAL: arguments[1:]},
            {**exported, **{name: self.exported[name] for name in exported if name in self.exported}},
            self.folder,
            knows_positional=True,
            sourced_line=self.sourced_line,
            sourced_names={name: line for name, line in self.sourced_names.items() if name in inherited and name not in variables},
            exclusive=self.exclusive,
            notes=self.notes,
        )

    def merge(self, outcomes: Sequence[Scope], line: int) -> None:
        """Continue with the outcomes of the branches in line `line`: what differs between them is unknown."""
        remaining = [scope for scope in outcomes if not scope.has_ended]
        if not remaining:
            self.has_ended, self.has_exited = True, any(scope.has_exited for scope in outcomes)
            return
        sourced_names = {name: sourced_line for scope in remaining for name, sourced_line in scope.sourced_names.items()}
        names = {name for scope in remaining for name in scope.variables}
        for name in names:
            values = [scope.variables.get(name) for scope in remaining]
            first = values[0]
            if first is not None and all(value == first for value in values):
                self.variables[name] = first
            else:
                self.make_unresolved(name, line, f"depends on the condition in line {line}")
        self.sourced_names = sourced_names
        self.sourced_line = next((scope.sourced_line for scope in remaining if scope.sourced_line), 0)
        self.exports_all = any(scope.exports_all for scope in remaining)
        self.functions = _merge_functions(remaining, line)
        self.exported = {name: statement for scope in remaining for name, statement in scope.exported.items()}
        folders = {scope.folder for scope in remaining}
        self.folder = remaining[0].folder if len(folders) == 1 else Unresolved("", "cd", line, "depends on a condition").to_mark()


def _merge_functions(scopes: Sequence[Scope], line: int) -> dict[str, Node]:
    """Return the functions after the branches `scopes`: one that differs between them is a conditional over its definitions."""
    functions: dict[str, Node] = {}
    for name in dict.fromkeys(name for scope in scopes for name in scope.functions):
        bodies = list({id(body): body for scope in scopes if (body := scope.functions.get(name)) is not None}.values())
        is_always_defined = all(name in scope.functions for scope in scopes)
        if len(bodies) == 1 and is_always_defined:
            functions[name] = bodies[0]
        else:
            header = Header(line, f"the condition in line {line}")
            functions[name] = Conditional(header, [(None, CommandList([body])) for body in bodies], is_exhaustive=is_always_defined)
    return functions
