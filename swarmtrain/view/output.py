"""Print data on stdout, as text or as JSON."""

from __future__ import annotations

import json
from typing import Any, Protocol

from swarmtrain.view.formatting import remove_control_characters


class Displayable(Protocol):
    """Interface of values that format themselves as text, and as a JSON-compatible dict for `--json`."""

    def to_dict(self) -> dict[str, Any]: ...


def print_result(value: Displayable, *, as_json: bool) -> None:
    """Print `value` on stdout, as JSON if `as_json`, otherwise without control characters, since it may quote the output of a job."""
    if as_json:
        print_json(value.to_dict())
    else:
        print(remove_control_characters(str(value)))  # noqa: T201  # this is the place that prints


def print_image(reference: str, *, as_json: bool) -> None:
    """Print the reference of an image on stdout."""
    if as_json:
        print_json({"image": reference})
    else:
        print(reference)  # noqa: T201  # this is the place that prints


def print_json(value: dict[str, Any]) -> None:
    """Print `value` as JSON on stdout."""
    print(json.dumps(value, indent=2, default=str))  # noqa: T201  # this is the place that prints
