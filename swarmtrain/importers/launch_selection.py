"""Select the command of a script that starts training. If it is not certain, or not known completely, the script is refused."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.command_prefixes import CONTAINER_PROGRAMS
from swarmtrain.importers.launch_command import RENDEZVOUS_VARIABLES
from swarmtrain.importers.launch_finder import LaunchCandidate, Precedence
from swarmtrain.importers.launcher_arguments import LaunchCommand
from swarmtrain.importers.secret_values import format_for_message, redact_secrets, remove_secret_arguments
from swarmtrain.importers.shell.unresolved import Unresolved, find_unresolved

_MAX_LISTED = 12
_MAX_SHOWN_LENGTH = 100
# Flags that may differ between commands that start the same training.
_RENDEZVOUS_FLAGS = ("node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "master_addr", "master_port", "local_addr")


def select_launch(candidates: Sequence[LaunchCandidate], source: str, launch_line: int | None) -> LaunchCandidate:
    """Return the candidate that starts training: the one in line `launch_line`, or if it is None the one of the highest precedence.

    Raises ConfigError with all candidates if none is understood, or if several differ.
    """
    if launch_line is not None:
        return _select_by_line(candidates, source, launch_line)
    reachable = [candidate for candidate in candidates if not candidate.command.unreached]
    if not reachable:
        _refuse_without_candidate(candidates, source)
    precedence = max(candidate.precedence for candidate in reachable)
    preferred = [candidate for candidate in reachable if candidate.precedence is precedence]
    others = [candidate for candidate in reachable if Precedence.python <= candidate.precedence < precedence]
    alternatives = [other for other in others if any(_exclude_each_other(other, candidate) for candidate in preferred)]
    return _select_equal(sorted([*preferred, *alternatives], key=lambda candidate: candidate.command.index), source)


def _exclude_each_other(first: LaunchCandidate, second: LaunchCandidate) -> bool:
    """Return whether only one of the two runs, since they are in different branches or one of them ends the script."""
    pairs = ((first.command, second.command), (second.command, first.command))
    return any(start <= command.index < end for command, other in pairs for start, end in other.scope.exclusive)


def check_resolved(candidate: LaunchCandidate, source: str, secrets: Collection[str], settings: Iterable[str]) -> None:
    """Check that script, arguments, image and folder of the launch command are known.

    Raises ConfigError with each part that is not, and a command that sets the variables.
    """
    launch = candidate.launch
    if launch is None:
        return
    texts = [launch.script, *remove_secret_arguments(launch.args, secrets).remaining, *_list_images(launch)]
    if not launch.script.startswith("/"):
        texts.append(candidate.inner.scope.folder)
    unresolved = sorted(dict.fromkeys(part for text in texts for part in find_unresolved(text)), key=lambda part: part.line)
    loop_variables = {*candidate.command.loop_variables, *candidate.inner.loop_variables}
    loop_names = {part.name for text in [*texts, *_list_values(candidate, launch)] for part in find_unresolved(text)} & loop_variables
    if not unresolved and not loop_names:
        return
    problems = [_build_unresolved_problem(part, loop_variables) for part in unresolved]
    known_names = {part.name for part in unresolved}
    problems += [
        Problem("", f"the loop over {name} starts several runs, and a config describes one", candidate.line)
        for name in sorted(loop_names - known_names)
    ]
    names = list(dict.fromkeys([*(part.name for part in unresolved if part.name), *sorted(loop_names)]))
    hint = build_import_command(source, names, settings) if names else "write the value into the script, or assign it to a variable"
    _refuse(problems, source, hint)


def build_import_command(source: str, names: Sequence[str], settings: Iterable[str] = (), options: str = "") -> str:
    """Return the command that imports `source` with values for the variables `names`, in addition to `settings` that are already set."""
    arguments = "".join(
        f" --set {shlex.quote(setting)}" for setting in [*map(redact_secrets, settings), *(f"{name}=VALUE" for name in names)]
    )
    return f"swarmtrain import {shlex.quote(source)}{options}{arguments}"


def describe_candidate(candidate: LaunchCandidate) -> str:
    """Return the text of the candidate's command, without secrets."""
    text = redact_secrets(" ".join(candidate.command.statement.source.replace("\\\n", " ").split()))
    return text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[: _MAX_SHOWN_LENGTH - 1]}…"


def _select_by_line(candidates: Sequence[LaunchCandidate], source: str, launch_line: int) -> LaunchCandidate:
    in_line = [candidate for candidate in candidates if candidate.line == launch_line]
    if not in_line:
        lines = sorted({candidate.line for candidate in candidates})
        hint = (
            f"lines with commands that may start training: {', '.join(map(str, lines))}" if lines else "pass the script that calls torchrun"
        )
        _refuse([Problem("", "does not start training in this line (--launch)", launch_line)], source, hint)
    precedence = max(candidate.precedence for candidate in in_line)
    return _select_equal([candidate for candidate in in_line if candidate.precedence is precedence], source)


def _select_equal(candidates: Sequence[LaunchCandidate], source: str) -> LaunchCandidate:
    """Return the first candidate if all are understood and start the same. Raises ConfigError otherwise."""
    unknown = [candidate for candidate in candidates if candidate.launch is None]
    identities = {_identify(candidate.launch) for candidate in candidates if candidate.launch is not None}
    if not unknown and len(identities) == 1:
        return candidates[0]
    problems = [
        Problem("", f"may start training: {describe_candidate(candidate)}{_explain(candidate)}", candidate.line) for candidate in candidates
    ]
    names = list(
        dict.fromkeys(part.name for candidate in unknown for word in candidate.unknown_words for part in find_unresolved(word) if part.name)
    )
    understood = max(
        (candidate for candidate in candidates if candidate.launch is not None), key=lambda candidate: candidate.precedence, default=None
    )
    if names and not identities:
        hint = build_import_command(source, names)
    elif understood is not None:
        hint = f"select one command: {build_import_command(source, (), options=f' --launch {understood.line}')}"
    else:
        hint = "import a script that starts torchrun, accelerate launch, deepspeed or python itself"
    return _refuse(problems, source, hint)


def _explain(candidate: LaunchCandidate) -> str:
    return f": {redact_secrets(candidate.reason)}" if candidate.reason else ""


def _refuse_without_candidate(candidates: Sequence[LaunchCandidate], source: str) -> NoReturn:
    problems = [
        Problem("", f"would start training, but {candidate.command.unreached}: {describe_candidate(candidate)}", candidate.line)
        for candidate in candidates
    ]
    _refuse(problems or [Problem("", "starts neither torchrun nor python")], source, "pass the script that calls torchrun")


def _refuse(problems: Sequence[Problem], source: str, hint: str) -> NoReturn:
    shown = list(problems[:_MAX_LISTED])
    if len(problems) > _MAX_LISTED:
        shown.append(Problem("", f"and {len(problems) - _MAX_LISTED} more"))
    hints = [None] * (len(shown) - 1) + [format_for_message(hint)]
    raise ConfigError(
        tuple(Problem("", format_for_message(problem.message), problem.line, hint) for problem, hint in zip(shown, hints, strict=True)),
        source=source,
    )


def _build_unresolved_problem(part: Unresolved, loop_variables: Collection[str]) -> Problem:
    if part.name in loop_variables:
        reason = "takes several values in a loop, and a config describes one run"
    else:
        reason = part.reason or "is not set in the script"
    verb = "" if reason.startswith(("is ", "may ", "takes ", "depends ", "changes ", "expands ", "cannot ")) else "is not resolvable: "
    return Problem("", redact_secrets(f"{part.source} {verb}{reason}"), part.line)


def _identify(launch: LaunchCommand) -> tuple[object, ...]:
    flags = tuple(sorted((name, value) for name, value in launch.flags.items() if name not in _RENDEZVOUS_FLAGS))
    return launch.program, flags, launch.script, launch.args, tuple(sorted(_collect_variables(launch).items()))


def _collect_variables(launch: LaunchCommand) -> dict[str, str]:
    return {name: value for prefix in launch.prefixes for name, value in prefix.variables.items()}


def _list_values(candidate: LaunchCandidate, launch: LaunchCommand) -> list[str]:
    """Return the values of the variables of the launch command, except those of the rendezvous."""
    variables = candidate.command.scope.get_exported_values() | _collect_variables(launch)
    return [value for name, value in variables.items() if name not in RENDEZVOUS_VARIABLES]


def _list_images(launch: LaunchCommand) -> list[str]:
    images = [operand for prefix in launch.prefixes if prefix.program in CONTAINER_PROGRAMS for operand in prefix.operands]
    return images + [value for prefix in launch.prefixes for name, value in prefix.options if name == "--container-image"]
