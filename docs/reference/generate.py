"""Write what the pages of this folder take from the code. `python docs/reference/generate.py`; a test fails when they are stale.

cli.md and config.md are made whole. In environment.md and stack-file.md a person's words stand around what is made:
`<!-- made: NAME -->`, up to `<!-- end -->`.
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

from swarmtrain.cli import build
from swarmtrain.config import Config
from swarmtrain.config.training_groups import TrainingGroupConfig
from swarmtrain.wire import PREFIX, BoardEnv, NodeEnv

HERE = Path(__file__).parent
STACK = HERE.parents[1] / "compose" / "generated.yml"
_COMPLETION = """
## Shell completion

`swarmtrain --install-completion`, once, in the shell that you use: bash, zsh, fish or PowerShell. From the next shell on,
TAB completes commands, options, the names of runs and of the lab's nodes, config files, and for `-o` every key of the config;
behind the key and `=`, what it may be.
"""
_MADE = re.compile(r"(<!-- made: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def cli() -> str:
    """Return the page of commands, each with its arguments and options."""
    head = "# Command line\n\nMade from the code by `docs/reference/generate.py`. RUN is optional: without it, the only run there is.\n"
    return (
        head + _COMPLETION + "".join(_command(name, command) for name, command in _commands("swarmtrain", typer.main.get_command(build())))
    )


def config() -> str:
    """Return the page of config keys, each with its default and what it is."""
    head = "# Config\n\nMade from the code by `docs/reference/generate.py`. `swarmtrain init` writes the same as a file to start from.\n"
    sections = {name: getattr(Config(), name) for name in Config.model_fields}
    told = {name: field.description or "" for name, field in Config.model_fields.items()}
    pages = [_section(name, told[name], value) for name, value in sections.items() if isinstance(value, BaseModel)]
    groups = _section("training_groups", "A list of these. " + told["training_groups"], TrainingGroupConfig(group_name="…"))
    free = f"\n## script\n\n{Config.model_fields['script'].description}\n"
    return head + "".join(pages) + groups + free


def environment() -> str:
    """Return the page of environment variables, with what crosses between launcher and nodes as wire.py has it."""
    return _filled("environment.md", lambda name: _variables({"NodeEnv": NodeEnv, "BoardEnv": BoardEnv}[name]))


def stack_file() -> str:
    """Return the page of the stack file, with its excerpts as they stand in the quickstart's."""
    document = yaml.safe_load(STACK.read_text())
    return _filled("stack-file.md", lambda name: f"```yaml\n{_excerpt(document, name.split('.'))}```\n")


def _filled(page: str, made: Callable[[str], str]) -> str:
    return _MADE.sub(lambda found: f"{found[1]}{made(found[2])}{found[3]}", (HERE / page).read_text())


def _variables(kind: type) -> str:
    """Return a table of the variables that `kind` travels as; what a field is, its docstring says."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    told = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
    return "| variable | what it is |\n| --- | --- |\n" + "".join(
        f"| `{PREFIX}{name.upper()}` | {told[name]} |\n" for name in kind.__annotations__
    )


def _excerpt(document: Any, keys: list[str]) -> str:
    """Return what stands at the dotted `keys` as it stands in the file; `a+b` are two keys beside each other."""
    *path, last = keys
    for key in path:
        document = document[key]
    chosen = {key: document[key] for key in last.split("+")}
    for key in reversed(path):
        chosen = {key: chosen}
    return yaml.safe_dump(chosen, sort_keys=False, width=140, allow_unicode=True)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(command, TyperGroup):
        for word, found in command.commands.items():
            yield from _commands(f"{name} {word}", found)
    else:
        yield name, command


def _command(name: str, command: Any) -> str:
    arguments = " ".join(str(item.metavar or item.name.upper()) for item in command.params if item.param_type_name == "argument")
    options = [item for item in command.params if item.param_type_name == "option"]
    rows = "".join(f"| `{', '.join([*item.opts, *item.secondary_opts])}` | {item.help or ''} |\n" for item in options)
    table = f"\n| option | what it does |\n| --- | --- |\n{rows}" if rows else ""
    return f"\n## `{name}{f' {arguments}' if arguments else ''}`\n\n{command.help.strip()}\n{table}"


def _section(name: str, description: str, section: BaseModel) -> str:
    rows = "".join(_rows("", section))
    return f"\n## {name}\n\n{description}\n\n| key | default | what it is |\n| --- | --- | --- |\n{rows}"


def _rows(prefix: str, section: BaseModel) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _rows(f"{prefix}{name}.", value)
        else:
            yield f"| `{prefix}{name}` | `{_default(value)}` | {field.description} |\n"


def _default(value: Any) -> str:
    return "null" if value is None else "[]" if value == () else str(value).lower() if isinstance(value, bool) else str(value)


PAGES = {"cli.md": cli, "config.md": config, "environment.md": environment, "stack-file.md": stack_file}

if __name__ == "__main__":
    for page, text in PAGES.items():
        (HERE / page).write_text(text())
