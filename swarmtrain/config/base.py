"""What every section of the config shares: frozen, no unknown keys, no silent conversion."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError, PydanticSerializationError


class Section(BaseModel):
    """A part of the config. Values are checked strictly: a quoted number is an error, not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """As pydantic's, but Ctrl-C interrupts it: pydantic replaces every exception of a serializer, KeyboardInterrupt too."""
        try:
            return super().model_dump(**options)
        except PydanticSerializationError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise


def wrong(name: str, message: str, hint: str = "") -> PydanticCustomError:
    """Return the error with which a section's validator blames its field `name`, so that the report points at the field's line."""
    return PydanticCustomError("wrong_field", "{message}", {"message": message, "name": name, "hint": hint})


def check_multiple(name: str, value: int, of: str, unit: int) -> int:
    """Return how often `unit`, called `of`, goes into `value`. Raises the error that blames the field `name` if it leaves a rest."""
    if value % unit:
        above = (value // unit + 1) * unit
        fits = f"{above - unit} or {above}" if above > unit else str(above)
        raise wrong(name, f"{value} is no multiple of {of} {unit}", f"{fits} would fit")
    return value // unit


def twice(names: Iterable[str]) -> str:
    """Return those of `names` that come more than once, sorted, as text."""
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


def _patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return patterns


Patterns = Annotated[tuple[str, ...], AfterValidator(_patterns)]
"""Regular expressions."""
