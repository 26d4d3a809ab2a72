"""training_code.py that prints what this rank does before the first step.

That is the peak tensor memory while parameters are allocated, the number of initial values that are computed, and of files that are read
only to verify them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import training_code
from swarmtrain.trainer.checkpoint import manifest
from swarmtrain.trainer.model import initialization
from swarmtrain.trainer.model.initialization import ParameterInitializer


def main() -> None:
    materialize, write_region = initialization.materialize_parameters, ParameterInitializer.write_region
    verify_files = manifest.verify_files
    tensor_bytes, computed, verified = [0], [0], [0]

    def measure_allocation(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        materialize(module, *args, **kwargs)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _list_tensors()}
        tensor_bytes.append(sum(storages.values()))

    def count_values(initializer: ParameterInitializer, name: str, size: torch.Size, region: initialization.Region, target: Tensor) -> None:
        write_region(initializer, name, size, region, target)
        computed.append(target.numel())

    def count_files(folder: Path, content: manifest.Manifest, names: Iterable[str]) -> None:
        verified.append(len(names := list(names)))
        verify_files(folder, content, names)

    initialization.materialize_parameters, manifest.verify_files = measure_allocation, count_files
    ParameterInitializer.write_region = count_values  # type: ignore[method-assign]
    training_code.main()
    print(f"most while allocating: {max(tensor_bytes)} bytes")
    print(f"computed {sum(computed)} initial values")
    print(f"verified {sum(verified)} files before loading them")


def _list_tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu"]
