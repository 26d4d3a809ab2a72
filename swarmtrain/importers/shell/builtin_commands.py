"""Commands of the shell itself: their effects on variables and the working folder."""

from __future__ import annotations

import posixpath

from swarmtrain.importers.shell.assigned_names import iterate_commands
from swarmtrain.importers.shell.command_reader import DECLARATIONS
from swarmtrain.importers.shell.scope import POSITIONAL, Scope
from swarmtrain.importers.shell.syntax import Node, SimpleCommand
from swarmtrain.importers.shell.unresolved import Unresolved, find_splitting

_PREPARATIONS = frozenset(("cd", "pushd", "mkdir", "module", "source", ".", "set", "export", "conda", "echo", ":", "true", "ml"))


_ENVIRONMENT_FILES = frozenset(
    (
        *("activate", "deactivate", "conda.sh", "mamba.sh", "micromamba.sh", "bash", "sh", "lmod.sh", "modules.sh", "setup-env.sh"),
        *(".bashrc", ".bash_profile", ".profile", ".bash_login", "bashrc", "profile", "setvars.sh"),
    )
)
_SYSTEM_FOLDERS = ("/etc/", "/usr/", "/opt/", "/cvmfs/")


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
    """Apply `set`: allexport, and the positional parameters after the options."""
    words = list(arguments)
    while words and words[0][:1] in ("-", "+"):
        option = words.pop(0)
        if option in ("--", "-"):
            if option == "--" or words:
                scope.variables[POSITIONAL] = tuple(words)
            return
        name = words.pop(0) if "o" in option and words else ""
        if "a" in option or name == "allexport":
            scope.exports_all = option.startswith("-")
    if words:
        scope.variables[POSITIONAL] = tuple(words)


def shift_arguments(arguments: tuple[str, ...], scope: Scope, line: int) -> None:
    """Apply `shift`, which has no effect if there are fewer positional parameters."""
    positional, count = scope.get_positional(), arguments[0] if arguments else "1"
    if not count.isdigit() or find_splitting(positional[: int(count)]):
        scope.make_unresolved(POSITIONAL, line, "is shifted by an unknown number of words")
    elif int(count) <= len(positional):
        scope.variables[POSITIONAL] = positional[int(count) :]


def is_environment_file(path: str) -> bool:
    """Return whether `path` is a file that prepares the environment, such as bin/activate, and does not set variables of the script."""
    return posixpath.basename(path) in _ENVIRONMENT_FILES or path.startswith(_SYSTEM_FOLDERS)


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
