"""Other tools' files → a config, and a list of what it could not hold.

book        what becomes of each key of a source
launch      command lines that start training
scaling, accelerate, deepspeed, sbatch, compose, huggingface   a format each
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from swarmtrain.config.files import OPEN, Unreadable, reason, write_all
from swarmtrain.config.files import read as read_bytes
from swarmtrain.config.load import order_problems
from swarmtrain.config.source import NotYaml, Source, kind, read_yaml
from swarmtrain.errors import ConfigError, Problem, SwarmtrainError
from swarmtrain.importers import accelerate, compose, deepspeed, huggingface, sbatch, scaling
from swarmtrain.importers.book import Book, Imported, LeftOut, Why
from swarmtrain.importers.launch import starts_training

__all__ = ["Format", "Import", "Imported", "LeftOut", "Why", "convert", "load", "named", "write"]

_MAX_BYTES = 1_000_000
_KNOWN = "a Scaling config, an accelerate config, a DeepSpeed JSON or hostfile, an sbatch script, a compose file, a model's config.json"
_OURS = ("swarm", "local", "docker", "slurm")


class Format(StrEnum):
    """Kinds of files that can be imported."""

    scaling = "scaling"
    accelerate = "accelerate"
    deepspeed = "deepspeed"
    sbatch = "sbatch"
    compose = "compose"
    huggingface = "huggingface"


@dataclass(frozen=True)
class Import:
    """A file that was read as `format`, and what has become of it."""

    source: str
    format: Format
    result: Imported

    def yaml(self) -> str:
        """Return the config as YAML, less what is default."""
        head = f"# From {self.source} ({self.format}), by swarmtrain import. What is not here is default.\n"
        values = self.result.values
        body = yaml.dump(_pairs(values), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True) if values else "{}\n"
        return head + body

    def report(self) -> str:
        """Return what is not in the config, as a table, and the notes."""
        rows = [("KEY", "LINE", "VALUE", "WHY", "INSTEAD")]
        rows += [(one.key, str(one.line or ""), one.value, one.why.value, one.instead) for one in self.result.left_out]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        cells = ("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows)
        table = ["not in the config:", *(f"  {line}" for line in cells)] if len(rows) > 1 else []
        return "\n".join([*table, *(f"note: {note}" for note in self.result.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for a script."""
        left = [
            {"key": one.key, "line": one.line, "value": one.value, "why": one.why.value, "instead": one.instead}
            for one in self.result.left_out
        ]
        return {
            "source": self.source,
            "format": self.format.value,
            "config": self.result.values,
            "left_out": left,
            "notes": list(self.result.notes),
        }


def load(path: Path, *, hostsfile: Path | None = None, form: Format | None = None) -> Import:
    """Return the import of the file at `path`, of a run on the hosts of `hostsfile`. `form` overrides what its content tells.

    Raises ConfigError with the places of the file that cannot be, SwarmtrainError if it cannot be read or is none of the known formats.
    """
    text = _text(path)
    hosts = deepspeed.read_hosts(_text(hostsfile), str(hostsfile)) if hostsfile else ()
    model = str(path.parent) if next(path.parent.glob("*.safetensors"), None) else None
    return convert(text, str(path), hosts=hosts, form=form, model=model)


def named(form: str | None) -> Format | None:
    """Return the format of this name. Raises SwarmtrainError if there is none."""
    if form is not None and form not in list(Format):
        raise SwarmtrainError(f"{form!r} is no format", place="--from", hint=f"there are {', '.join(Format)}")
    return None if form is None else Format(form)


def convert(text: str, source: str, *, hosts: tuple[str, ...] = (), form: Format | None = None, model: str | None = None) -> Import:
    """Return the import of `text`, which came from `source`; `model` is the folder of weights beside it. Raises as `load` does."""
    if not text.strip():
        raise SwarmtrainError("holds nothing", place=source, hint=f"it can be {_KNOWN}")
    if form is Format.sbatch or (form is None and _is_script(text)):
        return _script(text, source, hosts)
    if form in (None, Format.deepspeed) and deepspeed.is_hostfile(text):
        book = Book({})
        deepspeed.carry_hosts(book, deepspeed.read_hosts(text, source), ("hostsfile",))
        return Import(source, Format.deepspeed, book.close(source))
    try:
        found = _yaml(text, source)
    except ConfigError:
        if form is None and starts_training(text):
            return _script(text, source, hosts)
        raise
    if form is None and isinstance(found.values, str) and starts_training(text):
        return _script(text, source, hosts)
    if not isinstance(found.values, dict):
        raise SwarmtrainError(f"is none that is known: it holds {kind(found.values)}", place=source, hint=f"it can be {_KNOWN}")
    if not found.values:
        raise SwarmtrainError("holds nothing", place=source, hint=f"it can be {_KNOWN}")
    form = form or _format(found.values, source)
    book = Book(found.values, found.lines)
    _read(book, form, source, hosts, model)
    return Import(source, form, book.close(source))


def write(made: Import, path: Path, *, force: bool = False) -> None:
    """Write the config to `path`. Raises SwarmtrainError if the file exists (unless `force`) or cannot be written."""
    try:
        if path.exists() and not force:
            raise SwarmtrainError("exists already", place=str(path), hint="--force overwrites it")
        write_all({path: (made.yaml().encode(), OPEN)})
    except OSError as error:
        raise SwarmtrainError(f"cannot be written: {reason(error)}", place=str(path), hint="name another file") from None


def _script(text: str, source: str, hosts: tuple[str, ...]) -> Import:
    book = sbatch.read(text, source)
    if hosts:
        deepspeed.carry_hosts(book, hosts, ("hostsfile",))
    return Import(source, Format.sbatch, book.close(source))


def _read(book: Book, form: Format, source: str, hosts: tuple[str, ...], model: str | None) -> None:
    if form is Format.accelerate:
        accelerate.read(book, hosts)
        return
    if form is Format.deepspeed:
        deepspeed.read(book, hosts)
    elif form is Format.scaling:
        scaling.read(book, hosts)
    elif form is Format.huggingface:
        huggingface.read(book, source, model)
    else:
        compose.read(book, source)
    if hosts:
        deepspeed.carry_hosts(book, hosts, ("hostsfile",))


def _format(values: dict[str, Any], source: str) -> Format:
    keys = {str(key) for key in values}
    runner = values.get("runner")
    if isinstance(runner, dict) and runner.get("runner_type") in _OURS:
        raise SwarmtrainError("is a swarmtrain config already", place=source, hint=f"swarmtrain plan {source}")
    for form, marks in (
        (Format.compose, {"services"} if isinstance(values.get("services"), dict) else set()),
        (Format.huggingface, huggingface.KEYS),
        (Format.accelerate, accelerate.KEYS),
        (Format.deepspeed, deepspeed.KEYS),
        (Format.scaling, scaling.SECTIONS),
    ):
        if keys & marks:
            return form
    raise SwarmtrainError(
        f"is none that is known, by its keys {', '.join(sorted(keys)[:8])}", place=source, hint=f"it can be {_KNOWN}; --from says which"
    )


def _is_script(text: str) -> bool:
    return text.startswith("#!") or any(line.lstrip().startswith("#SBATCH") for line in text.splitlines())


def _yaml(text: str, source: str) -> Source:
    try:
        found = read_yaml(text)
    except NotYaml as error:
        raise ConfigError((Problem("", f"is neither YAML nor JSON: {error}", error.line, error.hint),), source=source) from None
    if found.problems:
        raise ConfigError(order_problems(found.problems), source=source)
    return found


def _text(path: Path) -> str:
    try:
        content = read_bytes(path, _MAX_BYTES)
    except Unreadable as error:
        hint = f"ls -l {path} shows who may read it" if error.number == errno.EACCES else f"it can be {_KNOWN}"
        raise SwarmtrainError(str(error), place=str(path), hint=hint) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise SwarmtrainError("is not text", place=str(path), hint=f"it can be {_KNOWN}")
    return text.replace("\r\n", "\n")


class _Dumper(yaml.SafeDumper):
    """YAML with pairs in a line of their own."""


# The config's reader takes 3e-4 for a number, which YAML 1.1 does not: as text it needs quotes.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*\.?[\d_]*[eE][-+]?\d+"), list("-+0123456789."))
_Dumper.add_representer(tuple, lambda dumper, pair: dumper.represent_sequence("tag:yaml.org,2002:seq", pair, flow_style=True))


def _pairs(value: Any) -> Any:
    """Return `value` with lists of two texts as pairs, and paths as text."""
    if isinstance(value, dict):
        return {key: _pairs(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tuple(item) if isinstance(item, list | tuple) else _pairs(item) for item in value]
    return value
