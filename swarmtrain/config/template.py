"""The commented config that `swarmtrain init` writes: every field, its default, and what it is, from the schema itself."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmtrain.config import Config
from swarmtrain.config.files import OPEN, reason, write_all
from swarmtrain.config.presets import preset
from swarmtrain.errors import SwarmtrainError

_WIDTH = 110


def template(shape: str | None = None) -> str:
    """Return a config in YAML that loads, with all defaults written out and each field explained above it.

    `shape`: of which well-known model transformer_architecture is. Raises SwarmtrainError if it is not known.
    """
    if shape is None:
        return "# A swarmtrain config. Every line shows its default: delete what you do not change.\n" + _section(Config(), "")
    config = Config(transformer_architecture=preset(shape))
    head = f"# A swarmtrain config for a model of the shape of {shape}. All else shows its default: delete what you do not change.\n"
    return head + _section(config, "")


def write_template(path: Path, shape: str | None = None, *, force: bool = False) -> None:
    """Write the template to `path`. Raises SwarmtrainError if the file exists (unless `force`) or cannot be written."""
    try:
        if path.exists() and not force:
            raise SwarmtrainError("exists already", place=str(path), hint="--force overwrites it")
        write_all({path: (template(shape).encode(), OPEN)})
    except OSError as error:
        raise SwarmtrainError(f"cannot be written: {reason(error)}", place=str(path), hint="name another file") from None


def _section(section: BaseModel, indent: str) -> str:
    return "".join(_field(name, info, getattr(section, name), indent) for name, info in type(section).model_fields.items())


def _field(name: str, info: FieldInfo, value: Any, indent: str) -> str:
    comment = textwrap.fill(info.description or "", _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    gap = "" if indent else "\n"
    if isinstance(value, BaseModel):
        return f"{gap}{comment}\n{indent}{name}:\n{_section(value, indent + '  ')}"
    return f"{gap}{comment}\n{indent}{name}: {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    plain = json.loads(json.dumps(value, default=str))
    return yaml.safe_dump(plain, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
