"""Commands of the shell itself: their effects on variables and the working folder."""

from __future__ import annotations

import posixpath
import re

from swarmtrain.importers.shell.assigned_names import iterate_commands
from swarmtrain.importers.shell.command_reader import DECLARATIONS
from swarmtrain.importers.shell.scope import POSITIONAL, Scope
from swarmtrain.importers.shell.syntax import Node, SimpleCommand
from swarmtrain.importers.shell.unresolved import Unresolved

_PREPARATIONS = frozenset(("cd", "pushd", "mkdir", "module", "source", ".", "set", "export", "conda", "echo", ":", "true", "ml"))


def exits(function: Node) -> bool:
    """Return whether the function ends the script with exit or exec, not only itself with return."""
    names = [command.words[0].literal for command in iterate_commands(function) if command.words]
    return "return" not in names


def find_local_names(function: Node) -> set[str]:
    """Return the names that the function declares as local."""
    declarations = [command for command in iterate_commands(function) if command.words and command.words[0].literal in DECLARATIONS]
    return {
        argument.name if hasattr(argument, "name") else argument.literal
        for command in declarations
        if command.words[0].literal in ("local", "declare", "typeset")
        and not any(getattr(argument, "literal", "").startswith("-g") for argument in command.arguments)
        for argument in command.arguments
    } - {""}


def always_succeeds(node: Node) -> bool:
    """Return whether a script that works has `node` succeed: it only assigns variables or prepares the environment."""
    if not isinstance(node, SimpleCommand):
        return False
    return not node.words or node.words[0].literal in _PREPARATIONS


def apply_set(arguments: tuple[str, ...], scope: Scope) -> None:
    """Apply `set`: positional parameters after --, and allexport."""
    for index, argument in enumerate(arguments):
        if argument == "--":
            scope.variables[POSITIONAL] = arguments[index + 1 :]
            return
        if re.fullmatch(r"[-+]\w*a\w*", argument) and arguments[index - 1 : index] not in (("-o",), ("+o",)):
            scope.exports_all = argument.startswith("-")
        elif argument == "allexport":
            scope.exports_all = arguments[index - 1] == "-o"


def change_folder(scope: Scope, name: str, arguments: tuple[str, ...], command: SimpleCommand) -> str:
    """Return the working folder after cd, relative to the folder in which the script starts unless it is absolute."""
    folders = [argument for argument in arguments if argument not in ("-P", "-L", "--")]
    if name == "popd" or folders == ["-"]:
        return Unresolved("", command.source, command.line, "is an earlier folder").to_mark()
    if not folders:
        home = scope.get("HOME")
        return home if isinstance(home, str) else Unresolved("HOME", "cd", command.line).to_mark()
    source = " ".join(word.source for word in command.words[1:]).strip("\"'")
    if source in ("$SLURM_SUBMIT_DIR", "${SLURM_SUBMIT_DIR}", "$PWD", "$(pwd)", "${PBS_O_WORKDIR}", "$PBS_O_WORKDIR"):
        return scope.folder if "PWD" in source or "pwd" in source else ""
    return posixpath.normpath(posixpath.join(scope.folder, folders[0])) if folders[0] not in (".", "./") else scope.folder
