"""What a shell is offered on TAB: runs, labs and their nodes, config files, and every key that -o can override.

Each function gets what has been typed of a word and returns what could stand there, with a help text where there is one.
None of them says anything if it cannot find out, and none takes longer than a person waits.
"""

import os
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from swarmtrain.launchers.base import Launcher

_PATIENCE = 0.8  # seconds for an engine to answer
_KEY = "_SWARMTRAIN_COMPLETE_KEY"

Offer = list[tuple[str, str]]


def rejoin(environ: MutableMapping[str, str]) -> None:
    """Take bash's cut through `-o key=value` back: it makes three words of it, and wants the last one alone.

    The key is left in `environ` for `overrides`.
    """
    words = environ.get("COMP_WORDS", "").split("\n")
    current = int(environ.get("COMP_CWORD") or 0)
    while (at := _equals(words, current)) is not None:
        if at == current or at + 1 == current:
            environ[_KEY] = words[at - 1]
            words[at - 1 : current + 1] = [words[current] if at < current else ""]
            current = at - 1
        else:
            words[at - 1 : at + 2] = ["".join(words[at - 1 : at + 2])]
            current -= 2
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(words), str(current)


def runs(incomplete: str) -> Offer:
    """Return the runs there are, of every launcher that answers in time."""
    from swarmtrain.config.runner import RunnerType
    from swarmtrain.launchers import load

    makers = [load(kind) for kind in reversed(RunnerType)]  # the patience is for an engine, not for imports
    return [(run, "") for run in sorted(_in_time(lambda: _all_runs(makers))) if run.startswith(incomplete)]


def configs(incomplete: str) -> Offer:
    """Return the YAML files that begin with `incomplete`, and the folders that may hold some."""
    typed = incomplete[: incomplete.rfind("/") + 1]
    there = _beginning(typed, incomplete[len(typed) :])
    found = [(f"{typed}{path.name}", "") for path in there if path.suffix in (".yml", ".yaml") and not path.is_dir()]
    folders = [f"{typed}{path.name}/" for path in there if path.is_dir()]
    if not found and len(folders) == 1:
        return configs(folders[0])  # a shell would put a space after the only thing there is
    return [*found, *((folder, "") for folder in folders)]


def overrides(incomplete: str) -> Offer:
    """Return the keys of the config that begin with `incomplete`; behind a key and `=`, what may stand there."""
    from swarmtrain.cli import schema

    if key := os.environ.get(_KEY):
        return [(value, "") for value in schema.values(key)]
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", "") for value in schema.values(key)]
    keys = [(name, told) for name, told in schema.described() if name.startswith(key)]
    if len(keys) != 1:
        return keys
    # Two that begin alike, or a shell would put a space behind the only one.
    (name, told), *_ = keys
    return [(f"{name}=", told), *((f"{name}={value}", told) for value in schema.values(name) or ("…",))]


def labs(incomplete: str) -> Offer:
    """Return the labs of this machine."""
    from swarmtrain.errors import SwarmtrainError
    from swarmtrain.lab import state

    try:
        return [(lab.name, f"{len(lab.nodes)} nodes") for lab in state.all_labs(state.base_directory()) if lab.name.startswith(incomplete)]
    except (SwarmtrainError, OSError):
        return []


def nodes(ctx: typer.Context, incomplete: str) -> Offer:
    """Return the nodes of the lab that --name names so far."""
    from swarmtrain.errors import SwarmtrainError
    from swarmtrain.lab import DEFAULT_NAME, state

    try:
        found = state.read(state.base_directory() / (ctx.params.get("name") or DEFAULT_NAME))
    except (SwarmtrainError, OSError):
        return []
    return [(node, found.address(node)) for node in found.nodes if node.startswith(incomplete)] if found else []


def _equals(words: list[str], current: int) -> int | None:
    """Return the place of the first `=` that bash made a word of, up to the current one, behind an -o and a key."""
    places = (at for at in range(3, current + 1) if words[at : at + 1] == ["="])
    return next((at for at in places if words[at - 2] in ("-o", "--override")), None)


def _beginning(folder: str, name: str) -> list[Path]:
    try:
        there = sorted(Path(folder or ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    return [path for path in there if path.name.startswith(name) and (name or not path.name.startswith("."))]


def _all_runs(makers: "list[Callable[[], Launcher]]") -> Iterator[str]:
    from swarmtrain.errors import SwarmtrainError

    for make in makers:
        with suppress(SwarmtrainError):
            yield from make().runs()


def _in_time(ask: Callable[[], Iterator[str]]) -> list[str]:
    """Return what `ask` has yielded within the time that a person waits."""
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.extend(ask()), daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return list(found)
