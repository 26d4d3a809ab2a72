"""What a model has made of prompts, among the numbers of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAME = "generated"
"""The key of a line under which it stands, as a list of samples."""
Sample = dict[str, str]
"""A `prompt`, and the `text` that was made of it."""


def texts(values: Mapping[str, Any]) -> Sequence[Sample]:
    """Return the samples among `values`; none if there are none, or a script has given the name to a number."""
    found = values.get(NAME)
    return found if isinstance(found, list) and all(isinstance(sample, dict) for sample in found) else []
