"""A script for sbatch that starts torchrun: its options, its variables, its launch, and a container around that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.book import Book, Key, Why, is_secret, known
from swarmtrain.importers.launch import MEETING, MEETING_VARIABLES, Launch, carry, carry_variable, read_line, split, tell_variables

_SHORT = {
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
_FLAGS = ("exclusive", "requeue", "no-requeue", "no-kill", "overcommit", "oversubscribe", "contiguous", "parsable", "verbose")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=")
_COUNT = re.compile(r"(?:[a-zA-Z][\w.-]*:)*(\d+)")
# What Slurm's own launcher has a setting for, and what it decides itself.
_SLURM = {name: name for name in ("account", "partition", "qos", "time", "gres", "constraint", "exclude")}
_SLURM |= {"gpus-per-node": "gpus_per_node", "cpus-per-task": "cpus_per_node", "mem": "memory"}
_NUMBERS = ("gpus-per-node", "cpus-per-task")
_OURS = ("job-name", "output", "error", "open-mode", "ntasks", "ntasks-per-node", "array", "parsable", "chdir")
_LEFT: dict[str, tuple[Why, str]] = {
    "job-name": (Why.otherwise, "the config file's name, or --name"),
    "output": (Why.otherwise, "swarmtrain logs, kept on this machine"),
    "error": (Why.otherwise, "swarmtrain logs, kept on this machine"),
    "open-mode": (Why.otherwise, "swarmtrain logs, kept on this machine"),
    "ntasks": (Why.otherwise, "a supervisor on each node"),
    "cpus-per-task": (Why.otherwise, "runner.docker_config.cpus, of a node's container"),
    "mem": (Why.otherwise, "runner.docker_config.memory"),
    "signal": (Why.otherwise, "runner.stop_grace: the time that a checkpoint may take"),
    "requeue": (Why.otherwise, "runner.max_restarts"),
    "no-requeue": (Why.otherwise, "runner.max_restarts: 0"),
    "nodelist": (Why.otherwise, "runner.hosts"),
    "exclude": (Why.otherwise, "runner.hosts"),
    "constraint": (Why.otherwise, "runner.swarm.labels"),
}
_LONGEST_LINE = 20_000
_DEEPEST = 5  # variables within variables
_GPUS = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "ntasks-per-gpu")
_PRELUDES = (r"module |ml |spack |source |\. |conda |micromamba |mamba |pyenv |eval ", r"ulimit|umask")
_LINES: tuple[tuple[str, Why, str], ...] = (
    (
        _PRELUDES[0],
        Why.otherwise,
        "the image has what is needed: swarmtrain image build",
    ),
    (_PRELUDES[1], Why.otherwise, "each container has its own limits"),
    (
        r"(set|echo|date|hostname|nvidia-smi|printenv|env|trap|wait|sleep|pwd|ls|cat|scontrol|squeue|sstat|which|exit|:)\b",
        Why.nothing,
        "",
    ),
    (
        r"(for|while|if|then|else|elif|fi|do|done|case|esac|function|\{|\})\b|[{}]$|\w+\(\)",
        Why.nothing,
        "one run starts one script on all nodes",
    ),
    (r"(cd|pushd)\b", Why.otherwise, "runner.script and runner.code travel with the run"),
    (r"(mkdir|rm|cp|mv|ln|rsync|tar|rclone)\b", Why.otherwise, "runner.code, and runner.docker_config.docker_mounts for what is large"),
    (r"(pip|python -m pip|uv)\b", Why.otherwise, "the image has what is needed: swarmtrain image build"),
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
class _Job:
    """What is known while a script is read."""

    variables: dict[str, str] = field(default_factory=dict)
    exported: dict[str, tuple[Key, str]] = field(default_factory=dict)
    options: dict[str, tuple[Key, str]] = field(default_factory=dict)
    launches: list[tuple[Key, Launch]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Variables that stand in other lines."""


def read(text: str, source: str) -> Book:
    """Return the book of an sbatch script. Raises ConfigError if it starts no training that is known."""
    lines, job = list(_logical(text)), _Job()
    book = Book(*_as_values(lines), short=True)
    queued = re.search(r"#SBATCH|\bsrun\b|\bSLURM_", text) is not None
    book.place("slurm" if queued else "local")
    _options(book, job, lines)
    for key, line in zip(book.source, (line for _, line in lines), strict=True):
        if not line.startswith("#SBATCH"):
            _line(book, job, (key,), line)
    if not job.launches:
        raise ConfigError(
            (
                Problem(
                    "", "starts neither torchrun nor python", hint="swarmtrain import takes the script that holds the line with torchrun"
                ),
            ),
            source=source,
        )
    _launch(book, job)
    return book


def _as_values(lines: list[tuple[int, str]]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the lines by their beginnings, each one's being another, and the number of each."""
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


def _logical(text: str) -> Iterator[tuple[int, str]]:
    """Yield what a shell takes for one line, with its first number: joined by backslashes, quotes or a list's parentheses."""
    begun, waiting, until = 0, "", ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip()
        if until:
            until = "" if line.strip() == until else until
            continue
        if not waiting:
            stripped = line.strip()
            if not stripped or (stripped.startswith("#") and not stripped.startswith("#SBATCH")):
                continue
            begun, line = number, stripped
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1] + " "
            continue
        if not waiting.startswith("#SBATCH") and _is_open(waiting):
            waiting += "\n"
            continue
        if here := re.search(r"<<-?\s*['\"]?(\w+)", waiting):
            until = here[1]
        yield begun, waiting.strip()
        waiting = ""
    if waiting:
        yield begun, waiting.strip()


def _is_open(text: str) -> bool:
    if len(text) > _LONGEST_LINE:
        return False
    plain = re.sub(r"\\.", "", text)
    outside = re.sub(r"'[^']*'|\"[^\"]*\"", "", plain)
    listed = re.match(r"(?:export\s+|local\s+|declare\s+-a\s+)?\w+\+?=\(", outside)
    return '"' in outside or "'" in outside.partition("#")[0] or bool(listed and outside.count("(") > outside.count(")"))


def _options(book: Book, job: _Job, lines: list[tuple[int, str]]) -> None:
    for key, (_, line) in zip(list(book.source), lines, strict=True):
        if not line.startswith("#SBATCH"):
            continue
        book.use((key,))
        words = line.removeprefix("#SBATCH").partition(" #")[0].split()
        while words:
            word = words.pop(0)
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                name, equals, value = _SHORT.get(word[1:2], word[1:2]), word[2:], word[2:]
            if not equals and name not in _FLAGS and words:
                value = words.pop(0)
            job.options[name] = ((key, f"#SBATCH --{name}"), value.strip("\"'"))


def _line(book: Book, job: _Job, key: Key, line: str) -> None:
    if len(line) > _LONGEST_LINE:
        book.leave(key, Why.unknown, "too long a line")
        return
    try:
        if _ASSIGNMENT.match(line):
            _assign(book, job, key, line)
            return
        launch = read_line(_expanded(job, line))
    except ValueError as error:
        book.leave(key, Why.unknown, f"cannot be read: {error}".lower())
        return
    if launch is not None and not re.match(r"(pip|echo|conda|source)\b", line):
        job.launches.append((key, launch))
        return
    for pattern, why, instead in _LINES:
        if re.match(pattern, line):
            if pattern in _PRELUDES and _by_slurm(book, "prelude"):
                _add(book, key, "prelude", line)
            else:
                book.leave(key, why, instead)
            return
    book.leave(key, Why.nothing, "a command of the script's own")


def _assign(book: Book, job: _Job, key: Key, line: str) -> None:
    exports, rest = line.startswith("export "), line.removeprefix("export ").strip()
    listed = re.fullmatch(r"(\w+)=\((.*)\)", rest, re.DOTALL)
    if listed:
        job.variables[listed[1]] = " ".join(_expanded(job, listed[2]).split())
        book.use(key)
        return
    if re.fullmatch(r"\w+=\"?(\$\(.*\)|`[^`]*`)\"?", rest, re.DOTALL):
        name = rest.partition("=")[0]
        meets = name in MEETING_VARIABLES or re.search(r"scontrol|hostname|SLURM_JOB_ID|shuf|python", rest) is not None
        book.leave(key, Why.otherwise if meets else Why.unknown, MEETING if meets else "a command's output: set it in runner.env")
        return
    try:
        words, launch = split(_expanded(job, rest)), None if exports else read_line(_expanded(job, rest))
    except ValueError:
        words, launch = [rest], None
    if launch is not None:
        job.launches.append((key, launch))
        return
    book.use(key)
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier():
            job.variables[name] = value
            if exports:
                job.exported[name] = ((*key, name) if len(words) > 1 else key, value)


def _expanded(job: _Job, text: str) -> str:
    """Replace the variables whose values are known; others stay as they stand."""
    nodes, ranks = job.options.get("nodes", ((), ""))[1], _slots(job)
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
        r'"\$\{(\w+)\[[@*]\]\}"|\$\{(\w+)\[[@*]\]\}', lambda found: values.get(found[1] or found[2], found[0]), text.replace("\\$", "$")
    )
    text = re.sub(r"\$\(\(\s*\$?\{?(\w+)\}?\s*\*\s*\$?\{?(\w+)\}?\s*\)\)", lambda found: _product(values, found), text)
    job.used.update(re.findall(r"\$\{?(\w+)", text))
    for _ in range(_DEEPEST):
        if len(text) > _LONGEST_LINE:
            raise ValueError("its variables make too long a line")
        text = re.sub(r"\$(?:(\w+)|\{(\w+)\}|\{(\w+):-([^{}]*)\})", lambda found: _value(values, found), text)
    return text


def _product(values: dict[str, str], found: re.Match[str]) -> str:
    one, other = (values.get(name, name) for name in found.groups())
    return str(int(one) * int(other)) if one.isdigit() and other.isdigit() else found[0]


def _value(values: dict[str, str], found: re.Match[str]) -> str:
    name = found[1] or found[2] or found[3]
    return values.get(name, found[4] if found[3] else found[0])


def _slots(job: _Job) -> int | None:
    """Return the GPUs of a node by the script's options."""
    for name in _GPUS[:2]:
        count = _COUNT.fullmatch(job.options[name][1].partition(",")[0]) if name in job.options else None
        if count:
            return int(count[1])
    nodes, total = job.options.get("nodes", ((), "1"))[1], job.options.get("gpus", ((), ""))[1]
    count = _COUNT.fullmatch(total)
    if count and nodes.isdigit() and int(nodes) and int(count[1]) % int(nodes) == 0:
        return int(count[1]) // int(nodes)
    return None


def _launch(book: Book, job: _Job) -> None:
    (key, launch), *others = job.launches
    for other, _ in others:
        book.leave(other, Why.otherwise, "one run starts one script: a config of its own")
    around = _around(book, (*key, "around"), launch)
    nodes, slots = carry(book, key, launch)
    _numbers(book, job, launch, nodes, slots)
    for name, (at, value) in {**job.exported, **around}.items():
        if name in job.used and " " in value:  # a part of the command line
            book.use(at)
            continue
        carry_variable(book, at, name, value, own_network=book.carried("runner.runner_type") == "slurm")
    for name, (at, value) in job.options.items():
        _option(book, at, name, value)
    if _slots(job):
        book.show_gpus()


def _numbers(book: Book, job: _Job, launch: Launch, nodes: int | None, slots: int | None) -> None:
    at, given = job.options.get("nodes", (("nodes",), ""))
    low, _, high = given.partition("-")
    if low.isdigit() and high.isdigit() and high != low:
        book.carry(at, "runner.min_nodes", int(low))
        book.put("runner.max_nodes", int(high))
    elif low.isdigit():
        book.carry(at, "runner.nodes", int(low))
        if nodes is not None and nodes != int(low):
            book.note(f"torchrun has --nnodes {nodes}, and #SBATCH --nodes {low}: runner.nodes is {low}")
    elif nodes is not None:
        book.put("runner.nodes", nodes)
    if nodes and nodes > 1 and book.carried("runner.runner_type") == "local":
        book.place("swarm")
    per_node = job.options.get("ntasks-per-node", ((), ""))
    alone = launch.program == "python"
    ranks = slots or (int(per_node[1]) if alone and per_node[1].isdigit() else None) or _slots(job)
    if ranks is not None:
        book.put("runner.default_gpu_count", ranks)
    if per_node[0]:
        book.leave(per_node[0], Why.otherwise, "runner.default_gpu_count" if alone else "a supervisor on each node", value=per_node[1])
    for name in _GPUS:
        if name in job.options and not _by_slurm(book, "options"):
            of_gpus, value = job.options[name]
            same = name in _GPUS[:3] and _slots(job) == ranks is not None
            book.use(of_gpus) if same else book.leave(of_gpus, Why.otherwise, "runner.default_gpu_count", value=value)
        elif name == "gpus" and name in job.options and _slots(job):
            book.carry(job.options[name][0], "runner.slurm.gpus_per_node", _slots(job))
    if alone and ranks and ranks > 1:
        book.note("srun started a process for each rank; torchrun does so now: the script finds RANK and WORLD_SIZE in its environment")


def _option(book: Book, at: Key, name: str, value: str) -> None:
    if book.spoken(at):
        return
    if _by_slurm(book, "options") and name not in _OURS:
        _slurm(book, at, name, value)
    elif name in _LEFT:
        book.leave(at, *_LEFT[name], value=value)
    else:
        queued = name in ("partition", "account", "qos", "time", "dependency", "array")
        book.leave(at, Why.nothing, "the queue is Slurm's; a swarm has none" if queued else "", value=value)


def _by_slurm(book: Book, name: str) -> bool:
    """Return whether the run is Slurm's, and its launcher has the setting `name`."""
    return book.carried("runner.runner_type") == "slurm" and known(f"runner.slurm.{name}")


def _add(book: Book, at: Key, name: str, value: str) -> None:
    path = f"runner.slurm.{name}"
    book.carry(at, path, [*(book.carried(path) or ()), value])


def _slurm(book: Book, at: Key, name: str, value: str) -> None:
    """Carry an option to where Slurm's launcher has it, else as it stands."""
    lead = re.search(r"@(\d+)$", value)
    if name in _SLURM and _by_slurm(book, _SLURM[name]) and (value.isdigit() or name not in _NUMBERS):
        book.carry(at, f"runner.slurm.{_SLURM[name]}", int(value) if name in _NUMBERS else value)
    elif name in ("requeue", "no-requeue") and _by_slurm(book, "requeue"):
        book.carry(at, "runner.slurm.requeue", name == "requeue")
    elif name == "signal" and lead and _by_slurm(book, "signal_seconds"):
        book.carry(at, "runner.slurm.signal_seconds", int(lead[1]))
    else:
        _add(book, at, "options", f"--{name}={value}" if value else f"--{name}")


def _around(book: Book, key: Key, launch: Launch) -> dict[str, tuple[Key, str]]:
    """Speak of what stands before the program; return variables that are set there."""
    variables: dict[str, tuple[Key, str]] = {}
    words, program = list(launch.around), ""
    while words:
        word = words.pop(0)
        base, at = PurePosixPath(word).name, (*key[:-1], word.partition("=")[0])
        if base in ("apptainer", "singularity"):
            program = base
            words[:1] = [] if words[:1] in (["exec"], ["run"]) else words[:1]
        elif base in ("srun", "env", "mpirun", "numactl", "time", "nohup", "exec"):
            program = base
        elif word.startswith("-"):
            value = _value_of(word, words, program)
            at = (*key[:-1], f"{program or 'shell'} {word.partition('=')[0]}")
            if program == "mpirun" and word == "-x" and "=" in value:
                variables[value.partition("=")[0]] = ((*at, value.partition("=")[0]), value.partition("=")[2])
            elif program in ("apptainer", "singularity"):
                _container(book, at, word.lstrip("-").partition("=")[0], value, variables)
            else:
                started = program in ("srun", "mpirun")
                ranks = word in ("-n", "-np", "--ntasks", "--ntasks-per-node")
                instead = "runner.nodes and runner.default_gpu_count" if ranks else "a supervisor is started on each node"
                told = (Why.otherwise, instead) if started else (Why.nothing, "")
                book.leave(at, *told, value=f"{value} {words.pop(0)}" if word.endswith("-mca") and words else value)
        elif program in ("apptainer", "singularity"):
            _image(book, (*key[:-1], "image"), word, program)
            program = ""
        elif "=" in word and at[-1].isidentifier():
            variables[at[-1]] = (at, word.partition("=")[2])
        else:
            book.leave(at, Why.nothing, "", value=word)
    return variables


def _value_of(word: str, words: list[str], program: str) -> str:
    """Return the value of the option `word`, taken off `words` if it stands there."""
    name, equals, value = word.lstrip("-").partition("=")
    alone = name in (_CONTAINER_FLAGS if program in ("apptainer", "singularity") else _SRUN_FLAGS)
    return value if equals or alone or not words or words[0].startswith("-") else words.pop(0)


def _container(book: Book, at: Key, name: str, value: str, variables: dict[str, tuple[Key, str]]) -> None:
    """Speak of an option of apptainer's; note the variables that it sets."""
    inside = "runner.slurm.apptainer"
    if _by_slurm(book, "apptainer.binds") and name in ("B", "bind", "nv", "home", "H", "env"):
        if name in ("B", "bind"):
            tell_variables(book, f"{inside}.binds", value)
            book.carry(at, f"{inside}.binds", [*(book.carried(f"{inside}.binds") or ()), *value.split(",")])
        elif name == "env":
            pairs = dict(pair.split("=", 1) for pair in value.split(",") if "=" in pair)
            book.carry(at, f"{inside}.env", {variable: text for variable, text in pairs.items() if not is_secret(variable)})
            for variable in filter(is_secret, pairs):
                book.leave((*at, variable), Why.otherwise, f"runner.secrets: {{{variable}: FILE}}", value="…")
        else:
            book.carry(at, f"{inside}.{'nv' if name == 'nv' else 'home'}", True if name == "nv" else value)
    elif name in ("B", "bind"):
        before = book.carried("runner.docker_config.docker_mounts") or []
        if mounts := [*before, *_binds(book, at, value)]:
            book.put("runner.docker_config.docker_mounts", mounts)
    elif name == "env":
        variables |= {pair.partition("=")[0]: ((*at, pair.partition("=")[0]), pair.partition("=")[2]) for pair in value.split(",")}
    elif name == "nv":
        book.show_gpus()
    else:
        book.leave(at, Why.nothing, "", value=value)


_SRUN_FLAGS = ("l", "label", "u", "unbuffered", "exclusive", "K", "k", "no-kill", "overlap", "verbose", "v", "wait")


def _binds(book: Book, at: Key, value: str) -> list[tuple[str, str]]:
    found = []
    for bind in value.split(","):
        source, _, target = bind.partition(":")
        target, _, mode = target.partition(":")
        if "$" in bind or not source.startswith("/"):
            book.leave((*at, bind), Why.unknown, "runner.docker_config.docker_mounts", value=bind)
        else:
            found.append((source, target or source))
            if mode == "ro":
                book.leave((*at, bind), Why.nothing, "mounts can be written to", value=bind)
    return found


def _image(book: Book, at: Key, word: str, program: str) -> None:
    if _by_slurm(book, "apptainer.image"):
        book.carry(at, "runner.slurm.apptainer.image", word)
        if program == "singularity":
            book.put("runner.slurm.apptainer.program", program)
    elif word.startswith("docker://") and "$" not in word:
        book.carry(at, "runner.docker_config.docker_container", word.removeprefix("docker://"))
    else:
        book.leave(
            at, Why.otherwise, "an image from a registry: runner.docker_config.docker_container, made by swarmtrain image build", value=word
        )
