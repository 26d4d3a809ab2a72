"""Lines of a job script that do not start training: those that prepare the environment, and those without a counterpart."""

from __future__ import annotations

import re

from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason
from swarmtrain.importers.secret_values import redact_secrets
from swarmtrain.importers.shell.evaluation import EvaluatedCommand
from swarmtrain.importers.shell.expansion import render_word
from swarmtrain.importers.shell.syntax import (
    ArithmeticExpansion,
    Assignment,
    CommandSubstitution,
    Literal,
    ParameterExpansion,
    Part,
    Placeholder,
    Word,
)
from swarmtrain.importers.shell.unresolved import is_resolved
from swarmtrain.importers.slurm_options import append_slurm_setting, has_slurm_setting

_IMAGE_TEXT = "put dependencies into the image: swarmtrain image build"
_PRELUDE_PROGRAMS = frozenset(
    ("module", "ml", "spack", "source", ".", "conda", "micromamba", "mamba", "pyenv", "eval", "ulimit", "umask", "shopt")
)
_PRELUDE_TEXTS = {"ulimit": "each container has its own limits", "umask": "each container has its own limits"}
_OUTPUT_PROGRAMS = (
    *("set", "echo", "date", "hostname", "nvidia-smi", "printenv", "env", "trap", "wait", "sleep", "pwd", "ls", "cat", "scontrol"),
    *("squeue", "sstat", "which", "exit", ":", "printf", "sacct", "sinfo", "true", "shopt", "[", "[[", "test", "((", "tee", "return"),
)
_LINE_RULES: dict[str, tuple[UnmappedReason, str]] = {
    **dict.fromkeys(_OUTPUT_PROGRAMS, (UnmappedReason.no_counterpart, "")),
    **dict.fromkeys(("cd", "pushd", "popd"), (UnmappedReason.done_differently, "runner.script and runner.code are shipped with the run")),
    **dict.fromkeys(
        ("mkdir", "rm", "cp", "mv", "ln", "rsync", "tar", "rclone"),
        (UnmappedReason.done_differently, "runner.code, and runner.docker_config.docker_mounts for large files"),
    ),
    **dict.fromkeys(("pip", "pip3", "uv", "poetry"), (UnmappedReason.done_differently, _IMAGE_TEXT)),
    **dict.fromkeys(("read", "mapfile", "readarray", "getopts", "unset", "let", "shift"), (UnmappedReason.unknown, "depends on the job")),
    **dict.fromkeys(("source", ".", "module", "ml", "conda", "eval", "spack"), (UnmappedReason.done_differently, _IMAGE_TEXT)),
    "tee": (UnmappedReason.done_differently, "swarmtrain logs shows all ranks in one stream"),
}
_LOGIN_PATTERN = re.compile(r"(?:wandb|huggingface-cli|hf|docker|podman|modelscope|comet|clearml\S*)\s+(?:auth\s+)?login\b")
_SECRETS_TEXT = "a login: use runner.secrets, and read the file that its variable NAME_FILE names"


def map_script_line(report: MigrationReport, key: KeyPath, command: EvaluatedCommand, *, is_before_launch: bool) -> None:
    """Map a command that does not start training: to runner.slurm.prelude if it prepares the environment, else report it."""
    name = command.argv[0].rpartition("/")[2] if command.argv else ""
    if _LOGIN_PATTERN.match(" ".join(command.argv)):
        report.add_unmapped_key(key, UnmappedReason.done_differently, _SECRETS_TEXT, value=f"{name} login …")
    elif is_before_launch and name in _PRELUDE_PROGRAMS and add_to_prelude(report, key, command):
        return
    elif name in _PRELUDE_PROGRAMS:
        report.add_unmapped_key(key, UnmappedReason.done_differently, _PRELUDE_TEXTS.get(name, _IMAGE_TEXT))
    elif name.startswith("python"):
        is_install = "pip" in command.argv[1:3]
        replacement = _IMAGE_TEXT if is_install else "not the command that starts training: run it before swarmtrain deploy"
        report.add_unmapped_key(key, UnmappedReason.done_differently, replacement)
    else:
        report.add_unmapped_key(key, *_LINE_RULES.get(name, (UnmappedReason.no_counterpart, "a custom command of the script")))


def add_to_prelude(report: MigrationReport, key: KeyPath, command: EvaluatedCommand) -> bool:
    """Add the command to runner.slurm.prelude. Return False if it is conditional, depends on other lines, or contains a secret."""
    if not has_slurm_setting(report, "prelude") or command.constructs or command.unreached or command.command.redirections:
        return False
    text = _render_command(command)
    if text is None or "\n" in text or not text.isprintable() or redact_secrets(text, report.secrets) != text:
        return False
    append_slurm_setting(report, key, "prelude", text)
    return True


def _render_command(command: EvaluatedCommand) -> str | None:
    """Return the command as a shell line that does not depend on other lines of the script; None if that is not possible."""
    items: list[Word | Assignment] = [*command.command.assignments, *command.command.words, *command.command.arguments]
    words = [word for item in items for word in _list_words(item)]
    parts = [part for word in words for part in _list_parts(word)]
    scope = command.scope
    if any(isinstance(part, Placeholder) or (isinstance(part, ParameterExpansion) and not part.name.isidentifier()) for part in parts):
        return None
    nested_names = {name for part in parts if not isinstance(part, Literal) for name in _find_nested_names(part)}
    names = [part.name for part in parts if isinstance(part, ParameterExpansion)]
    if any(scope.get(name) is not None and name not in scope.exported for name in nested_names):
        return None
    assigned = [name for name in names if name in scope.variables or name in scope.constants]
    if not assigned:
        return command.command.source
    if any(not _is_known(scope.get(name)) and name not in scope.exported for name in assigned):
        return None
    if any(isinstance(item, Assignment) and isinstance(item.value, tuple) for item in items):
        return None
    return " ".join(_render_item(item, command) for item in items)


def _find_nested_names(part: ParameterExpansion | CommandSubstitution | ArithmeticExpansion | Placeholder) -> list[str]:
    """Return the names of variables inside a part that is rendered as the script contains it."""
    if isinstance(part, ParameterExpansion):
        return re.findall(r"\$\{?(\w+)", part.argument.source) if part.argument else []
    return re.findall(r"[A-Za-z_]\w*", part.source) if isinstance(part, ArithmeticExpansion) else re.findall(r"\$\{?(\w+)", part.source)


def _is_known(value: str | tuple[str, ...] | None) -> bool:
    return isinstance(value, str) and is_resolved(value)


def _list_words(item: Word | Assignment) -> list[Word]:
    if isinstance(item, Word):
        return [item]
    return list(item.value) if isinstance(item.value, tuple) else [item.value] if item.value else []


def _list_parts(word: Word) -> list[Part]:
    """Return the parts of `word`, including those in the arguments of its parameters."""
    parts = list(word.parts)
    for part in word.parts:
        if isinstance(part, ParameterExpansion) and part.argument:
            parts += _list_parts(part.argument)
    return parts


def _render_item(item: Word | Assignment, command: EvaluatedCommand) -> str:
    if isinstance(item, Word):
        return render_word(item, command.scope, command.command)
    value = render_word(item.value, command.scope, command.command) if isinstance(item.value, Word) else ""
    return f"{item.name}{'+' if item.is_append else ''}={value}"
