"""Map command lines that start training to config fields: the flags of the launcher, the script with its arguments, and variables."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

from swarmtrain.config.schema.runner import MODULE_PATTERN, NcclConfig
from swarmtrain.importers.launcher_arguments import LaunchCommand
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason, is_secret_name
from swarmtrain.importers.secret_values import is_secret_value, remove_secret_arguments
from swarmtrain.importers.shell.unresolved import is_resolved, show_text

RENDEZVOUS_TEXT = "determined by the run's rendezvous"
_LOGS_TEXT = "swarmtrain logs shows all ranks in one stream"
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
_ACCELERATE_TEXT = "write it to an accelerate config, import that, and copy its runner.env"
_IMAGE_TEXT = "install or copy it in the image: swarmtrain image build"
# Settings to use for flags whose values are not known at import.
_FLAG_SETTINGS = {
    "nnodes": "runner.nodes",
    "nproc_per_node": "runner.default_gpu_count",
    "num_processes": "runner.default_gpu_count",
    "master_port": "runner.master_port",
    "max_restarts": "runner.max_restarts",
}


def map_launch_command(report: MigrationReport, key: KeyPath, launch: LaunchCommand) -> tuple[int | None, int | None]:
    """Map a launch command to the config, without arguments that contain secrets.

    Return the number of nodes and of ranks per node, each None if it is not a number.
    """
    report.mark_keys_handled(key)
    for flag, value in launch.flags.items():
        _map_flag(report, (*key, f"{launch.program} --{flag}"), flag, value, launch)
    for option in launch.python_options:
        report.add_unmapped_key((*key, f"python {option}"), UnmappedReason.no_counterpart, "torchrun starts python -u", value=option)
    _map_script(report, key, launch)
    nodes, slots = launch.flags.get("nnodes", ""), launch.flags.get("nproc_per_node", "")
    low = nodes.partition(":")[0]
    return int(low) if low.isdigit() else None, int(slots) if slots.isdigit() else None


def _map_flag(report: MigrationReport, flag_key: KeyPath, flag: str, value: str, launch: LaunchCommand) -> None:
    shown_value = show_text(value)
    if flag in ("nnodes", "nproc_per_node") and value.isdigit():
        report.mark_keys_handled(flag_key)
    elif flag in _FLAG_HANDLERS and _FLAG_HANDLERS[flag](report, flag_key, value):
        return
    elif flag == "module":
        _map_module(report, flag_key, show_text(launch.script))
    elif flag == "legacy_local_rank":
        report.mark_keys_handled(flag_key)
        report.add_note(f"{launch.program} passed --local_rank to the script; swarmtrain sets only the variable LOCAL_RANK")
    elif flag in _UNMAPPED_FLAGS:
        report.add_unmapped_key(flag_key, UnmappedReason.done_differently, _UNMAPPED_FLAGS[flag], value=shown_value)
    elif not is_resolved(value) and flag in _FLAG_SETTINGS:
        replacement = f"a shell variable: set {_FLAG_SETTINGS[flag]}"
        report.add_unmapped_key(flag_key, UnmappedReason.unknown, replacement, value=shown_value)
    else:
        replacement = _ACCELERATE_TEXT if launch.program == "accelerate launch" else ""
        report.add_unmapped_key(flag_key, UnmappedReason.no_counterpart, replacement, value=shown_value)


def _map_node_range(report: MigrationReport, flag_key: KeyPath, value: str) -> bool:
    match = re.fullmatch(r"(\d+):(\d+)", value)
    if match:
        report.map_key(flag_key, "runner.min_nodes", int(match[1]))
        report.map_key(flag_key, "runner.max_nodes", int(match[2]))
    return match is not None


def _map_automatic_ranks(report: MigrationReport, flag_key: KeyPath, value: str) -> bool:
    if value in ("gpu", "auto"):
        report.add_unmapped_key(flag_key, UnmappedReason.is_default, "one rank per GPU that the cluster reports", value=value)
    return value in ("gpu", "auto")


def _map_master_port(report: MigrationReport, flag_key: KeyPath, value: str) -> bool:
    is_port = value.isdigit() and int(value) < _MAX_PORT
    if is_port:
        report.map_key(flag_key, "runner.master_port", int(value))
    return is_port


def _map_max_restarts(report: MigrationReport, flag_key: KeyPath, value: str) -> bool:
    if value.isdigit():
        report.map_key(flag_key, "runner.max_restarts", int(value))
        report.add_note("runner.max_restarts counts consecutive failures without a new step between them; torchrun counts all failures")
    return value.isdigit()


def _map_numa_binding(report: MigrationReport, flag_key: KeyPath, value: str) -> bool:
    report.map_key(flag_key, "runner.numa", show_text(value))
    return True


def _map_mixed_precision(report: MigrationReport, flag_key: KeyPath, value: str) -> bool:
    if is_resolved(value):
        report.map_key(flag_key, ("runner", "env", "ACCELERATE_MIXED_PRECISION"), value)
    return is_resolved(value)


_FLAG_HANDLERS = {
    "mixed_precision": _map_mixed_precision,
    "nnodes": _map_node_range,
    "nproc_per_node": _map_automatic_ranks,
    "master_port": _map_master_port,
    "max_restarts": _map_max_restarts,
    "numa_binding": _map_numa_binding,
}
"""Handlers of flags: each returns whether it has mapped the value."""


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
    shown_text, setting = show_text(text), _find_nccl_setting(name, text)
    if name in RENDEZVOUS_VARIABLES:
        report.add_unmapped_key(key, UnmappedReason.done_differently, RENDEZVOUS_TEXT, value=shown_text)
    elif is_secret_name(name) or is_secret_value(text, report.secrets):
        report.add_unmapped_key(
            key, UnmappedReason.done_differently, f"runner.secrets: {{{name}: FILE}}; ranks find the file's path in {name}_FILE", value="…"
        )
    elif name in _INTERFACE_VARIABLES and on_host_network and re.fullmatch(r"[A-Za-z][\w.@-]{0,14}", text):
        report.map_key(key, "runner.interface", text)
    elif name in _INTERFACE_VARIABLES:
        report.add_unmapped_key(
            key, UnmappedReason.done_differently, "the interface is detected; to override it, set runner.interface", value=shown_text
        )
    elif setting is not None:
        report.map_key(key, ("runner", "nccl", setting[0]), setting[1])
    else:
        report.map_key(key, ("runner", "env", name), shown_text)
        add_shell_variable_note(report, f"runner.env.{name}", text)


def is_training_script(text: str) -> bool:
    """Return whether a line of `text` starts training."""
    return _TRAINING_LINE_PATTERN.search(text) is not None


def add_shell_variable_note(report: MigrationReport, field_path: str, config_value: str) -> None:
    """Add a note if `config_value`, at `field_path`, contains shell syntax that only the imported file's shell would have expanded."""
    if not is_resolved(config_value):
        report.add_note(
            f"{field_path} contains {show_text(config_value)}, which only the original shell can expand: replace it with its value"
        )


def _map_script(report: MigrationReport, key: KeyPath, launch: LaunchCommand) -> None:
    for index, text in enumerate(launch.other_commands):
        replacement = _LOGS_TEXT if _REDIRECTION_PATTERN.search(text) else _IMAGE_TEXT
        report.add_unmapped_key((*key, f"other command {index}"), UnmappedReason.done_differently, replacement, value=text)
    if launch.script and "module" not in launch.flags:
        report.map_key((*key, "script"), "runner.script", show_text(launch.script))
        add_shell_variable_note(report, "runner.script", launch.script)
        if launch.script.startswith("/"):
            report.add_note("runner.script is read on the machine that runs swarmtrain, not in the container: use the path on that machine")
    arguments = remove_secret_arguments(launch.args, report.secrets)
    for name in arguments.removed:
        replacement = "a secret: use runner.secrets, and read the file that its variable NAME_FILE names"
        report.add_unmapped_key((*key, f"{name} (secret)"), UnmappedReason.done_differently, replacement, value="…")
    if arguments.remaining:
        report.map_key((*key, "script_args"), "runner.script_args", [show_text(argument) for argument in arguments.remaining])
        for argument in arguments.remaining:
            add_shell_variable_note(report, "runner.script_args", argument)


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
