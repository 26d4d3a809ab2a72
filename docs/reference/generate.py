"""Write what the pages of this folder take from the code. `python docs/reference/generate.py`; a test fails when they are stale.

cli.md and config.md are made whole. In environment.md and stack-file.md a person's words stand around what is made:
`<!-- generated: NAME -->`, up to `<!-- end -->`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
import yaml
from pydantic import BaseModel
from typer.core import TyperGroup

from swarmtrain.cli import build_app
from swarmtrain.config import Config
from swarmtrain.config.schema.fields.notify_channel import NotifyChannelConfig
from swarmtrain.config.schema.training_groups import TrainingGroupConfig
from swarmtrain.protocol import ENV_PREFIX, CoordinatorEnv, NodeEnv

REFERENCE_FOLDER = Path(__file__).parent
STACK_FILE = REFERENCE_FOLDER.parents[1] / "compose" / "generated.yml"
_COMPLETION_TEXT = """
## Shell completion

Run `swarmtrain --install-completion` once in your shell: bash, zsh, fish or PowerShell. In each new shell, TAB completes
commands, options, the names of runs and of the lab's nodes, config files, and for `-o` the keys of the config; after `KEY=`, it
completes the values that the key allows.
"""
_EXAMPLE_CHANNEL = NotifyChannelConfig(secret=Path("…"))
_GENERATED_PATTERN = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render_cli_page() -> str:
    """Return the page of commands, each with its arguments and options."""
    header = "# Command line\n\nMade from the code by `docs/reference/generate.py`. RUN is optional: without it, the only run there is.\n"
    return (
        header
        + _COMPLETION_TEXT
        + "".join(_render_command(name, command) for name, command in _iterate_commands("swarmtrain", typer.main.get_command(build_app())))
    )


def render_config_page() -> str:
    """Return the page of config keys, each with its default and what it is."""
    header = "# Config\n\nMade from the code by `docs/reference/generate.py`. `swarmtrain init --full` writes the same as a config file.\n"
    sections = {name: getattr(Config(), name) for name in Config.model_fields}
    descriptions = {name: field.description or "" for name, field in Config.model_fields.items()}
    pages = [_render_section(name, descriptions[name], value) for name, value in sections.items() if isinstance(value, BaseModel)]
    groups = _render_section("training_groups", "A list of these. " + descriptions["training_groups"], TrainingGroupConfig(group_name="…"))
    channels = _render_section("notify", "A mapping of names to these. " + descriptions["notify"], _EXAMPLE_CHANNEL)
    script_section = f"\n## script\n\n{Config.model_fields['script'].description}\n"
    return header + "".join(pages) + groups + channels + script_section


def render_environment_page() -> str:
    """Return the page of environment variables, from the dataclasses in protocol.py."""
    return _fill_page("environment.md", lambda name: _render_variables({"NodeEnv": NodeEnv, "CoordinatorEnv": CoordinatorEnv}[name]))


def render_stack_file_page() -> str:
    """Return the page of the stack file, with its excerpts as they stand in the quickstart's."""
    document = yaml.safe_load(STACK_FILE.read_text())
    return _fill_page("stack-file.md", lambda name: f"```yaml\n{_render_excerpt(document, name.split('.'))}```\n")


def _fill_page(page: str, render_block: Callable[[str], str]) -> str:
    return _GENERATED_PATTERN.sub(lambda found: f"{found[1]}{render_block(found[2])}{found[3]}", (REFERENCE_FOLDER / page).read_text())


def _render_variables(env_class: type) -> str:
    """Return a table of the variables that `kind` travels as; what a field is, its docstring says."""
    body = ast.parse(inspect.getsource(env_class)).body[0].body  # type: ignore[attr-defined]
    descriptions = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
    return "| variable | what it is |\n| --- | --- |\n" + "".join(
        f"| `{ENV_PREFIX}{name.upper()}` | {descriptions[name]} |\n" for name in env_class.__annotations__
    )


def _render_excerpt(document: Any, keys: list[str]) -> str:
    """Return the text of the file at the dotted `keys`; `a+b` names two sibling keys."""
    *path, last = keys
    for key in path:
        document = document[key]
    selected = {key: document[key] for key in last.split("+")}
    for key in reversed(path):
        selected = {key: selected}
    return yaml.safe_dump(selected, sort_keys=False, width=140, allow_unicode=True)


def _iterate_commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for word, subcommand in command.commands.items():
            yield from _iterate_commands(f"{name} {word}", subcommand)
    else:
        yield name, command


def _render_command(name: str, command: Any) -> str:
    arguments = " ".join(str(item.metavar or item.name.upper()) for item in command.params if item.param_type_name == "argument")
    options = [item for item in command.params if item.param_type_name == "option"]
    rows = "".join(f"| `{', '.join([*item.opts, *item.secondary_opts])}` | {item.help or ''} |\n" for item in options)
    table = f"\n| option | what it does |\n| --- | --- |\n{rows}" if rows else ""
    return f"\n## `{name}{f' {arguments}' if arguments else ''}`\n\n{command.help.strip()}\n{table}"


def _render_section(name: str, description: str, section: BaseModel) -> str:
    rows = "".join(_iterate_rows("", section))
    return f"\n## {name}\n\n{description}\n\n| key | default | what it is |\n| --- | --- | --- |\n{rows}"


def _iterate_rows(prefix: str, section: BaseModel) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _iterate_rows(f"{prefix}{name}.", value)
        else:
            yield f"| `{prefix}{name}` | `{_format_default(value)}` | {field.description} |\n"


def _format_default(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else "[]" if value == () else str(value).lower() if isinstance(value, bool) else str(value)


PAGES = {
    "cli.md": render_cli_page,
    "config.md": render_config_page,
    "environment.md": render_environment_page,
    "stack-file.md": render_stack_file_page,
}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (REFERENCE_FOLDER / page).write_text(text())
