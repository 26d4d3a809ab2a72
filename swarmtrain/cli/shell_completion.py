"""Shell completion of run names, labs and their nodes, config files, and the config keys that -o can override.

Each completion function takes the incomplete word and returns the possible completions, with their help texts if they have any. On failure
it returns nothing. Functions that query engines have a timeout.
"""

import os
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from swarmtrain.launchers.base import Launcher

_TIMEOUT_SECONDS = 0.8  # seconds to wait for an engine
_KEY_VARIABLE = "_SWARMTRAIN_COMPLETE_KEY"

CompletionItems = list[tuple[str, str]]


def rejoin_override_words(environ: MutableMapping[str, str]) -> None:
    """Rejoin `-o key=value`, which bash splits into three words, so that the key is known when the value is completed.

    The key is stored in `environ`, where `complete_overrides` reads it.
    """
    words = environ.get("COMP_WORDS", "").split("\n")
    current = int(environ.get("COMP_CWORD") or 0)
    while (equals_index := _find_equals_sign(words, current)) is not None:
        if equals_index == current or equals_index + 1 == current:
            environ[_KEY_VARIABLE] = words[equals_index - 1]
            words[equals_index - 1 : current + 1] = [words[current] if equals_index < current else ""]
            current = equals_index - 1
        else:
            words[equals_index - 1 : equals_index + 2] = ["".join(words[equals_index - 1 : equals_index + 2])]
            current -= 2
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(words), str(current)


def complete_runs(incomplete: str) -> CompletionItems:
    """Return the names of the runs that begin with `incomplete`, of every launcher that responds before the timeout."""
    launcher_classes = _load_launcher_classes()  # imported before the timeout starts: it limits only the queries to engines
    return [
        (run, "")
        for run in sorted(_collect_items_within_timeout(lambda: _iterate_run_names(launcher_classes)))
        if run.startswith(incomplete)
    ]


def complete_config_files(incomplete: str) -> CompletionItems:
    """Return the YAML files and the folders whose paths begin with `incomplete`."""
    directory = incomplete[: incomplete.rfind("/") + 1]
    matches = _list_matching_paths(directory, incomplete[len(directory) :])
    config_files = [(f"{directory}{path.name}", "") for path in matches if path.suffix in (".yml", ".yaml") and not path.is_dir()]
    folders = [f"{directory}{path.name}/" for path in matches if path.is_dir()]
    if not config_files and len(folders) == 1:
        return complete_config_files(folders[0])  # a shell would append a space to a single candidate
    return [*config_files, *((folder, "") for folder in folders)]


def complete_overrides(incomplete: str) -> CompletionItems:
    """Return the config keys that begin with `incomplete`; if it already contains `key=`, return the possible values of that key."""
    from swarmtrain.cli import config_keys

    if key := os.environ.get(_KEY_VARIABLE):
        return [(value, "") for value in config_keys.suggest_values(key)]
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", "") for value in config_keys.suggest_values(key)]
    keys = [(name, help_text) for name, help_text in config_keys.list_config_keys() if name.startswith(key)]
    if len(keys) != 1:
        return keys
    # Return several candidates with a common prefix: a shell would append a space to a single candidate.
    (name, help_text), *_ = keys
    return [(f"{name}=", help_text), *((f"{name}={value}", help_text) for value in config_keys.suggest_values(name) or ("…",))]


def complete_labs(incomplete: str) -> CompletionItems:
    """Return the names of the labs on this machine that begin with `incomplete`."""
    from swarmtrain.errors import SwarmtrainError
    from swarmtrain.lab import state

    try:
        return [
            (lab.name, f"{len(lab.nodes)} nodes") for lab in state.list_labs(state.get_labs_folder()) if lab.name.startswith(incomplete)
        ]
    except (SwarmtrainError, OSError):
        return []


def complete_lab_nodes(ctx: typer.Context, incomplete: str) -> CompletionItems:
    """Return the node names of the lab that the option --name selects on the incomplete command line."""
    from swarmtrain.errors import SwarmtrainError
    from swarmtrain.lab import DEFAULT_NAME, state

    try:
        lab = state.read_lab_description(state.get_labs_folder() / (ctx.params.get("lab_name") or DEFAULT_NAME))
    except (SwarmtrainError, OSError):
        return []
    return [(node, lab.get_node_address(node)) for node in lab.nodes if node.startswith(incomplete)] if lab else []


def _find_equals_sign(command_line_words: list[str], current_word_index: int) -> int | None:
    """Return the index of the word `=` that follows `-o KEY`, up to `current_word_index`; None if it is missing."""
    positions = (position for position in range(3, current_word_index + 1) if command_line_words[position : position + 1] == ["="])
    return next((position for position in positions if command_line_words[position - 2] in ("-o", "--override")), None)


def _list_matching_paths(folder: str, name_prefix: str) -> list[Path]:
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    return [path for path in entries if path.name.startswith(name_prefix) and (name_prefix or not path.name.startswith("."))]


def _load_launcher_classes() -> "list[type[Launcher]]":
    """Return all launcher classes that can be imported; those that query a Docker engine come last."""
    from swarmtrain.config.schema.runner_types import list_runner_types
    from swarmtrain.errors import SwarmtrainError
    from swarmtrain.launchers.registry import load_launcher_class

    classes = []
    for runner_type in reversed(list_runner_types()):
        with suppress(SwarmtrainError):
            classes.append(load_launcher_class(runner_type))
    return classes


def _iterate_run_names(launcher_classes: "Sequence[Callable[[], Launcher]]") -> Iterator[str]:
    for launcher_class in launcher_classes:
        with suppress(Exception):  # another package's launcher may raise anything
            yield from launcher_class().list_runs()


def _collect_items_within_timeout(generate_items: Callable[[], Iterator[str]]) -> list[str]:
    """Return the items that the generator `generate_items` yields before the completion timeout expires."""
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.extend(generate_items()), daemon=True)
    thread.start()
    thread.join(_TIMEOUT_SECONDS)
    return list(results)
