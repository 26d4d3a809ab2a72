"""Command lines that start training: torchrun and what does the same, its script, and what is wrapped around them."""

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

from swarmtrain.config.runner import NcclConfig
from swarmtrain.importers.book import Book, Key, Why, is_secret

MEETING = "the run's own rendezvous finds it"
_LOGS = "swarmtrain logs has all ranks as one stream"
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
_ALONE = {"m": "module", "r": "redirects", "t": "tee", "H": "hostfile", "i": "include", "e": "exclude"}
# What the flags of other launchers are called by torchrun.
_SAME = {
    "num_machines": "nnodes",
    "num_nodes": "nnodes",
    "num_gpus": "nproc_per_node",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}
_ELSEWHERE = {
    **dict.fromkeys(
        ("node_rank", "rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "master_addr", "standalone", "local_addr"), MEETING
    ),
    **dict.fromkeys(("log_dir", "redirects", "tee", "local_ranks_filter", "logs_specs"), _LOGS),
    "monitor_interval": "each node's supervisor looks after its ranks",
    "use_env": "torchrun always does so",
    "config_file": "swarmtrain import that file too",
    "hostfile": "--hostsfile FILE puts it into runner.hosts",
    "no_ssh": MEETING,
}
MEETING_VARIABLES = frozenset(
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
_MOST_PORTS = 65535
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_REDIRECTION = re.compile("[<>]")
_PROGRAMS = r"srun|mpirun|torchrun|deepspeed|accelerate launch|(?:singularity|apptainer) (?:exec|run)|python[\d.]*"
_STARTS = re.compile(rf"^\s*(?:export )?(?:\w+=(?:\S+\s+|[\"'])?)*(?:{_PROGRAMS})\s", re.MULTILINE)
_VARIABLE = re.compile(r"\$(\w+|\{)|\$\(|`")


@dataclass(frozen=True)
class Launch:
    """A command line, taken apart. Flags are torchrun's, without dashes."""

    program: str
    flags: dict[str, str] = field(default_factory=dict)
    script: str = ""
    args: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    """What stands before the program: srun, a container, variables."""
    beside: tuple[str, ...] = ()
    """What else is in the line: other commands, and where output goes to."""


def read_line(text: str) -> Launch | None:
    """Return the first launch in a line of shell, with what else is in it; None if it starts no training. Raises ValueError."""
    found, beside = None, []
    for operator, words in _commands(text):
        launch = None if found or _REDIRECTION.search(operator) else take_apart(words)
        if launch is None and not (operator == ">&" and words[:1] in (["1"], ["2"])):
            beside.append(" ".join([*([operator] if operator else []), *words]))
        found = found or launch
    return found and replace(found, beside=(*found.beside, *(text for text in beside if text.strip("&|;() "))))


def take_apart(words: Sequence[str]) -> Launch | None:
    """Return the launch in the words of one command, None if it starts no training. Raises ValueError."""
    for index, word in enumerate(words):
        name, around, rest = PurePosixPath(word).name, tuple(words[:index]), list(words[index + 1 :])
        found = None
        if re.match(r"\w+=", word):
            continue
        if name in ("bash", "sh") and rest[:1] and rest[0] in ("-c", "-lc", "-ic"):
            found = read_line(" ".join(rest[1:2]))
            return found and replace(found, around=(*around, *found.around))
        if name in ("torchrun", "deepspeed"):
            found = _with_flags(name, rest)
        elif name == "accelerate" and rest[:1] == ["launch"]:
            found = _with_flags("accelerate launch", rest[1:])
        elif re.fullmatch(r"python[\d.]*", name):
            found = _python([*itertools.dropwhile(lambda option: option in ("-u", "-O", "-B"), rest)])
        if found is not None:
            return replace(found, around=around)
    return None


def _python(words: list[str]) -> Launch | None:
    if words[:1] != ["-m"]:
        return Launch("python", {}, words[0], tuple(words[1:])) if words and words[0].endswith(".py") else None
    if words[1:2] and words[1] in ("torch.distributed.run", "torch.distributed.launch"):
        return _with_flags("torchrun", words[2:])
    return Launch("python", {"module": ""}, words[1], tuple(words[2:])) if words[1:] else None


def split(text: str) -> list[str]:
    """Return the words of a line's first command. Raises ValueError."""
    return next(iter(_commands(text)), ("", []))[1]


def _commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a line, and where output goes to: each its operator, such as && or >, and its words. Raises ValueError."""
    plain = re.sub(r"(?<=\s)[12](?=>)", "", re.sub(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`", _quoted, text))
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    commands: list[tuple[str, list[str]]] = [("", [])]
    for word in lexer:
        if word and set(word) <= set(";&|<>()"):
            commands.append((word, []))
        else:
            commands[-1][1].append(word)
    return commands


def carry(book: Book, key: Key, launch: Launch) -> tuple[int | None, int | None]:
    """Carry a launch; return its nodes and its ranks on each, None where it says neither or not in numbers."""
    book.use(key)
    nodes, slots = None, None
    for flag, value in launch.flags.items():
        at = (*key, f"{launch.program} --{flag}")
        if flag == "nnodes" and re.fullmatch(r"\d+:\d+", value):
            low, high = map(int, value.split(":"))
            nodes = low
            book.carry(at, "runner.min_nodes", low)
            book.carry(at, "runner.max_nodes", high)
        elif flag == "nnodes" and value.isdigit():
            nodes = int(value)
            book.use(at)
        elif flag == "nproc_per_node" and value.isdigit():
            slots = int(value)
            book.use(at)
        elif flag == "nproc_per_node" and value in ("gpu", "auto"):
            book.leave(at, Why.default, "a rank for each GPU, as the cluster reports them", value=value)
        elif flag == "master_port" and value.isdigit() and int(value) < _MOST_PORTS:
            book.carry(at, "runner.master_port", int(value))
        elif flag == "max_restarts" and value.isdigit():
            book.carry(at, "runner.max_restarts", int(value))
            book.note("runner.max_restarts counts failures in a row without a new step between them; torchrun counts all")
        elif flag == "numa_binding":
            book.carry(at, "runner.numa", value)
        elif flag == "module":
            book.leave(at, Why.nothing, "a file of two lines as runner.script: import runpy, and run_module", value=launch.script)
        elif flag in _ELSEWHERE:
            book.leave(at, Why.otherwise, _ELSEWHERE[flag], value=value)
        elif _VARIABLE.search(value) and flag in ("nnodes", "nproc_per_node", "num_processes", "master_port", "max_restarts"):
            instead = {
                "nnodes": "runner.nodes",
                "nproc_per_node": "runner.default_gpu_count",
                "num_processes": "runner.default_gpu_count",
            }.get(flag, f"runner.{flag}")
            book.leave(at, Why.unknown, f"a variable: set {instead}", value=value)
        else:
            book.leave(at, Why.nothing, "", value=value)
    _carry_script(book, key, launch)
    return nodes, slots


def carry_variable(book: Book, key: Key, name: str, value: Any, *, own_network: bool = False) -> None:
    """Carry a variable of the ranks' environment. `own_network`: it names interfaces of machines, not of containers."""
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    setting = _nccl(name, text)
    if name in MEETING_VARIABLES:
        book.leave(key, Why.otherwise, MEETING, value=text)
    elif is_secret(name):
        book.leave(key, Why.otherwise, f"runner.secrets: {{{name}: FILE}}; ranks find the file's path in {name}_FILE", value="…")
    elif name in _INTERFACES and own_network and re.fullmatch(r"[A-Za-z][\w.@-]{0,14}", text):
        book.carry(key, "runner.interface", text)
    elif name in _INTERFACES:
        book.leave(key, Why.otherwise, "the interface is found; else runner.interface", value=text)
    elif setting is not None:
        book.carry(key, ("runner", "nccl", setting[0]), setting[1])
    else:
        book.carry(key, ("runner", "env", name), text)
        tell_variables(book, f"runner.env.{name}", text)


def starts_training(text: str) -> bool:
    """Return whether a line of `text` begins as one that starts training."""
    return _STARTS.search(text) is not None


def tell_variables(book: Book, path: str, text: str) -> None:
    """Note that `text` at `path` holds what only a shell of the source's would have replaced."""
    if _VARIABLE.search(text):
        book.note(f"{path} holds {text}, which only the source's own shell knew: write what it stands for, since nothing here does")


def _carry_script(book: Book, key: Key, launch: Launch) -> None:
    for index, text in enumerate(launch.beside):
        told = _LOGS if _REDIRECTION.search(text) else "what is installed or copied is in the image: swarmtrain image build"
        book.leave((*key, f"beside {index}"), Why.otherwise, told, value=text)
    if launch.script and "module" not in launch.flags:
        book.carry((*key, "script"), "runner.script", launch.script)
        tell_variables(book, "runner.script", launch.script)
        if launch.script.startswith("/"):
            book.note("runner.script is read where swarmtrain is called, not in the container: name the file there")
    if launch.args:
        book.carry((*key, "script_args"), "runner.script_args", list(launch.args))
        for arg in launch.args:
            if arg.startswith("--") and is_secret(arg.partition("=")[0]):
                book.note(
                    f"runner.script_args has {arg.partition('=')[0]}: configs are kept with checkpoints, and secrets are for runner.secrets"
                )
            tell_variables(book, "runner.script_args", arg)


def _with_flags(program: str, words: list[str]) -> Launch:
    flags: dict[str, str] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_") if word.startswith("--") else _ALONE.get(name, name)
        name = _SAME.get(name, name)
        if not equals and name not in _FLAGS_WITHOUT_VALUE:
            value = words.pop(0) if words else ""
        flags[name] = value
    if "num_processes" in flags and flags["num_processes"].isdigit():
        nodes = int(flags.get("nnodes", "1")) if flags.get("nnodes", "1").isdigit() else 1
        flags["nproc_per_node"] = str(int(flags.pop("num_processes")) // max(1, nodes))
    return Launch(program, flags, words[0] if words else "", tuple(words[1:]))


def _nccl(name: str, text: str) -> tuple[str, Any] | None:
    """Return the field of runner.nccl that means exactly this variable, and its value; None if none does."""
    setting = name.removeprefix("NCCL_").lower()
    if not name.startswith("NCCL_") or setting not in NcclConfig.model_fields:
        return None
    same = ({name: text}, {name: text.upper()})
    for value in ({"0": False, "1": True}.get(text), int(text) if text.isdigit() else None, text, text.upper()):
        try:
            if value is not None and NcclConfig.model_validate_json(json.dumps({setting: value})).environment in same:
                return setting, value
        except ValidationError:
            continue
    return None


def _quoted(found: re.Match[str]) -> str:
    """Keep what a shell would run in one word; within quotes it is."""
    return found[0] if found.string[: found.start()].count('"') % 2 else shlex.quote(found[0])
