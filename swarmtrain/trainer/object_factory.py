"""Create objects from config sections that contain the dotted path of a class or function (`_target_`), and its arguments."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from swarmtrain.errors import TrainingError

TARGET_KEY = "_target_"


def instantiate(object_config: Mapping[str, Any], /, *arguments: Any, **kwargs: Any) -> Any:
    """Import the class or function at the dotted path `object_config["_target_"]`, call it, and return the result.

    It is called with `arguments`, the other items of `object_config`, and `kwargs`. Nested values with a `_target_` are
    instantiated first. A config can therefore execute arbitrary code.

        optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-3}                 # config, below script:
        optimizer = instantiate(options["optimizer"], model.parameters())    # script

    Raises TrainingError if the path does not exist, or if the call does not accept these arguments.
    """
    path = object_config.get(TARGET_KEY)
    if not isinstance(path, str):
        raise TrainingError(
            f"has no {TARGET_KEY}",
            place=f"instantiate {dict(object_config)}",
            hint=f"{TARGET_KEY} must be the dotted path of a class or a function",
        )
    config_kwargs = {name: _instantiate_nested_values(value) for name, value in object_config.items() if name != TARGET_KEY}
    target = _import_target(path)
    try:
        return target(*arguments, **config_kwargs, **kwargs)
    except TypeError as error:
        raise TrainingError(f"does not accept its arguments: {error}", place=f"instantiate {path}") from error


def _instantiate_nested_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return instantiate(value) if TARGET_KEY in value else {name: _instantiate_nested_values(item) for name, item in value.items()}
    return [_instantiate_nested_values(item) for item in value] if isinstance(value, list | tuple) else value


def _import_target(dotted_path: str) -> Any:
    """Import and return the object at `dotted_path`. Raises TrainingError if it does not exist."""
    segments = dotted_path.split(".")
    for count in range(len(segments) - 1, 0, -1):
        name = ".".join(segments[:count])
        try:
            target: Any = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                continue
            raise
        for segment in segments[count:]:
            if not hasattr(target, segment):
                close_matches = difflib.get_close_matches(segment, dir(target), 1)
                hint = f"did you mean {close_matches[0]}?" if close_matches else None
                raise TrainingError(
                    f"{getattr(target, '__name__', target)} has no {segment}", place=f"instantiate {dotted_path}", hint=hint
                )
            target = getattr(target, segment)
        return target
    raise TrainingError("module not found", place=f"instantiate {dotted_path}", hint="add the files that the script imports to runner.code")
