"""Options of an sbatch script (#SBATCH): parse them, and map them to settings of the Slurm launcher."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason, is_config_field
from swarmtrain.importers.shell.syntax import ShellSyntaxError

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
_OPTION_ALIASES = {"tasks-per-node": "ntasks-per-node"}
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
    "no-container-mount-home",
    "container-mount-home",
    "container-writable",
    "container-readonly",
    "container-remap-root",
    "no-container-remap-root",
    "no-container-entrypoint",
    "container-entrypoint",
)
_COUNT_PATTERN = re.compile(r"(?:[a-zA-Z][\w.-]*:)*(\d+)")
# Options of sbatch for which the Slurm launcher has a setting, and options that the launcher sets itself.
_SLURM_SETTINGS = {name: name for name in ("account", "partition", "qos", "time", "gres", "constraint", "exclude")}
_SLURM_SETTINGS |= {"gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_node", "mem": "memory"}
_INTEGER_OPTIONS = ("gpus-per-node", "cpus-per-task")
_HANDLED_OPTIONS = ("job-name", "output", "error", "open-mode", "ntasks", "ntasks-per-node", "array", "parsable", "chdir")
_LOGS_TEXT = "use swarmtrain logs; logs are kept on this machine"
_UNMAPPED_OPTIONS: dict[str, tuple[UnmappedReason, str]] = {
    "job-name": (UnmappedReason.done_differently, "the config file's name, or --name"),
    "output": (UnmappedReason.done_differently, _LOGS_TEXT),
    "error": (UnmappedReason.done_differently, _LOGS_TEXT),
    "open-mode": (UnmappedReason.done_differently, _LOGS_TEXT),
    "chdir": (UnmappedReason.done_differently, "runner.script and runner.code are shipped with the run"),
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
GPU_OPTIONS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "ntasks-per-gpu")


@dataclass
class SlurmOptions:
    """Options of the script, each with its key in the migration report and its value."""

    values: dict[str, tuple[KeyPath, str]] = field(default_factory=dict)
    incomplete: set[str] = field(default_factory=set)
    """Names of the options that need a value and have none, as in a template."""

    def get(self, name: str) -> str:
        """Return the value of the option `name`; empty if it is not set."""
        return self.values.get(name, ((), ""))[1]

    def add_line(self, key: KeyPath, line: str, number: int) -> None:
        """Add the options in line `number`, which begins with #SBATCH. Raises ShellSyntaxError if it contains anything else."""
        words = _split_option_line(line)
        while words:
            word = words.pop(0)
            if not word.startswith("-"):
                raise ShellSyntaxError(f"#SBATCH {word} is not an option; jobs with several components are not supported", number)
            name, has_value, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                name, has_value, value = _SHORT_OPTIONS.get(word[1:2], word[1:2]), word[2:], word[2:].removeprefix("=")
            name = _OPTION_ALIASES.get(name, name)
            if not has_value and name not in _OPTIONS_WITHOUT_VALUE and words and not words[0].startswith("--"):
                value = words.pop(0)
            self.values[name] = ((*key, f"#SBATCH --{name}"), value)
            if not value and (word.endswith("=") or name in _SHORT_OPTIONS.values() or name in _SLURM_SETTINGS):
                self.incomplete.add(name)

    def adopt_srun_option(self, key: KeyPath, option: str, value: str) -> bool:
        """Add an option of srun that requests resources, unless sbatch has it. Return whether it was added.

        Without sbatch, srun itself requests the resources of the job.
        """
        name = _SHORT_OPTIONS.get(option[1:], option[1:]) if not option.startswith("--") else option[2:]
        if not value or name in self.values or name not in (*_SLURM_SETTINGS, *GPU_OPTIONS):
            return False
        self.values[name] = (key, value)
        return True

    def count_gpus_per_node(self) -> int | None:
        """Return the number of GPUs per node; None if the options do not determine it."""
        for name in GPU_OPTIONS[:2]:
            count = _COUNT_PATTERN.fullmatch(self.get(name).partition(",")[0]) if name in self.values else None
            if count:
                return int(count[1])
        if self.get("gpus-per-task").isdigit():
            return int(self.get("gpus-per-task")) * (self.count_tasks_per_node() or 1)
        nodes, count = self.get("nodes") or "1", _COUNT_PATTERN.fullmatch(self.get("gpus"))
        return _divide(int(count[1]), nodes) if count else None

    def count_tasks_per_node(self) -> int | None:
        """Return the number of tasks per node; None if the options do not determine it."""
        if self.get("ntasks-per-node").isdigit():
            return int(self.get("ntasks-per-node"))
        return _divide(int(self.get("ntasks")), self.get("nodes")) if self.get("ntasks").isdigit() else None

    def build_variables(self) -> Mapping[str, str]:
        """Return the variables that Slurm sets in the job from these options."""
        gpus, tasks_per_node = self.count_gpus_per_node(), self.get("ntasks-per-node")
        nodes = self.get("nodes") if self.get("nodes").isdigit() else ""
        tasks = self.get("ntasks") or (str(int(nodes) * int(tasks_per_node)) if nodes and tasks_per_node.isdigit() else "")
        variables = {
            "SLURM_NNODES": nodes,
            "SLURM_JOB_NUM_NODES": nodes,
            "SLURM_GPUS_ON_NODE": str(gpus or ""),
            "SLURM_GPUS_PER_NODE": self.get("gpus-per-node") or str(gpus or ""),
            "SLURM_CPUS_PER_TASK": self.get("cpus-per-task"),
            "SLURM_NTASKS": tasks,
            "SLURM_NPROCS": tasks,
            "SLURM_NTASKS_PER_NODE": tasks_per_node,
            "SLURM_JOB_NAME": self.get("job-name"),
            "SLURM_JOB_PARTITION": self.get("partition"),
            "SLURM_JOB_ACCOUNT": self.get("account"),
        }
        return {name: value for name, value in variables.items() if value and "%" not in value}


def map_slurm_options(report: MigrationReport, options: SlurmOptions) -> None:
    """Map the options that nothing else has handled."""
    for name, (source_key, value) in options.values.items():
        if report.is_key_handled(source_key):
            continue
        if name in options.incomplete:
            report.add_unmapped_key(source_key, UnmappedReason.unknown, "has no value in the script", value=value)
        elif has_slurm_setting(report, "options") and name not in _HANDLED_OPTIONS:
            _map_to_slurm_launcher(report, source_key, name, value)
        elif name in _UNMAPPED_OPTIONS:
            report.add_unmapped_key(source_key, *_UNMAPPED_OPTIONS[name], value=value)
        else:
            is_queue_option = name in ("partition", "account", "qos", "time", "dependency", "array")
            replacement = "only Slurm has a queue; a swarm has none" if is_queue_option else ""
            report.add_unmapped_key(source_key, UnmappedReason.no_counterpart, replacement, value=value)


def has_slurm_setting(report: MigrationReport, name: str) -> bool:
    """Return whether the import targets Slurm and the Slurm launcher has the setting `name`."""
    return report.get_config_value("runner.runner_type") == "slurm" and is_config_field(f"runner.slurm.{name}")


def append_slurm_setting(report: MigrationReport, source_key: KeyPath, name: str, value: str) -> None:
    """Append `value` to the list runner.slurm.`name`."""
    path = f"runner.slurm.{name}"
    report.map_key(source_key, path, [*(report.get_config_value(path) or ()), value])


def _split_option_line(line: str) -> list[str]:
    text = re.split(r"\s#", line.removeprefix("#SBATCH"), maxsplit=1)[0]
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _divide(total: int, nodes: str) -> int | None:
    return total // int(nodes) if nodes.isdigit() and int(nodes) and total % int(nodes) == 0 else None


def _map_to_slurm_launcher(report: MigrationReport, source_key: KeyPath, name: str, value: str) -> None:
    """Map an option to its setting of the Slurm launcher; if the launcher has none, copy the option to runner.slurm.options."""
    lead_match = re.search(r"@(\d+)$", value)
    setting = _SLURM_SETTINGS.get(name, "")
    if setting and has_slurm_setting(report, setting) and (value.isdigit() or name not in _INTEGER_OPTIONS):
        report.map_key(source_key, f"runner.slurm.{setting}", int(value) if name in _INTEGER_OPTIONS else value)
    elif name in ("requeue", "no-requeue") and has_slurm_setting(report, "requeue"):
        report.map_key(source_key, "runner.slurm.requeue", name == "requeue")
    elif name == "signal" and lead_match and has_slurm_setting(report, "signal_seconds"):
        report.map_key(source_key, "runner.slurm.signal_seconds", int(lead_match[1]))
    else:
        append_slurm_setting(report, source_key, "options", f"--{name}={value}" if value else f"--{name}")
