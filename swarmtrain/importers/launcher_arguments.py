"""Arguments of the programs that start ranks: torchrun, accelerate launch, deepspeed, and python itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from swarmtrain.importers.command_prefixes import CommandPrefix
from swarmtrain.importers.shell.unresolved import is_resolved, show_text


@dataclass(frozen=True)
class LaunchCommand:
    """Parsed launch command. Its flags have the names of torchrun's flags, without dashes."""

    program: str
    flags: dict[str, str] = field(default_factory=dict)
    script: str = ""
    args: tuple[str, ...] = ()
    prefixes: tuple[CommandPrefix, ...] = ()
    """Commands in front of the launcher: for example srun, a container command, or variable assignments."""
    other_commands: tuple[str, ...] = ()
    """The other parts of the shell line: further commands, and output redirections."""
    python_options: tuple[str, ...] = ()

    @property
    def is_launcher(self) -> bool:
        """Whether the program starts several ranks, unlike python."""
        return self.program != "python"


@dataclass(frozen=True)
class _Launcher:
    values: frozenset[str]
    switches: frozenset[str]
    value_prefixes: tuple[str, ...] = ()


def _build_launcher(values: str, switches: str, value_prefixes: tuple[str, ...] = ()) -> _Launcher:
    return _Launcher(frozenset(values.split()), frozenset(switches.split()), value_prefixes)


_LAUNCHERS = {
    "torchrun": _build_launcher(
        "nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf master_addr master_port max_restarts "
        "monitor_interval start_method role event_log_handler log_dir redirects tee local_addr logs_specs local_ranks_filter "
        "duplicate_stdout_filters duplicate_stderr_filters numa_binding signals_to_handle shutdown_timeout",
        "standalone module no_python run_path use_env virtual_local_rank",
    ),
    "accelerate launch": _build_launcher(
        "config_file num_processes num_machines machine_rank main_process_ip main_process_port rdzv_backend rdzv_conf max_restarts "
        "monitor_interval role log_dir tee mixed_precision num_cpu_threads_per_process gpu_ids dynamo_backend dynamo_mode "
        "gradient_accumulation_steps gradient_clipping zero_stage zero3_init_flag zero3_save_16bit_model main_training_function "
        "numa_binding tpu_cluster tpu_name tpu_zone vm env",
        "cpu multi_gpu tpu ipex use_xpu use_deepspeed use_fsdp use_megatron_lm use_tp use_parallelism_config module no_python quiet debug "
        "same_network downcast_bf16 dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation use_mps_device "
        "enable_cpu_affinity tpu_use_cluster no_tpu_cluster tpu_use_sudo",
        ("fsdp_", "deepspeed_", "megatron_lm_", "offload_", "parallelism_config_", "fp8_", "tp_"),
    ),
    "deepspeed": _build_launcher(
        "hostfile include exclude num_nodes min_elastic_nodes max_elastic_nodes num_gpus master_port master_addr node_rank launcher "
        "launcher_args autotuning venv_script ssh_port enable_each_rank_log bind_core_list",
        "save_pid elastic_training no_ssh no_ssh_check no_local_rank no_python module force_multi bind_cores_to_rank",
    ),
}
_SHORT_FLAGS = {"m": "module", "r": "redirects", "t": "tee", "H": "hostfile", "i": "include", "e": "exclude", "q": "quiet"}
# Flags of other launchers, mapped to torchrun's names of the same flags.
_TORCHRUN_FLAG_NAMES = {
    "num_machines": "nnodes",
    "num_nodes": "nnodes",
    "num_gpus": "nproc_per_node",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
_LAUNCHER_PROGRAMS = ("torchrun", "deepspeed", "accelerate", "accelerate-launch")
_PYTHON_PATTERN = re.compile(r"python[\d.]*")
_PYTHON_VALUE_OPTIONS = ("-W", "-X", "--check-hash-based-pycs")
_PYTHON_FLAGS_PATTERN = re.compile(r"-[bBdEiIOPqRsSuvx]+")
# Modules that are run for their own sake: python -m NAME.
_UTILITY_MODULES = frozenset(
    (
        *("venv", "virtualenv", "pip", "ensurepip", "build", "compileall", "py_compile", "json", "zipfile", "tarfile", "http", "site"),
        *("timeit", "pytest", "unittest", "ipykernel", "jupyter", "wandb", "tensorboard", "nltk", "spacy", "pdb", "this", "platform"),
        *("sysconfig", "torch.utils.collect_env", "huggingface_hub", "gdown", "uv", "pipx", "cProfile", "zipapp", "calendar"),
    )
)
_UTILITY_SCRIPTS = frozenset(("setup.py", "manage.py", "get-pip.py"))


def is_launcher_program(word: str) -> bool:
    """Return whether `word` names a program that starts training: a launcher or Python."""
    name = PurePosixPath(word).name
    return name in _LAUNCHER_PROGRAMS or _PYTHON_PATTERN.fullmatch(name) is not None


def is_rank_launcher(word: str) -> bool:
    """Return whether `word` names a program whose only purpose is to start ranks."""
    return PurePosixPath(word).name in _LAUNCHER_PROGRAMS or word in _LAUNCHER_MODULES


def parse_launcher_argv(argv: Sequence[str]) -> LaunchCommand | None:
    """Return the launch command in `argv`, whose first word is the program; None if it does not start training.

    Raises ValueError with the reason if the arguments are not understood.
    """
    name, arguments = PurePosixPath(argv[0]).name, list(argv[1:])
    if _PYTHON_PATTERN.fullmatch(name):
        return _parse_python_argv(arguments)
    if name == "accelerate":
        return _parse_accelerate_argv(arguments)
    return _parse_flags("accelerate launch" if name == "accelerate-launch" else name, arguments)


def _parse_accelerate_argv(arguments: list[str]) -> LaunchCommand | None:
    return _parse_flags("accelerate launch", arguments[1:]) if arguments[:1] == ["launch"] else None


def _parse_python_argv(arguments: list[str]) -> LaunchCommand | None:
    options: list[str] = []
    while arguments and arguments[0].startswith("-") and arguments[0] not in ("-", "-m", "-c"):
        word = arguments.pop(0)
        if word.startswith("-m"):
            arguments[:0] = ["-m", word[2:]]
        elif word in ("-V", "--version", "-h", "--help") or word.startswith("-c"):
            return None
        elif word in _PYTHON_VALUE_OPTIONS and arguments:
            options.append(show_text(f"{word} {arguments.pop(0)}"))
        elif _PYTHON_FLAGS_PATTERN.fullmatch(word) or word.startswith(("-W", "-X")):
            options += [] if word == "-u" else [show_text(word)]
        else:
            raise ValueError(f"the option {word} of python is not supported")
    if not arguments or arguments[0] in ("-", "-c"):
        return None
    if arguments[0] == "-m":
        return _parse_python_module(arguments[1:], tuple(options))
    if PurePosixPath(arguments[0]).name in _UTILITY_SCRIPTS:
        return None
    return LaunchCommand("python", {}, arguments[0], tuple(arguments[1:]), python_options=tuple(options))


def _parse_python_module(arguments: list[str], options: tuple[str, ...]) -> LaunchCommand | None:
    if not arguments:
        raise ValueError("python -m has no module")
    module, rest = arguments[0], arguments[1:]
    launcher = _LAUNCHER_MODULES.get(module)
    if launcher == "accelerate":
        return _parse_accelerate_argv(rest)
    if launcher is not None:
        launch = _parse_flags(launcher, rest)
        is_legacy = module == "torch.distributed.launch" and "use_env" not in launch.flags
        return LaunchCommand(
            launch.program, launch.flags | ({"legacy_local_rank": ""} if is_legacy else {}), launch.script, launch.args, (), (), options
        )
    if module in _UTILITY_MODULES or module.partition(".")[0] in _UTILITY_MODULES:
        return None
    return LaunchCommand("python", {"module": ""}, module, tuple(rest), python_options=options)


def _parse_flags(program: str, arguments: list[str]) -> LaunchCommand:
    """Return the launch command of a launcher. Raises ValueError if a flag is unknown or there is no script."""
    flags: dict[str, str] = {}
    while arguments and arguments[0].startswith("-"):
        word = arguments.pop(0)
        if word == "--":
            break
        flag, value = _take_flag(program, word, arguments)
        flags[_TORCHRUN_FLAG_NAMES.get(flag, flag)] = value
    if "no_python" in flags:
        raise ValueError(f"{program} --no_python starts a program that is not a Python script")
    if not arguments:
        raise ValueError(f"{program} has no script")
    _divide_processes(flags)
    if program == "deepspeed" and "no_local_rank" not in flags:
        flags["legacy_local_rank"] = ""
    return LaunchCommand(program, flags, arguments[0], tuple(arguments[1:]))


def _take_flag(program: str, word: str, remaining: list[str]) -> tuple[str, str]:
    """Return the name and value of the flag `word`. A value in the next word is removed from `remaining`."""
    name, has_value, value = word.lstrip("-").partition("=")
    if not is_resolved(name):
        raise ValueError(f"the flag {show_text(word)} of {program} is unresolved")
    if not word.startswith("--"):
        short = name if len(name) == 1 else name[:1]
        has_value, value = ("=", name[1:]) if len(name) > 1 else (has_value, value)
        name = _SHORT_FLAGS.get(short, short)
    flag = _complete_flag(program, name.replace("-", "_"), word)
    launcher = _LAUNCHERS[program]
    if has_value or flag in launcher.switches:
        return flag, value
    if not remaining:
        raise ValueError(f"{program} {show_text(word)} has no value")
    return flag, remaining.pop(0)


def _complete_flag(program: str, name: str, word: str) -> str:
    """Return the full name of a flag, which may be abbreviated. Raises ValueError if the launcher does not have it."""
    launcher = _LAUNCHERS[program]
    names = launcher.values | launcher.switches
    if name in names or (launcher.value_prefixes and name.startswith(launcher.value_prefixes)):
        return name
    completions = [flag for flag in names if flag.startswith(name) and len(name) > 2]
    if len(completions) == 1:
        return completions[0]
    raise ValueError(f"the flag {show_text(word.partition('=')[0])} of {program} is unknown")


def _divide_processes(flags: dict[str, str]) -> None:
    """Replace num_processes, the ranks on all machines together, by nproc_per_node."""
    total, nodes = flags.get("num_processes", ""), flags.get("nnodes", "1")
    if total.isdigit() and is_resolved(nodes) and nodes.isdigit() and int(nodes) and int(total) % int(nodes) == 0:
        flags["nproc_per_node"] = str(int(flags.pop("num_processes")) // int(nodes))
