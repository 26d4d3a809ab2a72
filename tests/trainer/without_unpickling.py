"""Runs training_code.py in a rank that fails if torch.distributed unpickles anything that another rank has sent."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from torch.distributed import distributed_c10d


def refuse(*_: Any) -> NoReturn:
    """Replace the function that converts a received tensor to an object."""
    raise AssertionError("a pickle was received")


def main() -> None:
    assert callable(distributed_c10d._tensor_to_object)
    distributed_c10d._tensor_to_object = refuse
    importlib.import_module("training_code").main()
