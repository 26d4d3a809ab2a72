"""A model that the ranks of this world share, to be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from swarmtrain import world
from swarmtrain.config import Config
from swarmtrain.config.topology import TopologyConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import runtime
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import ParallelModel, parallelize
from swarmtrain.trainer.passes import autocast
from swarmtrain.trainer.use.source import Source


@contextmanager
def ready(model: Source, *, vectors: bool = False) -> Iterator[tuple[ParallelModel, runtime.Runtime]]:
    """Give a model that this world's ranks share, each with a part of every layer.

    Raises SwarmtrainError if they cannot, or if it makes no `vectors`, or makes them and is not to.
    """
    # Prompts of several lengths are told apart from what fills them up.
    shape = model.shape.model_copy(update={"reset_attention_mask": True, "reset_position_ids": True})
    if vectors is not (shape.embedding_head_config is not None):
        reason, hint = (
            ("goes on from texts, and makes no vectors", "sample") if vectors else ("makes vectors of texts, and no text", "embed")
        )
        raise TrainingError(reason, place=str(model.place), hint=f"swarmtrain {hint} is for it")
    ranks = int(world.find(os.environ)["WORLD_SIZE"])
    for name in ("num_attention_heads", "kv_heads", "vocab_size", "mlp_width"):
        if getattr(shape, name) % ranks:
            reason = f"{ranks} ranks cannot share its {name}, {getattr(shape, name)}"
            raise TrainingError(reason, place="--ranks", hint="fewer, or one")
    topology = TopologyConfig(model_parallel_size=ranks, global_batch_size=1, micro_batch_size=1)
    # A config that trains has a loss for its head, which is not asked for here.
    config = Config(topology=topology, transformer_architecture=shape.model_copy(update={"embedding_head_config": None}))
    with runtime.start(config.model_copy(update={"transformer_architecture": shape})) as here:
        made = Transformer(shape, 0)
        made.initial = model.value
        shared = parallelize(made, here)
        shared.local.eval()
        with autocast(here):
            yield shared, here
