"""Variables of a shell script at one point of its execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmtrain.importers.shell.syntax import ShellSyntaxError, Statement
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
    sourced_line: int = 0
    """Line that reads another file, which may set any variable; 0: none."""
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
            self.sourced_line,
            self.notes,
        )

    def get(self, name: str) -> Value | None:
        """Return the value of the variable `name`; None if the script has not set it."""
        if name in self.constants:
            return self.constants[name]
        return self.variables.get(name, self.provided.get(name))

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
        if self.exports_all or name in self.exported:
            self.exported[name] = statement

    def make_unresolved(self, name: str, line: int, reason: str) -> None:
        """Make the value of `name` unknown."""
        self.variables[name] = Unresolved(name, f"${name}", line, reason).to_mark()
        if name == POSITIONAL:
            self.variables[name] = (Unresolved("", "$@", line, reason).to_mark(),)

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
            notes=self.notes,
        )

    def merge(self, outcomes: Sequence[Scope], line: int) -> None:
        """Continue with the outcomes of the branches in line `line`: what differs between them is unknown."""
        remaining = [scope for scope in outcomes if not scope.has_ended]
        if not remaining:
            self.has_ended = True
            return
        names = {name for scope in remaining for name in scope.variables}
        for name in names:
            values = [scope.variables.get(name) for scope in remaining]
            first = values[0]
            if first is not None and all(value == first for value in values):
                self.variables[name] = first
            else:
                self.make_unresolved(name, line, f"depends on the condition in line {line}")
        self.exported = {name: statement for scope in remaining for name, statement in scope.exported.items()}
        folders = {scope.folder for scope in remaining}
        self.folder = remaining[0].folder if len(folders) == 1 else Unresolved("", "cd", line, "depends on a condition").to_mark()
