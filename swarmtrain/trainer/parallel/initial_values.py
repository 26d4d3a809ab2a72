"""Initial values of a distributed model: each rank writes those of its shards, unless a checkpoint has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from swarmtrain.trainer.model.initialization import ParameterSource
from swarmtrain.trainer.parallel.shard_layout import ShardLayout


class InitialValues:
    """The initial values of this rank's parameters or shards, which are uninitialized until they are written."""

    def __init__(self, source: ParameterSource, shard_layout: ShardLayout, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: this rank's parameters or shards, by parameter name in the full model."""
        self._source, self._shard_layout, self._missing = source, shard_layout, dict(parameters)

    @property
    def has_missing_values(self) -> bool:
        """Whether any parameter has no value yet."""
        return bool(self._missing)

    @torch.no_grad()
    def write_missing_values(self, loaded_names: Collection[str] = ()) -> None:
        """Write the initial values of all parameters that have none yet, except `loaded_names`, which a checkpoint has provided.

        Raises CheckpointError if the values are from files that cannot be read.
        """
        for name, parameter in self._missing.items():
            if name not in loaded_names:
                self._source.write_region(name, self._shard_layout.shapes[name], self._shard_layout.find_local_region(name), parameter)
        self._missing = {}
