"""The commented config of `swarmtrain init --full`: every field, its default and its description, from the schema."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmtrain.config import Config
from swarmtrain.config.presets import load_preset

_LINE_WIDTH = 110


def render_template(preset: str | None = None) -> str:
    """Return a valid YAML config with all defaults written out and a description above each field.

    `preset`: name of the well-known model whose architecture is used for transformer_architecture. Raises SwarmtrainError if it is unknown.
    """
    if preset is None:
        return "# A swarmtrain config. Every line shows its default: delete what you do not change.\n" + _render_section(Config(), "")
    config = Config(transformer_architecture=load_preset(preset))
    head = f"# A swarmtrain config with the architecture of {preset}. All other lines show their defaults: delete what you do not change.\n"
    return head + _render_section(config, "")


def _render_section(section: BaseModel, indent: str) -> str:
    return "".join(_render_field(name, info, getattr(section, name), indent) for name, info in type(section).model_fields.items())


def _render_field(name: str, info: FieldInfo, value: Any, indent: str) -> str:
    comment = textwrap.fill(info.description or "", _LINE_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    gap = "" if indent else "\n"
    if isinstance(value, BaseModel):
        return f"{gap}{comment}\n{indent}{name}:\n{_render_section(value, indent + '  ')}"
    return f"{gap}{comment}\n{indent}{name}: {_render_value(value)}\n"


def _render_value(value: Any) -> str:
    json_value = json.loads(json.dumps(value, default=str))
    return yaml.safe_dump(json_value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()
