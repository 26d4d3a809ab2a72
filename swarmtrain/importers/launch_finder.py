"""Find the commands of a shell script that may start training. Only the first word of a command counts, after prefixes such as srun."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import PurePosixPath

from swarmtrain.importers.command_prefixes import SLURM_LAUNCHERS, CommandPrefix, split_prefixes
from swarmtrain.importers.launcher_arguments import LaunchCommand, is_launcher_program, is_rank_launcher, parse_launcher_argv
from swarmtrain.importers.shell.evaluation import EvaluatedCommand, ScriptEvaluator
from swarmtrain.importers.shell.parser import parse_script
from swarmtrain.importers.shell.scope import Scope
from swarmtrain.importers.shell.syntax import CommandSubstitution, ShellSyntaxError, SimpleCommand
from swarmtrain.importers.shell.unresolved import find_unresolved, is_resolved, show_text

_SHELLS = frozenset(("bash", "sh", "dash", "ksh"))
_OTHER_SHELLS = frozenset(("zsh", "fish", "tcsh", "csh"))
_REMOTE_PROGRAMS = frozenset(
    (
        "docker",
        "podman",
        "nerdctl",
        "ssh",
        "pdsh",
        "clush",
        "kubectl",
        "xargs",
        "parallel",
        "sbatch",
        "qsub",
        "enroot",
        "shifter",
        "tmux",
        "screen",
    )
)
_OTHER_LAUNCHERS = frozenset(
    (
        *("horovodrun", "jsrun", "aprun", "lrun", "flux", "prun", "composer", "colossalai", "ray", "lightning", "litgpt", "tune", "trl"),
        *("fairseq-train", "fairseq-hydra-train", "llamafactory-cli", "axolotl", "swift", "xtuner", "oumi", "nemo", "yolo", "ludwig"),
    )
)
_TRAINING_NAME_PATTERN = re.compile(r"train|launch|finetune|sft|(?:^|[_-])run", re.IGNORECASE)
# Programs that do not start training, whatever their arguments are.
NON_TRAINING_PROGRAMS = frozenset(
    (
        *("[", "[[", "((", "test", ":", "true", "false", "echo", "printf", "which", "type", "hash", "command", "alias", "unalias", "help"),
        *("pip", "pip3", "conda", "mamba", "micromamba", "spack", "module", "ml", "apt", "apt-get", "yum", "dnf", "brew", "npm", "uv"),
        *("poetry", "pipenv", "pdm", "rye", "export", "declare", "typeset", "local", "readonly", "unset", "set", "shift", "read", "let"),
        *("mapfile", "readarray", "getopts", "cd", "pushd", "popd", "source", ".", "trap", "wait", "sleep", "exit", "return", "break"),
        *(
            "continue",
            "ulimit",
            "umask",
            "mkdir",
            "rmdir",
            "rm",
            "cp",
            "mv",
            "ln",
            "touch",
            "chmod",
            "chown",
            "tar",
            "unzip",
            "gzip",
            "zip",
        ),
        *("rsync", "rclone", "scp", "wget", "curl", "aria2c", "git", "cat", "tee", "head", "tail", "grep", "egrep", "sed", "awk", "cut"),
        *("sort", "uniq", "wc", "tr", "xxd", "date", "hostname", "pwd", "ls", "du", "df", "free", "top", "ps", "kill", "pkill", "killall"),
        *("pgrep", "nvidia-smi", "rocm-smi", "nvcc", "lscpu", "numactl", "uname", "whoami", "id", "env", "printenv", "scontrol", "squeue"),
        *("sinfo", "sacct", "sstat", "scancel", "sbcast", "getent", "ip", "ifconfig", "ibstat", "ibv_devinfo", "netstat", "ss", "nproc"),
        *("basename", "dirname", "realpath", "readlink", "seq", "shuf", "bc", "yes", "openssl", "md5sum", "sha256sum", "wandb", "clear"),
        *("huggingface-cli", "hf", "modelscope", "tensorboard", "jupyter", "make", "cmake", "ninja", "gcc", "g++", "cargo", "ldconfig"),
        *("sudo", "eval", "find", "ds_report", "shopt", "dos2unix", "stat", "file", "diff", "mktemp", "mount", "umount", "lsof", "history"),
    )
)
_LAUNCH_IN_TEXT_PATTERN = re.compile(r"torchrun|accelerate\s+launch|deepspeed|torch\.distributed")
_MAX_DEPTH = 6
_MAX_SUBSTITUTIONS = 20


class Precedence(IntEnum):
    """Precedence of a command as the one that starts training. The command with the highest precedence is selected."""

    script = 0
    """Another script, whose content is unknown."""
    python = 1
    parallel = 2
    """Python or an unknown program, started by srun or mpirun."""
    launcher = 3


@dataclass(frozen=True)
class LaunchCandidate:
    """A command that may start training: `launch` if it is understood, else `reason`."""

    command: EvaluatedCommand
    """The command in the script."""
    inner: EvaluatedCommand
    """The command itself, which differs from `command` if a shell starts it (bash -c)."""
    precedence: Precedence
    launch: LaunchCommand | None = None
    reason: str = ""
    unknown_words: tuple[str, ...] = ()
    """Words with unresolved parts because of which the command is not understood."""

    @property
    def line(self) -> int:
        """Line number of the command (1-based)."""
        return self.command.line


@dataclass
class LaunchFinder:
    """Finds launch commands among the commands of one script."""

    evaluator: ScriptEvaluator
    _depth: int = field(default=0)

    def find(self, command: EvaluatedCommand) -> list[LaunchCandidate]:
        """Return the commands that `command` may start training with. Raises ShellSyntaxError if it is nested too deeply."""
        candidates = self._find_inside(command, command, ())
        return candidates or self._find_in_substitutions(command)

    def _find_inside(
        self, outer: EvaluatedCommand, command: EvaluatedCommand, prefixes: tuple[CommandPrefix, ...]
    ) -> list[LaunchCandidate]:
        if not command.argv or command.argv[0] in command.scope.functions:
            return []
        if command.variables:
            prefixes = (*prefixes, CommandPrefix("", variables=command.variables))
        try:
            inner_prefixes, words = split_prefixes(command.argv)
        except ValueError as error:
            is_parallel = PurePosixPath(command.argv[0]).name in SLURM_LAUNCHERS
            if not is_parallel and not any(map(is_launcher_program, command.argv)):
                return []
            return [self._refuse(outer, command, _find_precedence(command.argv, is_parallel=is_parallel), str(error), command.argv)]
        prefixes = (*prefixes, *inner_prefixes)
        if folders := [folder for prefix in inner_prefixes for folder in prefix.list_folders()]:
            scope = command.scope.copy()
            scope.folder = posixpath.join(scope.folder, *folders)
            command = replace(command, scope=scope)
        if any(prefix.program == "command" and {name for name, _ in prefix.options} & {"-v", "-V"} for prefix in inner_prefixes):
            return []  # prints the path of the program
        if not words:
            is_parallel = any(prefix.program in SLURM_LAUNCHERS for prefix in inner_prefixes)
            return [self._refuse(outer, command, Precedence.parallel, "starts no command")] if is_parallel else []
        return self._classify(outer, command, prefixes, words)

    def _classify(
        self, outer: EvaluatedCommand, command: EvaluatedCommand, prefixes: tuple[CommandPrefix, ...], words: Sequence[str]
    ) -> list[LaunchCandidate]:
        name = PurePosixPath(words[0]).name
        is_parallel = any(prefix.program in SLURM_LAUNCHERS for prefix in prefixes)
        if not is_resolved(name):
            reason = f"the command {show_text(words[0])} is unresolved"
            return [self._refuse(outer, command, _find_precedence(words, is_parallel=is_parallel), reason, words[:1])]
        if is_launcher_program(name):
            return self._parse_launch(outer, command, prefixes, words)
        if name in _OTHER_SHELLS:
            return [
                self._refuse(outer, command, _find_remote_precedence(words, is_parallel=is_parallel), f"{name} is not a supported shell")
            ]
        if name in _SHELLS:
            return self._find_in_shell(outer, command, prefixes, words)
        if name == "eval" and any(part.name for word in words[1:] for part in find_unresolved(word)):
            return [self._refuse(outer, command, Precedence.parallel, "eval runs text that is unresolved", words[1:])]
        return self._classify_unknown(outer, command, words, is_parallel=is_parallel)

    def _classify_unknown(
        self, outer: EvaluatedCommand, command: EvaluatedCommand, words: Sequence[str], *, is_parallel: bool
    ) -> list[LaunchCandidate]:
        name = show_text(words[0])
        mentions_launcher = any(map(is_launcher_program, words[1:]))
        if PurePosixPath(name).name in _REMOTE_PROGRAMS:
            precedence = _find_remote_precedence(words, is_parallel=is_parallel)
            return [self._refuse(outer, command, precedence, f"{name} starts commands elsewhere, which is not supported")]
        if PurePosixPath(name).name in NON_TRAINING_PROGRAMS:
            return []
        if name.endswith(".py"):
            reason = "starts a script without python: write python before it"
            return [self._refuse(outer, command, Precedence.parallel if is_parallel else Precedence.python, reason)]
        if name.endswith((".sh", ".bash", ".sbatch", ".slurm")) or name.startswith(("./", "../")):
            reason = f"{name} is another script: import that script"
            return [self._refuse(outer, command, _find_script_precedence(name, is_parallel=is_parallel), reason)]
        if is_parallel or mentions_launcher or name in _OTHER_LAUNCHERS:
            precedence = _find_precedence(words, is_parallel=is_parallel or name in _OTHER_LAUNCHERS)
            return [self._refuse(outer, command, precedence, f"the program {name} is not supported")]
        return []

    def _parse_launch(
        self, outer: EvaluatedCommand, command: EvaluatedCommand, prefixes: tuple[CommandPrefix, ...], words: Sequence[str]
    ) -> list[LaunchCandidate]:
        is_parallel = any(prefix.program in SLURM_LAUNCHERS for prefix in prefixes)
        precedence = _find_precedence(words, is_parallel=is_parallel)
        if any(prefix.program == "mpirun" for prefix in prefixes) and ":" in words:
            return [self._refuse(outer, command, precedence, "mpirun starts several programs, separated by :")]
        try:
            launch = parse_launcher_argv(words)
        except ValueError as error:
            return [self._refuse(outer, command, precedence, str(error), words)]
        if launch is None:
            reads_input = is_parallel and list(words[1:]) in ([], ["-"])
            return [self._refuse(outer, command, Precedence.parallel, "python reads a program from its input")] if reads_input else []
        other_commands = _list_redirections(command.command)
        launch = replace(launch, prefixes=prefixes, other_commands=other_commands)
        precedence = Precedence.launcher if launch.is_launcher else precedence
        return [LaunchCandidate(outer, command, precedence, launch)]

    def _find_in_shell(
        self, outer: EvaluatedCommand, command: EvaluatedCommand, prefixes: tuple[CommandPrefix, ...], words: Sequence[str]
    ) -> list[LaunchCandidate]:
        is_parallel = any(prefix.program in SLURM_LAUNCHERS for prefix in prefixes)
        text, positional = _take_shell_text(words)
        if text is None:
            shown = " ".join(map(show_text, words[:3]))
            precedence = _find_script_precedence(shown, is_parallel=is_parallel)
            reads_input = any(redirection.operator.startswith("<") for redirection in command.command.redirections) or len(words) == 1
            reason = "reads its commands from its input" if reads_input else "runs another script: import that script"
            return [self._refuse(outer, command, precedence, f"{shown} {reason}", words[1:2])]
        variables = {name: value for prefix in prefixes for name, value in prefix.variables.items()}
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH:
                raise ShellSyntaxError("is nested too deeply", outer.line)
            inner_commands = self.evaluator.evaluate_text(text, command.scope.build_child(variables, positional), outer)
            candidates = [candidate for inner in inner_commands for candidate in self._find_inside(outer, inner, prefixes)]
        except ShellSyntaxError as error:
            precedence = _find_remote_precedence((text,), is_parallel=is_parallel)
            return [self._refuse(outer, command, precedence, f"the text of {words[0]} -c cannot be parsed: {error}", (text,))]
        finally:
            self._depth -= 1
        others = [inner for inner in inner_commands if not any(candidate.inner.index == inner.index for candidate in candidates)]
        redirections = _list_redirections(command.command)
        return [_add_other_commands(candidate, (*_show_commands(others), *redirections)) for candidate in candidates]

    def _find_in_substitutions(self, command: EvaluatedCommand) -> list[LaunchCandidate]:
        """Return the launch commands inside $(…), whose output the script reads."""
        parts = [part for part in _list_parts(command.command) if isinstance(part, CommandSubstitution) and part.source.startswith("$(")]
        candidates: list[LaunchCandidate] = []
        for part in [part for part in parts if _LAUNCH_IN_TEXT_PATTERN.search(part.source)][:_MAX_SUBSTITUTIONS]:
            try:
                inner_commands = self.evaluator.evaluate_text(part.source[2:-1], command.scope.copy(), command)
            except ShellSyntaxError as error:
                return [self._refuse(command, command, Precedence.launcher, str(error))]
            candidates += [candidate for inner in inner_commands for candidate in self._find_inside(command, inner, ())]
        return [candidate for candidate in candidates if candidate.precedence is Precedence.launcher]

    def _refuse(
        self, outer: EvaluatedCommand, inner: EvaluatedCommand, precedence: Precedence, reason: str, words: Sequence[str] = ()
    ) -> LaunchCandidate:
        unknown_words = tuple(word for word in words if not is_resolved(word))
        return LaunchCandidate(outer, inner, precedence, None, reason, unknown_words)


def _find_precedence(words: Sequence[str], *, is_parallel: bool) -> Precedence:
    """Return the precedence of a command by the launchers that its words mention."""
    if any(map(is_rank_launcher, words)):
        return Precedence.launcher
    return Precedence.parallel if is_parallel else Precedence.python


def _find_remote_precedence(words: Sequence[str], *, is_parallel: bool) -> Precedence:
    """Return the precedence of a command whose words may contain a whole shell line."""
    text = " ".join(words)
    if _LAUNCH_IN_TEXT_PATTERN.search(text):
        return Precedence.launcher
    if is_parallel or re.search(r"\b(?:srun|mpirun)\b", text):
        return Precedence.parallel
    return Precedence.python if re.search(r"\bpython[\d.]*\b", text) else _find_script_precedence(text, is_parallel=False)


def _find_script_precedence(name: str, *, is_parallel: bool) -> Precedence:
    """Return the precedence of a script by its name: a script that may train has that of Python."""
    if is_parallel:
        return Precedence.parallel
    return Precedence.python if _TRAINING_NAME_PATTERN.search(PurePosixPath(name).name) else Precedence.script


def _take_shell_text(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the text that a shell runs with -c, and its arguments from $0; None as the text if there is none."""
    arguments = list(words[1:])
    while arguments and arguments[0][:1] in "-+" and len(arguments[0]) > 1:
        option = arguments.pop(0)
        if option in ("-o", "+o", "-O", "+O", "--rcfile", "--init-file") and arguments:
            arguments.pop(0)
        elif not option.startswith("--") and "c" in option:
            return (arguments[0], tuple(arguments[1:])) if arguments else (None, ())
    return None, ()


def _list_redirections(command: SimpleCommand) -> tuple[str, ...]:
    """Return the redirections of the output, except those that only join two streams."""
    return tuple(
        redirection.source.lstrip("0123456789")
        for redirection in command.redirections
        if not (redirection.operator in (">&", "<&") and redirection.target.literal in ("1", "2", "0", "-"))
    )


def _show_commands(commands: Sequence[EvaluatedCommand]) -> tuple[str, ...]:
    return tuple(" ".join(map(show_text, command.argv)) for command in commands if command.argv)


def _add_other_commands(candidate: LaunchCandidate, texts: tuple[str, ...]) -> LaunchCandidate:
    if candidate.launch is None:
        return candidate
    return replace(candidate, launch=replace(candidate.launch, other_commands=(*texts, *candidate.launch.other_commands)))


def _list_parts(command: SimpleCommand) -> list[object]:
    words = [*command.words, *(argument for argument in command.arguments if hasattr(argument, "parts"))]
    assignments = [*command.assignments, *(argument for argument in command.arguments if hasattr(argument, "value"))]
    for assignment in assignments:
        value = assignment.value
        words += list(value) if isinstance(value, tuple) else [value] if value is not None else []
    return [part for word in words for part in word.parts]


def parse_launch_text(text: str) -> LaunchCommand | None:
    """Return the first launch command in the shell text `text`, with its other commands; None if it does not start training.

    Raises ValueError if the text cannot be parsed.
    """
    evaluator = ScriptEvaluator()
    evaluator.run(parse_script(text).body, Scope())
    finder, commands = LaunchFinder(evaluator), list(evaluator.commands)
    candidates = [candidate for command in commands for candidate in finder.find(command) if candidate.launch is not None]
    if not candidates or candidates[0].launch is None:
        return None
    others = _show_commands([command for command in commands if command is not candidates[0].command])
    return replace(candidates[0].launch, other_commands=(*others, *candidates[0].launch.other_commands))


def parse_launch_argv(argv: Sequence[str]) -> LaunchCommand | None:
    """Return the launch command in the words `argv`; None if they do not start training. Raises ValueError if they cannot be parsed."""
    command = SimpleCommand(1, " ".join(argv))
    evaluated = EvaluatedCommand(command, command, tuple(argv), {}, Scope())
    candidates = LaunchFinder(ScriptEvaluator()).find(evaluated)
    return next((candidate.launch for candidate in candidates if candidate.launch is not None), None)
