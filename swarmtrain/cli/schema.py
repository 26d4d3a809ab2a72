"""The config's keys and what may stand behind each, for completion."""

from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from swarmtrain.config import Config


def described() -> list[tuple[str, str]]:
    """Return the dotted path of every key that has a value of its own, with what it is."""
    return [(path, field.description or "") for path, field in _fields("", Config)]


def values(key: str) -> list[str]:
    """Return what `key` may be, where there is a choice; else its default. Nothing for a key that is none."""
    field = dict(_fields("", Config)).get(key)
    if field is None:
        return []
    chosen = list(_choices(field.annotation))
    chosen = [] if chosen == ["null"] else chosen
    return chosen or ([str(field.default)] if isinstance(field.default, str | int | float) else [])


def _fields(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(f"{prefix}{name}.", inner)
        else:
            yield f"{prefix}{name}", field


def _choices(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif annotation is type(None):
        yield "null"
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (str(item.value) for item in annotation)
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) is not None and not issubclass(get_origin(annotation) or object, tuple | dict):
        for part in get_args(annotation):
            yield from _choices(part)
