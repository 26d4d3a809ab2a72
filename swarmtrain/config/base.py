"""What every section of the config shares: frozen, no unknown keys, no silent conversion."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A part of the config. Values are checked strictly: a quoted number is an error, not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


def wrong(name: str, message: str) -> PydanticCustomError:
    """Return the error with which a section's validator blames its field `name`, so that the report points at the field's line."""
    return PydanticCustomError("wrong_field", "{message}", {"message": message, "name": name})
