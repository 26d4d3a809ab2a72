"""Ranks that exchange values and errors, and check what they receive."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from swarmtrain.errors import ConfigError, IncompatibleCheckpoint, Problem, SwarmtrainError
from swarmtrain.trainer import collectives


class PluginError(IncompatibleCheckpoint):
    """An error class that other ranks may not know."""


def raise_on_rank(rank: int, error: SwarmtrainError) -> int:
    """Raise `error` on `rank`; return 0 on all other ranks."""
    if dist.get_rank() == rank:
        raise error
    return 0


def catch(rank: int, error: SwarmtrainError) -> SwarmtrainError:
    """Raise `error` on `rank`, and return what this rank catches."""
    try:
        collectives.run_on_all_ranks(lambda: raise_on_rank(rank, error))
    except SwarmtrainError as caught:
        return caught
    raise AssertionError("no error")


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    expected = [{"rank": each, "path": Path("/x") / str(each), "set": {each}, "text": "ü" * 1000 * each} for each in range(3)]
    assert collectives.all_gather_values(expected[rank]) == expected
    assert collectives.run_on_rank_zero(lambda: (rank, -0.0)) == (0, -0.0)
    assert collectives.run_on_all_ranks(lambda: None) == [None] * 3

    error = PluginError("is another model", place="model", hint="use the same")
    error.is_permanent = False
    caught = catch(1, error)
    assert type(caught) is IncompatibleCheckpoint
    assert (caught.rank, caught.message, caught.place, caught.hint) == (1, "is another model", "model", "use the same")
    assert caught.is_permanent is False

    caught = catch(2, ConfigError((Problem("trainer.seed", "is invalid"),)))  # its class is built from problems
    assert type(caught) is SwarmtrainError
    assert (caught.rank, caught.is_permanent, str(caught)) == (2, True, "config trainer.seed: is invalid")
    dist.destroy_process_group()
