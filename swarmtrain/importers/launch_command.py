"""Parse command lines that start training: torchrun and its equivalents, including the script and wrappers such as srun or a container."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from swarmtrain.config.schema.runner import MODULE_PATTERN, NcclConfig
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason, is_secret_name

RENDEZVOUS_TEXT = "determined by the run's rendezvous"
_LOGS_TEXT = "swarmtrain logs shows all ranks in one stream"
_FLAGS_WITHOUT_VALUE = {
    "standalone",
    "module",
    "no_python",
    "run_path",
    "use_env",
    "multi_gpu",
    "use_fsdp",
    "use_deepspeed",
    "no_ssh",
    "cpu",
}
_SHORT_FLAGS = {"m": "module", "r": "redirects", "t": "tee", "H": "hostfile", "i": "include", "e": "exclude"}
# Flags of other launchers, mapped to torchrun's names of the same flags.
_TORCHRUN_FLAG_NAMES = {
    "num_machines": "nnodes",
    "num_nodes": "nnodes",
    "num_gpus": "nproc_per_node",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}
_UNMAPPED_FLAGS = {
    **dict.fromkeys(
        ("node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "master_addr", "standalone", "local_addr"), RENDEZVOUS_TEXT
    ),
    **dict.fromkeys(("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs"), _LOGS_TEXT),
    "monitor_interval": "each node's supervisor monitors its ranks",
    "use_env": "torchrun always does so",
    "config_file": "import that file too, with swarmtrain import",
    "hostfile": "use --hostsfile FILE, which fills runner.hosts",
    "no_ssh": RENDEZVOUS_TEXT,
}
RENDEZVOUS_VARIABLES = frozenset(
    (
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "RANK",
        "NODE_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "NNODES",
        "GPUS_PER_NODE",
    )
)
_MAX_PORT = 65535
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_REDIRECTION_PATTERN = re.compile("[<>]")
_LAUNCHER_PATTERN = r"srun|mpirun|torchrun|deepspeed|accelerate launch|(?:singularity|apptainer) (?:exec|run)|python[\d.]*"
_TRAINING_LINE_PATTERN = re.compile(rf"^\s*(?:export )?(?:\w+=(?:\S+\s+|[\"'])?)*(?:{_LAUNCHER_PATTERN})\s", re.MULTILINE)
_SHELL_VARIABLE_PATTERN = re.compile(r"\$(\w+|\{)|\$\(|`")


@dataclass(frozen=True)
class LaunchCommand:
    """Parsed launch command. Its flags have the names of torchrun's flags, without dashes."""

    program: str
    flags: dict[str, str] = field(default_factory=dict)
    script: str = ""
    args: tuple[str, ...] = ()
    wrapper_words: tuple[str, ...] = ()
    """Words of the wrapper command in front of the launcher: for example srun, a container command, or variable assignments."""
    other_commands: tuple[str, ...] = ()
    """The other parts of the shell line: further commands, and output redirections."""


def parse_launch_command(text: str) -> LaunchCommand | None:
    """Return the first launch command in the shell line `text`; None if the line does not start training.

    The result also contains the rest of the line. Raises ValueError if the line cannot be parsed.
    """
    launch_command, other_commands = None, []
    for operator, words in _split_commands(text):
        launch = None if launch_command or _REDIRECTION_PATTERN.search(operator) else parse_launch_argv(words)
        if launch is None and not (operator == ">&" and words[:1] in (["1"], ["2"])):
            other_commands.append(" ".join([*([operator] if operator else []), *words]))
        launch_command = launch_command or launch
    return launch_command and replace(
        launch_command, other_commands=(*launch_command.other_commands, *(text for text in other_commands if text.strip("&|;() ")))
    )


def parse_launch_argv(argv: Sequence[str]) -> LaunchCommand | None:
    """Return the launch command parsed from `argv`; None if it does not start training. Raises ValueError if it is invalid."""
    for index, word in enumerate(argv):
        name, wrapper_words, remaining_words = PurePosixPath(word).name, tuple(argv[:index]), list(argv[index + 1 :])
        launch_command = None
        if re.match(r"\w+=", word):
            continue
        if name in ("bash", "sh") and remaining_words[:1] and remaining_words[0] in ("-c", "-lc", "-ic"):
            launch_command = parse_launch_command(" ".join(remaining_words[1:2]))
            return launch_command and replace(launch_command, wrapper_words=(*wrapper_words, *launch_command.wrapper_words))
        if name in ("torchrun", "deepspeed"):
            launch_command = _parse_launcher_argv(name, remaining_words)
        elif name == "accelerate" and remaining_words[:1] == ["launch"]:
            launch_command = _parse_launcher_argv("accelerate launch", remaining_words[1:])
        elif re.fullmatch(r"python[\d.]*", name):
            launch_command = _parse_python_argv([*itertools.dropwhile(lambda option: option in ("-u", "-O", "-B"), remaining_words)])
        if launch_command is not None:
            return replace(launch_command, wrapper_words=wrapper_words)
    return None


def _parse_python_argv(arguments: list[str]) -> LaunchCommand | None:
    if arguments[:1] != ["-m"]:
        return LaunchCommand("python", {}, arguments[0], tuple(arguments[1:])) if arguments and arguments[0].endswith(".py") else None
    if arguments[1:2] and arguments[1] in ("torch.distributed.run", "torch.distributed.launch"):
        return _parse_launcher_argv("torchrun", arguments[2:])
    return LaunchCommand("python", {"module": ""}, arguments[1], tuple(arguments[2:])) if arguments[1:] else None


def split_first_command(text: str) -> list[str]:
    """Return the words of the first command in the shell line `text`. Raises ValueError if the line cannot be parsed."""
    return next(iter(_split_commands(text)), ("", []))[1]


def _split_commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands and redirections in the shell line `text`, as pairs of an operator (such as && or >) and words.

    Raises ValueError if the line cannot be parsed.
    """
    quoted_text = re.sub(r"(?<=\s)[12](?=>)", "", re.sub(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`", _quote_command_substitution, text))
    lexer = shlex.shlex(quoted_text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    commands: list[tuple[str, list[str]]] = [("", [])]
    for word in lexer:
        if word and set(word) <= set(";&|<>()"):
            commands.append((word, []))
        else:
            commands[-1][1].append(word)
    return commands


def map_launch_command(report: MigrationReport, key: KeyPath, launch: LaunchCommand) -> tuple[int | None, int | None]:
    """Map a launch command to the config. Return the number of nodes and of ranks per node, each None if not given as a number."""
    report.mark_keys_handled(key)
    nodes, slots = None, None
    for flag, value in launch.flags.items():
        flag_key = (*key, f"{launch.program} --{flag}")
        if flag == "nnodes" and re.fullmatch(r"\d+:\d+", value):
            low, high = map(int, value.split(":"))
            nodes = low
            report.map_key(flag_key, "runner.min_nodes", low)
            report.map_key(flag_key, "runner.max_nodes", high)
        elif flag == "nnodes" and value.isdigit():
            nodes = int(value)
            report.mark_keys_handled(flag_key)
        elif flag == "nproc_per_node" and value.isdigit():
            slots = int(value)
            report.mark_keys_handled(flag_key)
        elif flag == "nproc_per_node" and value in ("gpu", "auto"):
            report.add_unmapped_key(flag_key, UnmappedReason.is_default, "one rank per GPU that the cluster reports", value=value)
        elif flag == "master_port" and value.isdigit() and int(value) < _MAX_PORT:
            report.map_key(flag_key, "runner.master_port", int(value))
        elif flag == "max_restarts" and value.isdigit():
            report.map_key(flag_key, "runner.max_restarts", int(value))
            report.add_note("runner.max_restarts counts consecutive failures without a new step between them; torchrun counts all failures")
        elif flag == "numa_binding":
            report.map_key(flag_key, "runner.numa", value)
        elif flag == "module":
            _map_module(report, flag_key, launch.script)
        elif flag in _UNMAPPED_FLAGS:
            report.add_unmapped_key(flag_key, UnmappedReason.done_differently, _UNMAPPED_FLAGS[flag], value=value)
        elif _SHELL_VARIABLE_PATTERN.search(value) and flag in ("nnodes", "nproc_per_node", "num_processes", "master_port", "max_restarts"):
            replacement = {
                "nnodes": "runner.nodes",
                "nproc_per_node": "runner.default_gpu_count",
                "num_processes": "runner.default_gpu_count",
            }.get(flag, f"runner.{flag}")
            report.add_unmapped_key(flag_key, UnmappedReason.unknown, f"a shell variable: set {replacement}", value=value)
        else:
            report.add_unmapped_key(flag_key, UnmappedReason.no_counterpart, "", value=value)
    _map_script(report, key, launch)
    return nodes, slots


def _map_module(report: MigrationReport, flag_key: KeyPath, module: str) -> None:
    if re.match(MODULE_PATTERN, module):
        report.map_key(flag_key, "runner.module", module)
    else:
        report.add_unmapped_key(flag_key, UnmappedReason.unknown, "not the name of a module: set runner.module", value=module)


def map_environment_variable(report: MigrationReport, key: KeyPath, name: str, value: Any, *, on_host_network: bool = False) -> None:
    """Map the environment variable `name` of the ranks.

    `on_host_network`: interface names in the variable's value are those of machines, not of containers.
    """
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    setting = _find_nccl_setting(name, text)
    if name in RENDEZVOUS_VARIABLES:
        report.add_unmapped_key(key, UnmappedReason.done_differently, RENDEZVOUS_TEXT, value=text)
    elif is_secret_name(name):
        report.add_unmapped_key(
            key, UnmappedReason.done_differently, f"runner.secrets: {{{name}: FILE}}; ranks find the file's path in {name}_FILE", value="…"
        )
    elif name in _INTERFACE_VARIABLES and on_host_network and re.fullmatch(r"[A-Za-z][\w.@-]{0,14}", text):
        report.map_key(key, "runner.interface", text)
    elif name in _INTERFACE_VARIABLES:
        report.add_unmapped_key(
            key, UnmappedReason.done_differently, "the interface is detected; to override it, set runner.interface", value=text
        )
    elif setting is not None:
        report.map_key(key, ("runner", "nccl", setting[0]), setting[1])
    else:
        report.map_key(key, ("runner", "env", name), text)
        add_shell_variable_note(report, f"runner.env.{name}", text)


def is_training_script(text: str) -> bool:
    """Return whether a line of `text` starts training."""
    return _TRAINING_LINE_PATTERN.search(text) is not None


def add_shell_variable_note(report: MigrationReport, field_path: str, config_value: str) -> None:
    """Add a note if `config_value`, at `field_path`, contains shell syntax that only the imported file's shell would have expanded."""
    if _SHELL_VARIABLE_PATTERN.search(config_value):
        report.add_note(f"{field_path} contains {config_value}, which only the original shell can expand: replace it with its value")


def _map_script(report: MigrationReport, key: KeyPath, launch: LaunchCommand) -> None:
    for index, text in enumerate(launch.other_commands):
        replacement = _LOGS_TEXT if _REDIRECTION_PATTERN.search(text) else "install or copy it in the image: swarmtrain image build"
        report.add_unmapped_key((*key, f"other command {index}"), UnmappedReason.done_differently, replacement, value=text)
    if launch.script and "module" not in launch.flags:
        report.map_key((*key, "script"), "runner.script", launch.script)
        add_shell_variable_note(report, "runner.script", launch.script)
        if launch.script.startswith("/"):
            report.add_note("runner.script is read on the machine that runs swarmtrain, not in the container: use the path on that machine")
    if launch.args:
        report.map_key((*key, "script_args"), "runner.script_args", list(launch.args))
        for arg in launch.args:
            if arg.startswith("--") and is_secret_name(arg.partition("=")[0]):
                report.add_note(
                    f"runner.script_args has {arg.partition('=')[0]}: configs are stored with checkpoints, so put secrets into "
                    f"runner.secrets"
                )
            add_shell_variable_note(report, "runner.script_args", arg)


def _parse_launcher_argv(program: str, arguments: list[str]) -> LaunchCommand:
    flags: dict[str, str] = {}
    while arguments and arguments[0].startswith("-"):
        word = arguments.pop(0)
        name, has_value, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_") if word.startswith("--") else _SHORT_FLAGS.get(name, name)
        name = _TORCHRUN_FLAG_NAMES.get(name, name)
        if not has_value and name not in _FLAGS_WITHOUT_VALUE:
            value = arguments.pop(0) if arguments else ""
        flags[name] = value
    if "num_processes" in flags and flags["num_processes"].isdigit():
        nodes = int(flags.get("nnodes", "1")) if flags.get("nnodes", "1").isdigit() else 1
        flags["nproc_per_node"] = str(int(flags.pop("num_processes")) // max(1, nodes))
    return LaunchCommand(program, flags, arguments[0] if arguments else "", tuple(arguments[1:]))


def _find_nccl_setting(variable_name: str, variable_value: str) -> tuple[str, Any] | None:
    """Return the field of runner.nccl that is equivalent to `variable_name`, and its value; None if there is no such field."""
    setting = variable_name.removeprefix("NCCL_").lower()
    if not variable_name.startswith("NCCL_") or setting not in NcclConfig.model_fields:
        return None
    equivalents = ({variable_name: variable_value}, {variable_name: variable_value.upper()})
    for value in (
        {"0": False, "1": True}.get(variable_value),
        int(variable_value) if variable_value.isdigit() else None,
        variable_value,
        variable_value.upper(),
    ):
        try:
            if value is not None and NcclConfig.model_validate_json(json.dumps({setting: value})).environment in equivalents:
                return setting, value
        except ValidationError:
            continue
    return None


def _quote_command_substitution(match: re.Match[str]) -> str:
    """Quote a matched command substitution so that it stays one word. Inside double quotes it is one word already."""
    return match[0] if match.string[: match.start()].count('"') % 2 else shlex.quote(match[0])
