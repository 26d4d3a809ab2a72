"""Base class and helpers of all config sections: frozen, no unknown keys, no silent type conversion."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError, PydanticSerializationError


class Section(BaseModel):
    """Base class of a config section. Validation is strict: a quoted number is an error, and is not converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the section as a dict, as pydantic's model_dump does, but re-raise KeyboardInterrupt.

        pydantic replaces every exception in a serializer by PydanticSerializationError, including KeyboardInterrupt.
        """
        try:
            return super().model_dump(**options)
        except PydanticSerializationError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise


def build_field_error(name: str, message: str, hint: str = "") -> PydanticCustomError:
    """Return the validation error that a section raises about its field `name`, so that the error report shows the line of this field."""
    return PydanticCustomError("wrong_field", "{message}", {"message": message, "name": name, "hint": hint})


def check_is_multiple(name: str, value: int, divisor_name: str, divisor: int) -> int:
    """Return `value` / `divisor`. Raises a validation error about the field `name` if `value` is not a multiple of `divisor`."""
    if value % divisor:
        next_multiple = (value // divisor + 1) * divisor
        suggestion = f"{next_multiple - divisor} or {next_multiple}" if next_multiple > divisor else str(next_multiple)
        raise build_field_error(name, f"{value} is not a multiple of {divisor_name} {divisor}", f"{suggestion} would fit")
    return value // divisor


def format_duplicates(names: Iterable[str]) -> str:
    """Return the names that occur more than once in `names`, sorted and joined as text."""
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


def _check_regex_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return patterns


RegexPatterns = Annotated[tuple[str, ...], AfterValidator(_check_regex_patterns)]
"""Tuple of regular expressions; validation compiles each of them."""
