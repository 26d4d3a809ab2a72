"""Config keys and their possible values, for shell completion."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmtrain.config import Config
from swarmtrain.config.schema.runner_types import list_runner_types


def list_config_keys() -> list[tuple[str, str]]:
    """Return the dotted path and description of every config key that is not a section."""
    return [(path, field.description or "") for path, field in _iterate_config_fields("", Config)]


def suggest_values(key: str) -> list[str]:
    """Return the possible values of `key` if its type is an enumeration, else its default. Empty for an unknown key."""
    if key == "runner.runner_type":
        return list_runner_types()
    field = dict(_iterate_config_fields("", Config)).get(key)
    if field is None:
        return []
    choices = list(_iterate_allowed_values(field.annotation))
    choices = [] if choices == ["null"] else choices
    return choices or ([str(field.default)] if isinstance(field.default, str | int | float) else [])


def _iterate_config_fields(prefix: str, section_class: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section_class.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _iterate_config_fields(f"{prefix}{name}.", annotation)
        else:
            yield f"{prefix}{name}", field


def _iterate_allowed_values(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (str(item.value) for item in annotation)
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) is not None and not issubclass(get_origin(annotation) or object, tuple | dict):
        for argument in get_args(annotation):
            yield from _iterate_allowed_values(argument)
