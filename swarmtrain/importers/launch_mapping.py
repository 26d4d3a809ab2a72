"""Map the launch command of a job script, with its prefixes such as srun or apptainer, and the counts of nodes and ranks."""

from __future__ import annotations

import posixpath
from dataclasses import replace

from swarmtrain.importers.command_prefixes import CONTAINER_PROGRAMS, SLURM_LAUNCHERS, CommandPrefix
from swarmtrain.importers.container_options import PYXIS_PATTERN, map_apptainer, map_pyxis_options, map_pyxis_sbatch_options
from swarmtrain.importers.launch_command import map_launch_command
from swarmtrain.importers.launch_finder import LaunchCandidate
from swarmtrain.importers.launcher_arguments import LaunchCommand
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason
from swarmtrain.importers.shell.unresolved import is_resolved, show_text
from swarmtrain.importers.slurm_options import GPU_OPTIONS, SlurmOptions, has_slurm_setting, map_slurm_options

_COUNT_OPTIONS = ("-n", "-np", "--ntasks", "--ntasks-per-node", "-N", "--nodes", "-npernode", "--npernode", "-ppn")
_NODE_OPTIONS = ("-N", "--nodes")
_ONE_PROCESS_TEXT = "python without srun is one process"
_NODE_SUPERVISOR_TEXT = "a supervisor is started on each node"
Variables = dict[str, tuple[KeyPath, str]]


def map_job_launch(report: MigrationReport, key: KeyPath, candidate: LaunchCandidate, options: SlurmOptions) -> Variables:
    """Map the launch command and the options of the job.

    Return the variables that are set for the launch command only, each with its source key and value.
    """
    if candidate.launch is None:
        return {}
    launch = _resolve_script(report, candidate, candidate.launch, options)
    variables: Variables = {}
    for prefix in launch.prefixes:
        _map_prefix(report, key, prefix, variables, options)
    nodes, slots = map_launch_command(report, key, launch)
    _map_node_counts(report, options, launch, nodes)
    _map_rank_counts(report, key, options, launch, slots)
    map_pyxis_sbatch_options(report, options)
    map_slurm_options(report, options)
    if options.count_gpus_per_node():
        report.add_gpu_visibility_setting()
    return variables


def _resolve_script(report: MigrationReport, candidate: LaunchCandidate, launch: LaunchCommand, options: SlurmOptions) -> LaunchCommand:
    """Return the launch command with the script relative to the folder in which the job script starts."""
    folder = candidate.inner.scope.folder
    if options.get("chdir"):
        folder = posixpath.join(options.get("chdir"), folder) if folder else options.get("chdir")
    if not folder or folder == ".":
        return launch
    shown_folder = show_text(folder)
    if "module" in launch.flags:
        report.add_note(f"the script starts the module in {shown_folder}: run swarmtrain deploy in this folder, or set runner.code")
        return launch
    report.add_note(f"the script starts in {shown_folder}: relative paths in runner.script_args refer to this folder")
    if launch.script.startswith("/"):
        return launch
    return replace(launch, script=posixpath.normpath(posixpath.join(folder, launch.script)))


def _map_prefix(report: MigrationReport, key: KeyPath, prefix: CommandPrefix, variables: Variables, options: SlurmOptions) -> None:
    for name, value in prefix.variables.items():
        variables[name] = ((*key, name), value)
    if prefix.program in CONTAINER_PROGRAMS:
        map_apptainer(report, key, prefix)
        return
    map_pyxis_options(report, key, prefix)
    for option, value in prefix.options:
        is_adopted = prefix.program == "srun" and is_resolved(value) and options.adopt_srun_option((*key, f"srun {option}"), option, value)
        if not is_adopted and not PYXIS_PATTERN.fullmatch(option):
            variables |= _map_prefix_option(report, (*key, f"{prefix.program} {option}"), prefix.program, option, value)
    for operand in prefix.operands:
        report.add_unmapped_key((*key, prefix.program), UnmappedReason.no_counterpart, "", value=show_text(operand))


def _map_prefix_option(report: MigrationReport, source_key: KeyPath, program: str, option: str, value: str) -> Variables:
    """Map an option of a prefix. Return the variables that it sets."""
    pairs = _list_variables(program, option, value)
    if pairs:
        report.mark_keys_handled(source_key)
    elif program not in SLURM_LAUNCHERS:
        report.add_unmapped_key(source_key, UnmappedReason.no_counterpart, "", value=show_text(value))
    else:
        replacement = "runner.nodes and runner.default_gpu_count" if option in _COUNT_OPTIONS else _NODE_SUPERVISOR_TEXT
        report.add_unmapped_key(source_key, UnmappedReason.done_differently, replacement, value=show_text(value))
    return {name: ((*source_key, name), text) for name, text in pairs.items()}


def _list_variables(program: str, option: str, value: str) -> dict[str, str]:
    """Return the variables that an option sets: srun --export=ALL,A=1, mpirun -x A=1, -genv A 1."""
    if program == "srun" and option == "--export":
        return dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair)
    if program in ("mpirun", "mpiexec") and option == "-x" and "=" in value:
        return {value.partition("=")[0]: value.partition("=")[2]}
    if program in ("mpirun", "mpiexec") and option in ("-genv", "-env") and " " in value:
        return {value.partition(" ")[0]: value.partition(" ")[2]}
    return {}


def _map_node_counts(report: MigrationReport, options: SlurmOptions, launch: LaunchCommand, nodes: int | None) -> None:
    source_key, nodes_text = options.values.get("nodes", (("nodes",), ""))
    if _is_one_process(launch):
        if nodes_text not in ("", "1"):
            report.add_unmapped_key(
                source_key, UnmappedReason.done_differently, f"{_ONE_PROCESS_TEXT}, on the first node", value=nodes_text
            )
        elif nodes_text:
            report.map_key(source_key, "runner.nodes", 1)
        return
    low, _, high = nodes_text.partition("-")
    prefix_nodes = [value for prefix in launch.prefixes for option, value in prefix.options if option in _NODE_OPTIONS and value.isdigit()]
    if low.isdigit() and high.isdigit() and high != low:
        report.map_key(source_key, "runner.min_nodes", int(low))
        report.set_config_value("runner.max_nodes", int(high))
    elif low.isdigit():
        report.map_key(source_key, "runner.nodes", int(low))
        if nodes is not None and nodes != int(low):
            report.add_note(f"torchrun has --nnodes {nodes}, and #SBATCH --nodes {low}: runner.nodes is {low}")
    elif nodes is not None:
        report.set_config_value("runner.nodes", nodes)
    elif prefix_nodes:
        report.set_config_value("runner.nodes", int(prefix_nodes[-1]))
    if nodes and nodes > 1 and report.get_config_value("runner.runner_type") == "local":
        report.set_runner_type("swarm")


def _is_one_process(launch: LaunchCommand) -> bool:
    """Return whether the command starts one process, unlike srun or torchrun."""
    return not launch.is_launcher and not any(prefix.program in SLURM_LAUNCHERS for prefix in launch.prefixes)


def _map_rank_counts(report: MigrationReport, key: KeyPath, options: SlurmOptions, launch: LaunchCommand, slots: int | None) -> None:
    is_plain_python, gpus = not launch.is_launcher, options.count_gpus_per_node()
    prefix_tasks = [
        value for prefix in launch.prefixes for option, value in prefix.options if option == "--ntasks-per-node" and value.isdigit()
    ]
    tasks = int(prefix_tasks[-1]) if prefix_tasks else options.count_tasks_per_node()
    is_one_process = _is_one_process(launch)
    ranks = 1 if is_one_process else slots or (tasks if is_plain_python else None) or gpus
    if is_one_process:
        replacement = "one process without srun: runner.default_gpu_count is 1"
        report.add_unmapped_key((*key, "python"), UnmappedReason.done_differently, replacement, value=show_text(launch.script))
    if ranks is not None:
        report.set_config_value("runner.default_gpu_count", ranks)
    per_node_key, per_node = options.values.get("ntasks-per-node", ((), ""))
    if per_node_key:
        replacement = "runner.default_gpu_count" if is_plain_python else "each node starts a supervisor"
        replacement = _ONE_PROCESS_TEXT if is_one_process else replacement
        report.add_unmapped_key(per_node_key, UnmappedReason.done_differently, replacement, value=per_node)
    for name in GPU_OPTIONS:
        if name in options.values:
            _map_gpu_option(report, options, name, is_consistent=gpus == ranks is not None)
    if is_plain_python and ranks and ranks > 1:
        report.add_note("srun started one process per rank; now torchrun does, and sets RANK and WORLD_SIZE in the script's environment")


def _map_gpu_option(report: MigrationReport, options: SlurmOptions, name: str, *, is_consistent: bool) -> None:
    key, value = options.values[name]
    gpus = options.count_gpus_per_node()
    if not has_slurm_setting(report, "options"):
        if is_consistent and name in GPU_OPTIONS[:3]:
            report.mark_keys_handled(key)
        else:
            report.add_unmapped_key(key, UnmappedReason.done_differently, "runner.default_gpu_count", value=value)
    elif name in ("gpus", "gpus-per-task") and gpus:
        report.map_key(key, "runner.slurm.gpus_per_node", gpus)
