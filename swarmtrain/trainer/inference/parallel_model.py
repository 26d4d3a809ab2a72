"""Distribute a model over all ranks for inference, by tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from swarmtrain.config import Config
from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.errors import TrainingError
from swarmtrain.protocol import distributed_env
from swarmtrain.trainer.inference.model_source import ModelSource
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import Runtime, start_runtime


@contextmanager
def open_parallel_model(model: ModelSource, *, requires_embedding_model: bool = False) -> Iterator[tuple[ParallelModel, Runtime]]:
    """Context manager that yields `model`, tensor-parallel over all ranks, and the runtime.

    `requires_embedding_model`: whether the model must be an embedding model; otherwise it must be a language model. Raises SwarmtrainError
    if it is of the other type, or if the model's dimensions are not divisible by the number of ranks.
    """
    # Prompts of different lengths are padded. The padding is a separate document, so attention must not cross document boundaries.
    shape = model.architecture.model_copy(update={"reset_attention_mask": True, "reset_position_ids": True})
    if requires_embedding_model is not (shape.embedding_head_config is not None):
        reason, hint = (
            ("generates text, and has no embedding head", "sample")
            if requires_embedding_model
            else ("is an embedding model, and does not generate text", "embed")
        )
        raise TrainingError(reason, place=str(model.path), hint=f"use swarmtrain {hint}")
    world_size = int(distributed_env.detect_torchrun_env(os.environ)["WORLD_SIZE"])
    for name in ("num_attention_heads", "kv_heads", "vocab_size", "mlp_width"):
        if getattr(shape, name) % world_size:
            reason = f"{world_size} ranks do not evenly divide the {name} of the model, {getattr(shape, name)}"
            raise TrainingError(reason, place="--ranks", hint="set --ranks to a divisor of it, such as 1")
    topology = TopologyConfig(model_parallel_size=world_size, global_batch_size=1, micro_batch_size=1)
    # A config with an embedding head also requires an objective that trains this head, which inference does not need.
    config = Config(topology=topology, transformer_architecture=shape.model_copy(update={"embedding_head_config": None}))
    with start_runtime(config.model_copy(update={"transformer_architecture": shape})) as runtime:
        transformer = Transformer(shape, 0)
        transformer.initial_values = LoadedParameters(model.load_parameter)
        parallel_model = parallelize(transformer, runtime)
        parallel_model.local_model.eval()
        yield parallel_model, runtime
