"""Import an sbatch script that starts torchrun: its options, variables, launch command and container."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.launch_command import (
    RENDEZVOUS_TEXT,
    RENDEZVOUS_VARIABLES,
    LaunchCommand,
    add_shell_variable_note,
    map_environment_variable,
    map_launch_command,
    parse_launch_command,
    split_first_command,
)
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason, is_config_field, is_secret_name

_SHORT_OPTIONS = {
    "A": "account",
    "C": "constraint",
    "c": "cpus-per-task",
    "d": "dependency",
    "D": "chdir",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
_OPTIONS_WITHOUT_VALUE = (
    "exclusive",
    "requeue",
    "no-requeue",
    "no-kill",
    "overcommit",
    "oversubscribe",
    "contiguous",
    "parsable",
    "verbose",
)
_ASSIGNMENT_PATTERN = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=")
_COUNT_PATTERN = re.compile(r"(?:[a-zA-Z][\w.-]*:)*(\d+)")
# Options of sbatch for which the Slurm launcher has a setting, and options that the launcher sets itself.
_SLURM_SETTINGS = {name: name for name in ("account", "partition", "qos", "time", "gres", "constraint", "exclude")}
_SLURM_SETTINGS |= {"gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_node", "mem": "memory"}
_INTEGER_OPTIONS = ("gpus-per-node", "cpus-per-task")
_HANDLED_OPTIONS = ("job-name", "output", "error", "open-mode", "ntasks", "ntasks-per-node", "array", "parsable", "chdir")
_UNMAPPED_OPTIONS: dict[str, tuple[UnmappedReason, str]] = {
    "job-name": (UnmappedReason.done_differently, "the config file's name, or --name"),
    "output": (UnmappedReason.done_differently, "use swarmtrain logs; logs are kept on this machine"),
    "error": (UnmappedReason.done_differently, "use swarmtrain logs; logs are kept on this machine"),
    "open-mode": (UnmappedReason.done_differently, "use swarmtrain logs; logs are kept on this machine"),
    "ntasks": (UnmappedReason.done_differently, "each node starts a supervisor"),
    "cpus-per-task": (UnmappedReason.done_differently, "runner.docker_config.cpus, the limit of a node's container"),
    "mem": (UnmappedReason.done_differently, "runner.docker_config.memory"),
    "signal": (UnmappedReason.done_differently, "runner.stop_grace: the time for a final checkpoint"),
    "requeue": (UnmappedReason.done_differently, "runner.max_restarts"),
    "no-requeue": (UnmappedReason.done_differently, "runner.max_restarts: 0"),
    "nodelist": (UnmappedReason.done_differently, "runner.hosts"),
    "exclude": (UnmappedReason.done_differently, "runner.hosts"),
    "constraint": (UnmappedReason.done_differently, "runner.swarm.labels"),
}
_MAX_LINE_LENGTH = 20_000
_MAX_VARIABLE_DEPTH = 5  # nested variables
_GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "ntasks-per-gpu")
_PRELUDE_PATTERNS = (r"module |ml |spack |source |\. |conda |micromamba |mamba |pyenv |eval ", r"ulimit|umask")
_LINE_RULES: tuple[tuple[str, UnmappedReason, str], ...] = (
    (
        _PRELUDE_PATTERNS[0],
        UnmappedReason.done_differently,
        "put dependencies into the image: swarmtrain image build",
    ),
    (_PRELUDE_PATTERNS[1], UnmappedReason.done_differently, "each container has its own limits"),
    (
        r"(set|echo|date|hostname|nvidia-smi|printenv|env|trap|wait|sleep|pwd|ls|cat|scontrol|squeue|sstat|which|exit|:)\b",
        UnmappedReason.no_counterpart,
        "",
    ),
    (
        r"(for|while|if|then|else|elif|fi|do|done|case|esac|function|\{|\})\b|[{}]$|\w+\(\)",
        UnmappedReason.no_counterpart,
        "one run starts one script on all nodes",
    ),
    (r"(cd|pushd)\b", UnmappedReason.done_differently, "runner.script and runner.code are shipped with the run"),
    (
        r"(mkdir|rm|cp|mv|ln|rsync|tar|rclone)\b",
        UnmappedReason.done_differently,
        "runner.code, and runner.docker_config.docker_mounts for large files",
    ),
    (r"(pip|python -m pip|uv)\b", UnmappedReason.done_differently, "put dependencies into the image: swarmtrain image build"),
)
_CONTAINER_FLAGS = (
    "nv",
    "rocm",
    "cleanenv",
    "e",
    "containall",
    "C",
    "contain",
    "c",
    "writable-tmpfs",
    "writable",
    "no-home",
    "userns",
    "u",
    "fakeroot",
)


@dataclass
class _ScriptState:
    """Parser state of an sbatch script: its variables, sbatch options and launch commands so far."""

    variables: dict[str, str] = field(default_factory=dict)
    exported: dict[str, tuple[KeyPath, str]] = field(default_factory=dict)
    options: dict[str, tuple[KeyPath, str]] = field(default_factory=dict)
    launches: list[tuple[KeyPath, LaunchCommand]] = field(default_factory=list)
    used_variables: set[str] = field(default_factory=set)
    """Names of shell variables to which other lines of the script refer."""


def parse_sbatch_script(text: str, source: str) -> MigrationReport:
    """Return the migration report of an sbatch script. Raises ConfigError if no line of the script starts training."""
    lines, job = list(_iterate_logical_lines(text)), _ScriptState()
    report = MigrationReport(*_assign_line_keys(lines), show_last_key_part_only=True)
    is_queued = re.search(r"#SBATCH|\bsrun\b|\bSLURM_", text) is not None
    report.set_runner_type("slurm" if is_queued else "local")
    _parse_sbatch_options(report, job, lines)
    for key, line in zip(report.source, (line for _, line in lines), strict=True):
        if not line.startswith("#SBATCH"):
            _map_script_line(report, job, (key,), line)
    if not job.launches:
        raise ConfigError(
            (Problem("", "starts neither torchrun nor python", hint="pass the script that calls torchrun"),),
            source=source,
        )
    _map_job_launch(report, job)
    return report


def _assign_line_keys(lines: list[tuple[int, str]]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the text and the number of each line, both by a unique key that is derived from the beginning of the line."""
    values: dict[str, str] = {}
    numbers: dict[str, int] = {}
    for number, line in lines:
        name = (
            " ".join(line.split()[:2])[:40] if line.startswith("#SBATCH") else re.split(r"[\s=]", line.removeprefix("export ").strip())[0]
        )
        name = name.partition("=")[0]
        while name in values:
            name += "'"
        values[name], numbers[name] = line, number
    return values, numbers


def _iterate_logical_lines(script_text: str) -> Iterator[tuple[int, str]]:
    """Yield each logical line of the shell script, with the number of its first line.

    Lines are joined at backslashes, and inside quotes and array parentheses.
    """
    first_number, pending, heredoc_end = 0, "", ""
    for number, raw_line in enumerate(script_text.splitlines(), 1):
        line = raw_line.rstrip()
        if heredoc_end:
            heredoc_end = "" if line.strip() == heredoc_end else heredoc_end
            continue
        if not pending:
            stripped = line.strip()
            if not stripped or (stripped.startswith("#") and not stripped.startswith("#SBATCH")):
                continue
            first_number, line = number, stripped
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        if not pending.startswith("#SBATCH") and _is_incomplete_line(pending):
            pending += "\n"
            continue
        if heredoc := re.search(r"<<-?\s*['\"]?(\w+)", pending):
            heredoc_end = heredoc[1]
        yield first_number, pending.strip()
        pending = ""
    if pending:
        yield first_number, pending.strip()


def _is_incomplete_line(text: str) -> bool:
    if len(text) > _MAX_LINE_LENGTH:
        return False
    unescaped = re.sub(r"\\.", "", text)
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", unescaped)
    array_start = re.match(r"(?:export\s+|local\s+|declare\s+-a\s+)?\w+\+?=\(", unquoted)
    return '"' in unquoted or "'" in unquoted.partition("#")[0] or bool(array_start and unquoted.count("(") > unquoted.count(")"))


def _parse_sbatch_options(report: MigrationReport, job: _ScriptState, lines: list[tuple[int, str]]) -> None:
    for key, (_, line) in zip(list(report.source), lines, strict=True):
        if not line.startswith("#SBATCH"):
            continue
        report.mark_keys_handled((key,))
        words = line.removeprefix("#SBATCH").partition(" #")[0].split()
        while words:
            word = words.pop(0)
            name, has_value, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                name, has_value, value = _SHORT_OPTIONS.get(word[1:2], word[1:2]), word[2:], word[2:]
            if not has_value and name not in _OPTIONS_WITHOUT_VALUE and words:
                value = words.pop(0)
            job.options[name] = ((key, f"#SBATCH --{name}"), value.strip("\"'"))


def _map_script_line(report: MigrationReport, job: _ScriptState, source_key: KeyPath, line: str) -> None:
    if len(line) > _MAX_LINE_LENGTH:
        report.add_unmapped_key(source_key, UnmappedReason.unknown, "the line is too long")
        return
    try:
        if _ASSIGNMENT_PATTERN.match(line):
            _map_variable_assignment(report, job, source_key, line)
            return
        launch = parse_launch_command(_expand_shell_variables(job, line))
    except ValueError as error:
        report.add_unmapped_key(source_key, UnmappedReason.unknown, f"cannot be read: {error}".lower())
        return
    if launch is not None and not re.match(r"(pip|echo|conda|source)\b", line):
        job.launches.append((source_key, launch))
        return
    for pattern, reason, replacement in _LINE_RULES:
        if re.match(pattern, line):
            if pattern in _PRELUDE_PATTERNS and _has_slurm_setting(report, "prelude"):
                _append_slurm_setting(report, source_key, "prelude", line)
            else:
                report.add_unmapped_key(source_key, reason, replacement)
            return
    report.add_unmapped_key(source_key, UnmappedReason.no_counterpart, "a custom command of the script")


def _map_variable_assignment(report: MigrationReport, job: _ScriptState, source_key: KeyPath, line: str) -> None:
    is_export, assignment = line.startswith("export "), line.removeprefix("export ").strip()
    array_match = re.fullmatch(r"(\w+)=\((.*)\)", assignment, re.DOTALL)
    if array_match:
        job.variables[array_match[1]] = " ".join(_expand_shell_variables(job, array_match[2]).split())
        report.mark_keys_handled(source_key)
        return
    if re.fullmatch(r"\w+=\"?(\$\(.*\)|`[^`]*`)\"?", assignment, re.DOTALL):
        name = assignment.partition("=")[0]
        is_rendezvous = name in RENDEZVOUS_VARIABLES or re.search(r"scontrol|hostname|SLURM_JOB_ID|shuf|python", assignment) is not None
        report.add_unmapped_key(
            source_key,
            UnmappedReason.done_differently if is_rendezvous else UnmappedReason.unknown,
            RENDEZVOUS_TEXT if is_rendezvous else "the output of a command: set its value in runner.env",
        )
        return
    try:
        words, launch = (
            split_first_command(_expand_shell_variables(job, assignment)),
            None if is_export else parse_launch_command(_expand_shell_variables(job, assignment)),
        )
    except ValueError:
        words, launch = [assignment], None
    if launch is not None:
        job.launches.append((source_key, launch))
        return
    report.mark_keys_handled(source_key)
    for word in words:
        name, has_value, value = word.partition("=")
        if has_value and name.isidentifier():
            job.variables[name] = value
            if is_export:
                job.exported[name] = ((*source_key, name) if len(words) > 1 else source_key, value)


def _expand_shell_variables(job: _ScriptState, text: str) -> str:
    """Return `text` with the shell variables of known value expanded, and the others unchanged.

    Raises ValueError if the expanded text is too long.
    """
    nodes, ranks = job.options.get("nodes", ((), ""))[1], _count_gpus_per_node(job)
    slurm = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_GPUS_ON_NODE": str(ranks or ""),
        "SLURM_GPUS_PER_NODE": str(ranks or ""),
    }
    slurm |= {
        name: job.options.get(option, ((), ""))[1]
        for name, option in (("SLURM_CPUS_PER_TASK", "cpus-per-task"), ("SLURM_NTASKS", "ntasks"))
    }
    slurm["SLURM_NTASKS_PER_NODE"] = job.options.get("ntasks-per-node", ((), ""))[1]
    values = {**{name: value for name, value in slurm.items() if value}, **job.variables}
    text = re.sub(
        r'"\$\{(\w+)\[[@*]\]\}"|\$\{(\w+)\[[@*]\]\}', lambda match: values.get(match[1] or match[2], match[0]), text.replace("\\$", "$")
    )
    text = re.sub(r"\$\(\(\s*\$?\{?(\w+)\}?\s*\*\s*\$?\{?(\w+)\}?\s*\)\)", lambda match: _evaluate_multiplication(values, match), text)
    job.used_variables.update(re.findall(r"\$\{?(\w+)", text))
    for _ in range(_MAX_VARIABLE_DEPTH):
        if len(text) > _MAX_LINE_LENGTH:
            raise ValueError("the line is too long once variables are expanded")
        text = re.sub(r"\$(?:(\w+)|\{(\w+)\}|\{(\w+):-([^{}]*)\})", lambda match: _substitute_variable(values, match), text)
    return text


def _evaluate_multiplication(variable_values: dict[str, str], match: re.Match[str]) -> str:
    left, right = (variable_values.get(name, name) for name in match.groups())
    return str(int(left) * int(right)) if left.isdigit() and right.isdigit() else match[0]


def _substitute_variable(variable_values: dict[str, str], match: re.Match[str]) -> str:
    name = match[1] or match[2] or match[3]
    return variable_values.get(name, match[4] if match[3] else match[0])


def _count_gpus_per_node(job: _ScriptState) -> int | None:
    """Return the number of GPUs per node from the script's sbatch options; None if they do not determine it."""
    for name in _GPU_OPTIONS[:2]:
        count = _COUNT_PATTERN.fullmatch(job.options[name][1].partition(",")[0]) if name in job.options else None
        if count:
            return int(count[1])
    nodes, total = job.options.get("nodes", ((), "1"))[1], job.options.get("gpus", ((), ""))[1]
    count = _COUNT_PATTERN.fullmatch(total)
    if count and nodes.isdigit() and int(nodes) and int(count[1]) % int(nodes) == 0:
        return int(count[1]) // int(nodes)
    return None


def _map_job_launch(report: MigrationReport, job: _ScriptState) -> None:
    (key, launch), *other_launches = job.launches
    for other_key, _ in other_launches:
        report.add_unmapped_key(other_key, UnmappedReason.done_differently, "a run starts one script: write a separate config")
    wrapper_variables = _map_wrapper_commands(report, (*key, "wrapper"), launch)
    nodes, slots = map_launch_command(report, key, launch)
    _map_node_counts(report, job, launch, nodes, slots)
    for name, (source_key, value) in {**job.exported, **wrapper_variables}.items():
        if name in job.used_variables and " " in value:  # a part of the command line
            report.mark_keys_handled(source_key)
            continue
        map_environment_variable(report, source_key, name, value, on_host_network=report.get_config_value("runner.runner_type") == "slurm")
    for name, (source_key, value) in job.options.items():
        _map_sbatch_option(report, source_key, name, value)
    if _count_gpus_per_node(job):
        report.add_gpu_visibility_setting()


def _map_node_counts(report: MigrationReport, job: _ScriptState, launch: LaunchCommand, nodes: int | None, slots: int | None) -> None:
    source_key, nodes_text = job.options.get("nodes", (("nodes",), ""))
    low, _, high = nodes_text.partition("-")
    if low.isdigit() and high.isdigit() and high != low:
        report.map_key(source_key, "runner.min_nodes", int(low))
        report.set_config_value("runner.max_nodes", int(high))
    elif low.isdigit():
        report.map_key(source_key, "runner.nodes", int(low))
        if nodes is not None and nodes != int(low):
            report.add_note(f"torchrun has --nnodes {nodes}, and #SBATCH --nodes {low}: runner.nodes is {low}")
    elif nodes is not None:
        report.set_config_value("runner.nodes", nodes)
    if nodes and nodes > 1 and report.get_config_value("runner.runner_type") == "local":
        report.set_runner_type("swarm")
    per_node = job.options.get("ntasks-per-node", ((), ""))
    is_plain_python = launch.program == "python"
    ranks = slots or (int(per_node[1]) if is_plain_python and per_node[1].isdigit() else None) or _count_gpus_per_node(job)
    if ranks is not None:
        report.set_config_value("runner.default_gpu_count", ranks)
    if per_node[0]:
        report.add_unmapped_key(
            per_node[0],
            UnmappedReason.done_differently,
            "runner.default_gpu_count" if is_plain_python else "each node starts a supervisor",
            value=per_node[1],
        )
    for name in _GPU_OPTIONS:
        if name in job.options and not _has_slurm_setting(report, "options"):
            gpu_key, value = job.options[name]
            is_consistent = name in _GPU_OPTIONS[:3] and _count_gpus_per_node(job) == ranks is not None
            report.mark_keys_handled(gpu_key) if is_consistent else report.add_unmapped_key(
                gpu_key, UnmappedReason.done_differently, "runner.default_gpu_count", value=value
            )
        elif name == "gpus" and name in job.options and _count_gpus_per_node(job):
            report.map_key(job.options[name][0], "runner.slurm.gpus_per_node", _count_gpus_per_node(job))
    if is_plain_python and ranks and ranks > 1:
        report.add_note("srun started one process per rank; now torchrun does, and sets RANK and WORLD_SIZE in the script's environment")


def _map_sbatch_option(report: MigrationReport, source_key: KeyPath, name: str, value: str) -> None:
    if report.is_key_handled(source_key):
        return
    if _has_slurm_setting(report, "options") and name not in _HANDLED_OPTIONS:
        _map_option_to_slurm_launcher(report, source_key, name, value)
    elif name in _UNMAPPED_OPTIONS:
        report.add_unmapped_key(source_key, *_UNMAPPED_OPTIONS[name], value=value)
    else:
        is_queue_option = name in ("partition", "account", "qos", "time", "dependency", "array")
        report.add_unmapped_key(
            source_key, UnmappedReason.no_counterpart, "only Slurm has a queue; a swarm has none" if is_queue_option else "", value=value
        )


def _has_slurm_setting(report: MigrationReport, name: str) -> bool:
    """Return whether the import targets Slurm and the Slurm launcher has the setting `name`."""
    return report.get_config_value("runner.runner_type") == "slurm" and is_config_field(f"runner.slurm.{name}")


def _append_slurm_setting(report: MigrationReport, source_key: KeyPath, name: str, value: str) -> None:
    path = f"runner.slurm.{name}"
    report.map_key(source_key, path, [*(report.get_config_value(path) or ()), value])


def _map_option_to_slurm_launcher(report: MigrationReport, source_key: KeyPath, name: str, value: str) -> None:
    """Map an sbatch option to its setting of the Slurm launcher; if the launcher has none, copy the option to runner.slurm.options."""
    lead_match = re.search(r"@(\d+)$", value)
    if name in _SLURM_SETTINGS and _has_slurm_setting(report, _SLURM_SETTINGS[name]) and (value.isdigit() or name not in _INTEGER_OPTIONS):
        report.map_key(source_key, f"runner.slurm.{_SLURM_SETTINGS[name]}", int(value) if name in _INTEGER_OPTIONS else value)
    elif name in ("requeue", "no-requeue") and _has_slurm_setting(report, "requeue"):
        report.map_key(source_key, "runner.slurm.requeue", name == "requeue")
    elif name == "signal" and lead_match and _has_slurm_setting(report, "signal_seconds"):
        report.map_key(source_key, "runner.slurm.signal_seconds", int(lead_match[1]))
    else:
        _append_slurm_setting(report, source_key, "options", f"--{name}={value}" if value else f"--{name}")


def _map_wrapper_commands(report: MigrationReport, wrapper_key: KeyPath, launch: LaunchCommand) -> dict[str, tuple[KeyPath, str]]:
    """Convert the wrapper commands in front of the launcher, such as srun or apptainer, to config settings.

    Return the environment variables that these commands set, each with its source key and value.
    """
    variables: dict[str, tuple[KeyPath, str]] = {}
    words, program = list(launch.wrapper_words), ""
    while words:
        word = words.pop(0)
        program_name, source_key = PurePosixPath(word).name, (*wrapper_key[:-1], word.partition("=")[0])
        if program_name in ("apptainer", "singularity"):
            program = program_name
            words[:1] = [] if words[:1] in (["exec"], ["run"]) else words[:1]
        elif program_name in ("srun", "env", "mpirun", "numactl", "time", "nohup", "exec"):
            program = program_name
        elif word.startswith("-"):
            value = _take_option_value(word, words, program)
            source_key = (*wrapper_key[:-1], f"{program or 'shell'} {word.partition('=')[0]}")
            if program == "mpirun" and word == "-x" and "=" in value:
                variables[value.partition("=")[0]] = ((*source_key, value.partition("=")[0]), value.partition("=")[2])
            elif program in ("apptainer", "singularity"):
                _map_container_option(report, source_key, word.lstrip("-").partition("=")[0], value, variables)
            else:
                is_launcher = program in ("srun", "mpirun")
                sets_ranks = word in ("-n", "-np", "--ntasks", "--ntasks-per-node")
                replacement = "runner.nodes and runner.default_gpu_count" if sets_ranks else "a supervisor is started on each node"
                unmapped = (UnmappedReason.done_differently, replacement) if is_launcher else (UnmappedReason.no_counterpart, "")
                report.add_unmapped_key(
                    source_key, *unmapped, value=f"{value} {words.pop(0)}" if word.endswith("-mca") and words else value
                )
        elif program in ("apptainer", "singularity"):
            _map_image(report, (*wrapper_key[:-1], "image"), word, program)
            program = ""
        elif "=" in word and source_key[-1].isidentifier():
            variables[source_key[-1]] = (source_key, word.partition("=")[2])
        else:
            report.add_unmapped_key(source_key, UnmappedReason.no_counterpart, "", value=word)
    return variables


def _take_option_value(option: str, remaining_words: list[str], program: str) -> str:
    """Return the value of `option`. If the value is the next word, it is removed from `remaining_words`."""
    name, has_value, value = option.lstrip("-").partition("=")
    has_no_value = name in (_CONTAINER_FLAGS if program in ("apptainer", "singularity") else _SRUN_FLAGS)
    return value if has_value or has_no_value or not remaining_words or remaining_words[0].startswith("-") else remaining_words.pop(0)


def _map_container_option(
    report: MigrationReport, source_key: KeyPath, name: str, value: str, variables: dict[str, tuple[KeyPath, str]]
) -> None:
    """Map an option of apptainer, and add the variables that the option sets to `variables`."""
    apptainer_path = "runner.slurm.apptainer"
    if _has_slurm_setting(report, "apptainer.binds") and name in ("B", "bind", "nv", "home", "H", "env"):
        if name in ("B", "bind"):
            add_shell_variable_note(report, f"{apptainer_path}.binds", value)
            report.map_key(
                source_key, f"{apptainer_path}.binds", [*(report.get_config_value(f"{apptainer_path}.binds") or ()), *value.split(",")]
            )
        elif name == "env":
            pairs = dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair)
            report.map_key(
                source_key, f"{apptainer_path}.env", {variable: text for variable, text in pairs.items() if not is_secret_name(variable)}
            )
            for variable in filter(is_secret_name, pairs):
                report.add_unmapped_key(
                    (*source_key, variable), UnmappedReason.done_differently, f"runner.secrets: {{{variable}: FILE}}", value="…"
                )
        else:
            report.map_key(source_key, f"{apptainer_path}.{'nv' if name == 'nv' else 'home'}", True if name == "nv" else value)
    elif name in ("B", "bind"):
        previous_mounts = report.get_config_value("runner.docker_config.docker_mounts") or []
        if mounts := [*previous_mounts, *_parse_bind_mounts(report, source_key, value)]:
            report.set_config_value("runner.docker_config.docker_mounts", mounts)
    elif name == "env":
        variables |= {pair.partition("=")[0]: ((*source_key, pair.partition("=")[0]), pair.partition("=")[2]) for pair in value.split(",")}
    elif name == "nv":
        report.add_gpu_visibility_setting()
    else:
        report.add_unmapped_key(source_key, UnmappedReason.no_counterpart, "", value=value)


_SRUN_FLAGS = ("l", "label", "u", "unbuffered", "exclusive", "K", "k", "no-kill", "overlap", "verbose", "v", "wait")


def _parse_bind_mounts(report: MigrationReport, source_key: KeyPath, option_value: str) -> list[tuple[str, str]]:
    mounts = []
    for bind in option_value.split(","):
        source, _, target = bind.partition(":")
        target, _, mode = target.partition(":")
        if "$" in bind or not source.startswith("/"):
            report.add_unmapped_key((*source_key, bind), UnmappedReason.unknown, "runner.docker_config.docker_mounts", value=bind)
        else:
            mounts.append((source, target or source))
            if mode == "ro":
                report.add_unmapped_key((*source_key, bind), UnmappedReason.no_counterpart, "mounts are always writable", value=bind)
    return mounts


def _map_image(report: MigrationReport, source_key: KeyPath, image_argument: str, program: str) -> None:
    if _has_slurm_setting(report, "apptainer.image"):
        report.map_key(source_key, "runner.slurm.apptainer.image", image_argument)
        if program == "singularity":
            report.set_config_value("runner.slurm.apptainer.program", program)
    elif image_argument.startswith("docker://") and "$" not in image_argument:
        report.map_key(source_key, "runner.docker_config.docker_container", image_argument.removeprefix("docker://"))
    else:
        report.add_unmapped_key(
            source_key,
            UnmappedReason.done_differently,
            "set runner.docker_config.docker_container to an image in a registry, built with swarmtrain image build",
            value=image_argument,
        )
