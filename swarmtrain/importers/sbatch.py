"""Import an sbatch script or a shell script that starts training: its options, variables, launch command and container."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmtrain.errors import ConfigError, Problem, SwarmtrainError
from swarmtrain.importers.launch_command import RENDEZVOUS_TEXT, RENDEZVOUS_VARIABLES, map_environment_variable
from swarmtrain.importers.launch_finder import LaunchCandidate, LaunchFinder
from swarmtrain.importers.launch_mapping import map_job_launch
from swarmtrain.importers.launch_selection import check_resolved, select_launch
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason, is_secret_name
from swarmtrain.importers.script_lines import add_to_prelude, map_script_line
from swarmtrain.importers.secret_values import format_for_message, redact_secrets
from swarmtrain.importers.shell.assigned_names import find_parameter_names
from swarmtrain.importers.shell.command_reader import DECLARATIONS
from swarmtrain.importers.shell.evaluation import EvaluatedCommand, ScriptEvaluator
from swarmtrain.importers.shell.parser import ShellScript, check_characters, parse_script
from swarmtrain.importers.shell.scope import Scope
from swarmtrain.importers.shell.syntax import Header, ParameterExpansion, ShellSyntaxError, Statement
from swarmtrain.importers.shell.unresolved import find_unresolved, is_resolved, is_unknown, show_text
from swarmtrain.importers.slurm_options import SlurmOptions

_CONSTRUCT_TEXT = "one run starts one script on all nodes"
_OTHER_LAUNCH_TEXT = "a run starts one script: write a separate config"
_PATH_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LIBRARY_PATH", "CPATH")
_SHELL_PATTERN = re.compile(r"(?:^|[/ ])(?:bash|sh|dash|ksh)$")
_SETTING_PATTERN = re.compile(r"([A-Za-z_]\w*|\d+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ScriptSettings:
    """What the user adds to a script: values of variables (`--set`), and the line of the launch command (`--launch`)."""

    variables: Mapping[str, str] = field(default_factory=dict)
    launch_line: int | None = None


@dataclass
class _Job:
    """A script that has been read: its options, its commands, and the keys of its statements in the migration report."""

    script: ShellScript
    evaluator: ScriptEvaluator
    options: SlurmOptions
    scope: Scope
    keys: dict[int, str] = field(default_factory=dict)
    """Key of each statement, by its id."""
    prelude: set[int] = field(default_factory=set)
    """Ids of the statements that set variables in runner.slurm.prelude."""

    def get_key(self, statement: Statement) -> KeyPath:
        return (self.keys[id(statement)],)


def parse_script_settings(arguments: tuple[str, ...], launch_line: int | None) -> ScriptSettings | None:
    """Return the settings of --set NAME=value and --launch LINE; None if there are none. Raises SwarmtrainError if one is invalid."""
    if not arguments and launch_line is None:
        return None
    variables = {}
    for argument in arguments:
        match = _SETTING_PATTERN.fullmatch(argument)
        if not match:
            raise SwarmtrainError(
                f"{format_for_message(argument)!r} is not in the form NAME=value", place="--set", hint="--set DATA_DIR=/data"
            )
        variables[match[1]] = match[2]
    return ScriptSettings(variables, launch_line)


def parse_sbatch_script(text: str, source: str, settings: ScriptSettings | None = None) -> MigrationReport:
    """Return the migration report of an sbatch script.

    Raises ConfigError if it is not certain which command starts training, or if a part of this command is known only when the script runs.
    """
    settings = settings or ScriptSettings()
    try:
        job, report = _read_job(text, settings)
        finder = LaunchFinder(job.evaluator)
        candidates = [candidate for command in list(job.evaluator.commands) for candidate in finder.find(command)]
    except ShellSyntaxError as error:
        hint = "simplify this line, or import a script that contains only the launch command and the variables that it needs"
        raise ConfigError((Problem("", format_for_message(f"cannot be parsed: {error}"), error.line, hint),), source=source) from None
    selected = select_launch(candidates, source, settings.launch_line)
    secrets = _collect_secrets(selected)
    report.secrets = frozenset(secrets)
    check_resolved(selected, source, secrets, [f"{name}={value}" for name, value in settings.variables.items()])
    _set_runner_type(report, job, selected)
    _map_lines(report, job, selected, candidates)
    key = job.get_key(selected.command.statement)
    variables = map_job_launch(report, key, selected, job.options)
    _map_variables(report, job, selected, variables)
    for note in job.scope.notes:
        report.add_note(redact_secrets(note, secrets))
    return report


def _read_job(text: str, settings: ScriptSettings) -> tuple[_Job, MigrationReport]:
    check_characters(text)
    interpreter = re.match(r"#!\s*(\S+(?:[ \t]+[^\s-]\S*)?)", text)
    if interpreter and not _SHELL_PATTERN.search(interpreter[1]):
        raise ShellSyntaxError(f"{interpreter[1]} is not a supported shell: sh, bash, dash or ksh", 1)
    script, options = parse_script(text), SlurmOptions()
    first_line = min((statement.line for statement in script.statements), default=len(text))
    option_lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.startswith("#SBATCH")]
    values, lines, keys = _assign_keys(option_lines, script.statements)
    report = MigrationReport(values, lines, show_last_key_part_only=True)
    for key, (number, line) in zip(values, option_lines, strict=False):
        if number < first_line:
            report.mark_keys_handled((key,))
            options.add_line((key,), line, number)
        else:
            report.add_unmapped_key((key,), UnmappedReason.is_default, "sbatch ignores options below the first command")
    scope = Scope(settings.variables, options.build_variables())
    job = _Job(script, ScriptEvaluator(), options, scope, keys)
    job.evaluator.run(script.body, scope)
    return job, report


def _assign_keys(option_lines: list[tuple[int, str]], statements: list[Statement]) -> tuple[dict[str, str], dict[str, int], dict[int, str]]:
    """Return the text and the line number of each option line and statement by its key, and the keys of the statements by their ids."""
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    keys: dict[int, str] = {}

    def add(name: str, number: int, text: str) -> str:
        while name in values:
            name += "'"
        values[name], lines[name] = text, number
        return name

    for number, line in option_lines:
        add(" ".join(line.split()[:2])[:40].partition("=")[0], number, line)
    for statement in statements:
        keys[id(statement)] = add(_name_statement(statement), statement.line, statement.source)
    return values, lines, keys


def _name_statement(statement: Statement) -> str:
    text = re.sub(rf"^(?:{'|'.join(sorted(DECLARATIONS))})\s+(?:-\w+\s+)*", "", statement.source)
    return re.split(r"[\s=;]", text, maxsplit=1)[0].rstrip("'")[:40] or "line"


def _collect_secrets(selected: LaunchCandidate) -> set[str]:
    """Return the values of the variables whose names are those of secrets."""
    scope = selected.command.scope
    values = {name: scope.get(name) for name in (*scope.variables, *scope.constants)}
    return {value for name, value in values.items() if is_secret_name(name) and isinstance(value, str) and value and is_resolved(value)}


def _set_runner_type(report: MigrationReport, job: _Job, selected: LaunchCandidate) -> None:
    programs = [prefix.program for prefix in selected.launch.prefixes] if selected.launch else []
    uses_slurm = any(re.search(r"\bSLURM_\w|^srun\b", statement.source) for statement in job.script.statements)
    report.set_runner_type("slurm" if job.options.values or "srun" in programs or uses_slurm else "local")


def _map_lines(report: MigrationReport, job: _Job, selected: LaunchCandidate, candidates: list[LaunchCandidate]) -> None:
    """Map or report every statement except the selected launch command."""
    report.mark_keys_handled(job.get_key(selected.command.statement))
    candidates_by_statement = {id(candidate.command.statement): candidate for candidate in candidates}
    for statement in job.script.statements:
        if isinstance(statement, Header):
            _map_header(report, job, statement)
    is_before_launch = True
    for command in job.evaluator.commands:
        key = job.get_key(command.statement)
        is_before_launch = is_before_launch and command is not selected.command
        if report.is_key_handled(key):
            continue
        if command.unreached:
            report.add_unmapped_key(key, UnmappedReason.no_counterpart, command.unreached)
        elif id(command.statement) in candidates_by_statement:
            _report_other_candidate(report, key, candidates_by_statement[id(command.statement)], selected)
        elif not _is_assignment(job, command):
            map_script_line(report, key, command, is_before_launch=is_before_launch)
        elif is_before_launch and _depends_on_environment(command) and add_to_prelude(report, key, command):
            job.prelude.add(id(command.statement))
    for statement, reason in job.evaluator.skipped:
        if not report.is_key_handled(job.get_key(statement)):
            report.add_unmapped_key(job.get_key(statement), UnmappedReason.no_counterpart, reason)


def _depends_on_environment(command: EvaluatedCommand) -> bool:
    """Return whether the command exports a variable whose value is known only in the job, such as PATH=/opt/bin:$PATH."""
    is_export = bool(command.argv) and command.argv[0] == "export"
    for name, value in command.assigned.items():
        if not isinstance(value, str) or is_secret_name(name) or name in RENDEZVOUS_VARIABLES:
            continue
        names = [part.name for part in find_unresolved(value)]
        if (names and is_export) or name in names:
            return is_export or name in _PATH_VARIABLES
    return False


def _map_header(report: MigrationReport, job: _Job, header: Header) -> None:
    name = re.sub(r"^function\s+|\s*\(.*", "", header.source, flags=re.DOTALL)
    if job.evaluator.is_called(name):
        report.mark_keys_handled(job.get_key(header))
    elif not any(statement is header for statement, _ in job.evaluator.skipped):
        report.add_unmapped_key(job.get_key(header), UnmappedReason.no_counterpart, _CONSTRUCT_TEXT)


def _report_other_candidate(report: MigrationReport, key: KeyPath, candidate: LaunchCandidate, selected: LaunchCandidate) -> None:
    is_preparation = candidate.launch is None or candidate.precedence < selected.precedence
    text = "not the command that starts training: run it before swarmtrain deploy" if is_preparation else _OTHER_LAUNCH_TEXT
    report.add_unmapped_key(key, UnmappedReason.done_differently, text)


def _is_assignment(job: _Job, command: EvaluatedCommand) -> bool:
    """Return whether the command only sets variables; these are mapped where the launch command uses them."""
    name = command.argv[0] if command.argv else ""
    assigns_default = name == ":" and any(
        isinstance(part, ParameterExpansion) and part.operator in ("=", ":=") for word in command.command.words for part in word.parts
    )
    return not name or name in DECLARATIONS or assigns_default or job.evaluator.is_function(name)


def _map_variables(
    report: MigrationReport, job: _Job, selected: LaunchCandidate, launch_variables: Mapping[str, tuple[KeyPath, str]]
) -> None:
    """Map the exported variables, and `launch_variables`, which are set for the launch command only."""
    scope = selected.command.scope
    statements = [statement for statement in scope.exported.values() if statement is not None]
    for name, value in scope.get_exported_values().items():
        statement = scope.exported[name]
        if statement is None or name in launch_variables or id(statement) not in job.keys:
            continue
        key = job.get_key(statement) if statements.count(statement) == 1 else (*job.get_key(statement), name)
        if name in _find_used_names(selected) and " " in value:
            report.mark_keys_handled(key)  # a part of the command line
        elif is_resolved(value) or id(statement) not in job.prelude:
            _map_variable(report, key, name, value)
    for name, (key, value) in launch_variables.items():
        _map_variable(report, key, name, value)
    for command in job.evaluator.commands:
        key = job.get_key(command.statement)
        if not report.is_key_handled(key):
            _report_unused_assignment(report, key, command, set(scope.exported))


def _map_variable(report: MigrationReport, key: KeyPath, name: str, value: str) -> None:
    if name in RENDEZVOUS_VARIABLES and not is_resolved(value):
        source = str(report.get_source_value(key[:1]))
        report.add_unmapped_key(key, UnmappedReason.done_differently, RENDEZVOUS_TEXT, value=source)
        return
    if is_resolved(value) or is_secret_name(name):
        is_slurm = report.get_config_value("runner.runner_type") == "slurm"
        map_environment_variable(report, key, name, value, on_host_network=is_slurm)
        return
    names = list(dict.fromkeys(part.name for part in find_unresolved(value) if part.name))
    settings = f", or import with {' '.join(f'--set {unresolved}=VALUE' for unresolved in names)}" if names else ""
    report.add_unmapped_key(key, UnmappedReason.unknown, f"set runner.env.{name}{settings}", value=show_text(value))


def _report_unused_assignment(report: MigrationReport, key: KeyPath, command: EvaluatedCommand, exported: set[str]) -> None:
    """Report an export that does not reach the launch command; other assignments are handled by their use."""
    is_export, constants = bool(command.argv) and command.argv[0] == "export", command.scope.constants
    if is_export and any(name not in exported for name in command.assigned):
        report.add_unmapped_key(key, UnmappedReason.no_counterpart, "does not reach the launch command")
    elif command.assigned and all(name in constants for name in command.assigned):
        report.add_unmapped_key(key, UnmappedReason.done_differently, "overridden by --set")
    elif any(is_unknown("".join(value)) for value in command.assigned.values()):
        report.add_unmapped_key(key, UnmappedReason.done_differently, "known only in the job; the config does not depend on it")
    else:
        report.mark_keys_handled(key)


def _find_used_names(selected: LaunchCandidate) -> set[str]:
    """Return the names of the variables in the words of the launch command."""
    commands = (selected.command.command, selected.inner.command)
    return {name for command in commands for word in command.words for name in find_parameter_names(word)}
