"""Commands that start another command, such as srun, env, apptainer exec or nohup: their options, and the wrapped command."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from swarmtrain.importers.shell.unresolved import is_resolved, show_text

SLURM_LAUNCHERS = ("srun", "mpirun", "mpiexec", "ibrun")
CONTAINER_PROGRAMS = ("apptainer", "singularity")


@dataclass(frozen=True)
class CommandPrefix:
    """A command in front of another command: its options with their values, its operands (such as an image), and variables."""

    program: str
    options: tuple[tuple[str, str], ...] = ()
    operands: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prefix as text, with unresolved parts as in the source."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        words = [self.program, *(word for option in self.options for word in option), *variables, *self.operands]
        return show_text(" ".join(word for word in words if word))

    def list_folders(self) -> list[str]:
        """Return the folders to which the options of the prefix change, in order."""
        return [value for option, value in self.options if option in _FOLDER_OPTIONS.get(self.program, ())]


@dataclass(frozen=True)
class _PrefixSyntax:
    """How a prefix is written: its subcommands, options (names without dashes, with the number of values), and operands."""

    values: Mapping[str, int] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    operands: int = 0
    subcommands: tuple[str, ...] = ()
    takes_variables: bool = False
    has_long_options_with_one_dash: bool = False


def _build_syntax(
    values: str = "", flags: str = "", *, operands: int = 0, subcommands: str = "", takes_variables: bool = False, one_dash: bool = False
) -> _PrefixSyntax:
    counts = {name.partition("*")[0]: int(name.partition("*")[2] or 1) for name in values.split()}
    return _PrefixSyntax(counts, frozenset(flags.split()), operands, tuple(subcommands.split()), takes_variables, one_dash)


_SRUN = _build_syntax(
    "A B C D c d e G i J L M m N n o p q r S t T w W x "
    "account accel-bind acctg-freq bb bbf begin chdir cluster-constraint clusters comment "
    "constraint container container-id context core-spec cores-per-socket cpu-bind cpu_bind cpu-freq cpus-per-gpu cpus-per-task deadline "
    "delay-boot dependency distribution epilog error exclude export export-file extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node "
    "gpus-per-socket gpus-per-task gres gres-flags hint input jobid job-name licenses mail-type mail-user mcs-label mem mem-bind "
    "mem-per-cpu mem-per-gpu mincpus mpi msg-timeout network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu "
    "ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority profile prolog qos relative reservation signal "
    "slurmd-debug sockets-per-node switches task-epilog task-prolog thread-spec threads-per-core time time-min tmp tres-bind tres-per-task "
    "uid wait wckey wait-all-nodes container-image container-mounts container-workdir container-name container-env container-save",
    "l u v Q K k O s E H I X Z label unbuffered exclusive no-kill overlap exact verbose quiet kill-on-bad-exit overcommit oversubscribe "
    "preserve-env pty propagate spread-job use-min-nodes disable-status immediate nice quit-on-interrupt resv-ports reboot no-allocate "
    "no-shell test-only contiguous requeue no-requeue container-mount-home no-container-mount-home container-remap-root "
    "no-container-remap-root container-entrypoint no-container-entrypoint container-writable container-readonly "
    "container-entrypoint-log no-container-entrypoint-log",
)
_MPIRUN = _build_syntax(
    "n np c N H x f "
    "host hosts hostfile machinefile npernode ppn perhost map-by bind-to rank-by output-filename wdir wd rf rankfile timeout "
    "iface bootstrap launcher tune path prefix genvlist envlist hostlist display mca*2 gmca*2 am pmixmca*2 prtemca*2 genv*2 env*2",
    "v q l h "
    "oversubscribe allow-run-as-root tag-output display-map report-bindings genvall bynode bysloth nolocal novm prepend-rank verbose",
    one_dash=True,
)
_APPTAINER = _build_syntax(
    "B S H W o bind env env-file home pwd cwd workdir scratch overlay network network-args security add-caps drop-caps mount fusemount "
    "hostname dns app pid-file no-mount apply-cgroups blkio-weight cpus memory memory-swap cpuset-cpus",
    "nv rocm cleanenv e containall C contain c writable-tmpfs writable w no-home userns u fakeroot f pid p ipc i uts net no-init no-privs "
    "keep-privs allow-setuid disable-cache no-eval nvccli compat unsquash no-https underlay sif-fuse no-umask",
    operands=1,
    subcommands="exec run",
)
_CONDA_RUN = _build_syntax("n p name prefix cwd", "no-capture-output live-stream v vv s a attach", subcommands="run")
_RUN = _build_syntax("C directory P project", "q quiet n no-interaction no-plugins", subcommands="run")
_UV_RUN = _build_syntax(
    "p python with with-editable with-requirements extra group only-group env-file project directory package index index-url "
    "extra-index-url no-extra no-group config-file cache-dir",
    "q quiet v verbose no-sync frozen locked active isolated no-project all-extras all-groups dev no-dev offline exact no-cache n "
    "no-config all-packages no-env-file managed-python",
    subcommands="run",
)
_PREFIXES: dict[str, _PrefixSyntax] = {
    "srun": _SRUN,
    "mpirun": _MPIRUN,
    "mpiexec": _MPIRUN,
    "ibrun": _build_syntax("n o"),
    "env": _build_syntax("u unset C chdir", "i ignore-environment", takes_variables=True),
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    "nohup": _build_syntax(),
    "time": _build_syntax("f o format output", "p v a verbose append"),
    "exec": _build_syntax("a", "c l"),
    "command": _build_syntax("", "p v V"),
    "builtin": _build_syntax(),
    "setsid": _build_syntax("", "f w c fork wait ctty"),
    "stdbuf": _build_syntax("i o e input output error"),
    "unbuffer": _build_syntax("", "p"),
    "numactl": _build_syntax(
        "N m C i p cpunodebind membind physcpubind interleave preferred cpubind weighted-interleave", "l all a localalloc"
    ),
    "taskset": _build_syntax("c cpu-list"),
    "timeout": _build_syntax("k s kill-after signal", "v preserve-status foreground verbose", operands=1),
    "nice": _build_syntax("n adjustment"),
    "ionice": _build_syntax("c n class classdata", "t"),
    "sudo": _build_syntax("u g user group", "E H n A b S preserve-env", takes_variables=True),
    "xvfb-run": _build_syntax("s n e server-args server-num error-file", "a auto-servernum"),
    "uv": _UV_RUN,
    "poetry": _RUN,
    "pipenv": _RUN,
    "pdm": _RUN,
    "rye": _RUN,
    "conda": _CONDA_RUN,
    "mamba": _CONDA_RUN,
    "micromamba": _CONDA_RUN,
    "nsys": _build_syntax("t o s f c y d e w x h b p", subcommands="profile"),
}
# Options that change the working folder of the wrapped command.
_FOLDER_OPTIONS: dict[str, tuple[str, ...]] = {
    "srun": ("-D", "--chdir"),
    "env": ("-C", "--chdir"),
    **dict.fromkeys(("mpirun", "mpiexec"), ("-wdir", "--wdir", "-wd", "--wd")),
    **dict.fromkeys(("conda", "mamba", "micromamba"), ("--cwd",)),
    **dict.fromkeys(CONTAINER_PROGRAMS, ("--pwd", "--cwd")),
    "uv": ("--directory",),
    "poetry": ("-C", "--directory"),
}
_VARIABLE_PATTERN = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def split_prefixes(argv: Sequence[str]) -> tuple[tuple[CommandPrefix, ...], tuple[str, ...]]:
    """Return the prefixes of `argv`, and the words of the wrapped command, which are empty if a prefix starts no command.

    Raises ValueError if an option is unknown, so that it is uncertain where the command begins.
    """
    words, prefixes = list(argv), []
    while words:
        name = PurePosixPath(words[0]).name
        syntax = _PREFIXES.get(name)
        if syntax is None or (syntax.subcommands and _find_subcommand(syntax, words) is None):
            break
        prefix, words = _take_prefix(name, syntax, words[1:])
        prefixes.append(prefix)
        if name == "uv" and words[:1] and words[0].endswith(".py"):
            words = ["python", *words]
    return tuple(prefixes), tuple(words)


def _find_subcommand(syntax: _PrefixSyntax, words: Sequence[str]) -> str | None:
    """Return the subcommand, which may follow options; None if it is not one that starts a command."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        _take_global_option(syntax, rest)
    return rest[0] if rest and rest[0] in syntax.subcommands else None


def _take_global_option(syntax: _PrefixSyntax, words: list[str]) -> tuple[str, str]:
    """Return an option in front of the subcommand, with its value, which are removed from `words`."""
    option, equals, value = words.pop(0).partition("=")
    if not equals and option.startswith("--") and option[2:] in syntax.values and words:
        value = words.pop(0)
    return option, value


def _take_prefix(name: str, syntax: _PrefixSyntax, words: list[str]) -> tuple[CommandPrefix, list[str]]:
    options: list[tuple[str, str]] = []
    if syntax.subcommands:
        while words[0] not in syntax.subcommands:
            options.append(_take_global_option(syntax, words))
        if words.pop(0) == "run" and name in CONTAINER_PROGRAMS:
            options.append(("run", ""))
    options += _take_options(name, syntax, words)
    variables: dict[str, str] = {}
    while syntax.takes_variables and words and (match := _VARIABLE_PATTERN.fullmatch(words[0])):
        variables[match[1]] = match[2]
        words.pop(0)
    count = 1 if name == "taskset" and not options else syntax.operands
    operands, words = words[:count], words[count:]
    return CommandPrefix(name, tuple(options), tuple(operands), variables), words


def _take_options(name: str, syntax: _PrefixSyntax, words: list[str]) -> list[tuple[str, str]]:
    options = []
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        options.append(_take_option(name, syntax, word, words))
    return options


def _take_option(program: str, syntax: _PrefixSyntax, word: str, words: list[str]) -> tuple[str, str]:
    """Return an option with its value. Values in the next words are removed from `words`."""
    option, equals, value = word.partition("=")
    name = option.lstrip("-")
    if not is_resolved(option):
        raise ValueError(f"the option {show_text(word)} of {program} is unresolved")
    if equals and (word.startswith("--") or len(name) > 1):
        return option, value
    if name in syntax.values:
        return word, _take_values(program, word, syntax.values[name], words)
    if name in syntax.flags:
        return word, ""
    is_short = not word.startswith("--") and (not syntax.has_long_options_with_one_dash or word[2:].isdigit())
    if is_short and word[1:2] in syntax.values:
        return word[:2], word[2:].removeprefix("=")
    if not word.startswith("--") and set(word[1:]) <= syntax.flags:
        return word, ""
    if not word.startswith("--") and word[1:2] in syntax.flags and word[2:].isdigit():
        return word[:2], word[2:]
    raise ValueError(f"the option {option} of {program} is unknown: write it as {option}=VALUE")


def _take_values(program: str, option: str, count: int, words: list[str]) -> str:
    if len(words) < count:
        raise ValueError(f"{program} {option} has no value")
    values = words[:count]
    del words[:count]
    return " ".join(values)
