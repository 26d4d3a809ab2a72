"""Objects from a config: a class or a function by its dotted path, and what it is called with."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from swarmtrain.errors import TrainingError

TARGET = "_target_"


def make(values: Mapping[str, Any], /, *arguments: Any, **more: Any) -> Any:
    """Return what `values["_target_"]`, a dotted path, returns when it is called with `arguments`, the rest of `values`, and `more`.

    Values that have a `_target_` of their own are made first. The path is the config's: whoever writes that may run what he likes.

        optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-3}          # config, below script:
        optimizer = make(options["optimizer"], model.parameters())    # script

    Raises TrainingError if there is no such path, or it does not take what it is given.
    """
    path = values.get(TARGET)
    if not isinstance(path, str):
        raise TrainingError(f"has no {TARGET}", place=f"make {dict(values)}", hint=f"{TARGET}: the dotted path of a class or a function")
    given = {name: _made(value) for name, value in values.items() if name != TARGET}
    target = _found(path)
    try:
        return target(*arguments, **given, **more)
    except TypeError as error:
        raise TrainingError(f"does not take what it is given: {error}", place=f"make {path}") from error


def _made(value: Any) -> Any:
    if isinstance(value, Mapping):
        return make(value) if TARGET in value else {name: _made(item) for name, item in value.items()}
    return [_made(item) for item in value] if isinstance(value, list | tuple) else value


def _found(path: str) -> Any:
    """Return what stands at `path`: the longest part of it that is a module is imported."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise
        for part in parts[count:]:
            if not hasattr(found, part):
                near = difflib.get_close_matches(part, dir(found), 1)
                hint = f"did you mean {near[0]}?" if near else None
                raise TrainingError(f"{getattr(found, '__name__', found)} has no {part}", place=f"make {path}", hint=hint)
            found = getattr(found, part)
        return found
    raise TrainingError("there is no such module", place=f"make {path}", hint="files that a script needs beside it: runner.code")
