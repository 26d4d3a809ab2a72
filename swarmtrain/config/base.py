"""What every section of the config shares: frozen, no unknown keys, no silent conversion."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config. Values are checked strictly: a quoted number is an error, not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())
