"""Distribution of a model over all ranks: model parallelism, initial parameter values, and the wrapper for data parallelism."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from swarmtrain.config import Config
from swarmtrain.config.pipeline_layout import partition_layers
from swarmtrain.config.schema.topology import DataParallelType, TopologyConfig
from swarmtrain.config.schema.trainer import AttentionKernel, FrozenPrecision
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.checkpoint import consolidated
from swarmtrain.trainer.checkpoint.consolidated import BaseWeights
from swarmtrain.trainer.model import chunked_loss, initialization
from swarmtrain.trainer.model.initialization import LoadedParameters, ParameterSource, Region
from swarmtrain.trainer.model.peft import is_peft_parameter
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.objectives import build_objective
from swarmtrain.trainer.parallel import (
    EMBEDDING_WEIGHT,
    ParallelModel,
    activation_checkpointing,
    compilation,
    context_parallel,
    mesh,
    pipeline_parallel,
    tensor_parallel,
)
from swarmtrain.trainer.parallel.ddp import DdpModel, SingleReplicaModel
from swarmtrain.trainer.parallel.fsdp import FsdpModel, Materializer
from swarmtrain.trainer.parallel.initial_values import InitialValues
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.pipeline_parallel import PipelineModel
from swarmtrain.trainer.parallel.shard_layout import ShardLayout
from swarmtrain.trainer.parallel.tensor_parallel import TensorSharding
from swarmtrain.trainer.parallel.working_weights import get_sum_dtype, get_working_dtype
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")


def parallelize(model: Transformer, runtime: Runtime, *, initialize: bool = True) -> ParallelModel:
    """Distribute `model` over all ranks according to the config's topology, and write the initial values of this rank's part.

    Return the parallel model. `initialize`: False leaves all parameters uninitialized. Run.prepare_training then loads the newest
    checkpoint, or writes the initial values if there is none, so that no values are computed only to be replaced.

    Raises WorldError if the number of ranks does not match the topology, TrainingError if the model cannot be compiled, if its attention
    kernel needs a compiler that is missing, or if its objective is invalid, and CheckpointError if trainer.init_from cannot be read or is a
    checkpoint of another model.
    """
    config, layout = runtime.config, mesh.build_mesh(runtime)
    model.objective = build_objective(config)
    model.objective.prepare_model(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    tied = layout.pipe_size > 1 and model.has_tied_embeddings and layout.pipe_rank in (0, layout.pipe_size - 1)
    has_tied_copy = tied and layout.pipe_rank > 0
    tensor_sharding = _apply_model_parallelism(model, config, layout)
    local_parameters, tensor_placements = dict(model.named_parameters()), tensor_sharding.placements
    if has_tied_copy:
        local_parameters = {EMBEDDING_WEIGHT if name == "head.weight" else name: parameter for name, parameter in local_parameters.items()}
        tensor_placements = {
            EMBEDDING_WEIGHT if name == "head.weight" else name: placement for name, placement in tensor_placements.items()
        }
    trained = select_trained_parameter_names(shapes, config)
    for name, parameter in local_parameters.items():
        parameter.requires_grad_(name in trained)
    if base_model := _load_base_model(runtime, shapes):
        model.initial_values = _FineTunedParameters(LoadedParameters(base_model.load_parameter), model.initial_values)
    precision = config.transformer_architecture.precision
    materialize = partial(
        initialization.materialize_parameters,
        device=runtime.device,
        dtype=torch.float64 if precision is Precision.float64 else torch.float32,
        frozen_dtype=get_working_dtype(precision) if config.trainer.frozen_precision is FrozenPrecision.working else None,
    )
    wrapped_model = _wrap_model(
        model, runtime, layout, materialize, tied_parameter_index=list(local_parameters).index(EMBEDDING_WEIGHT) if tied else None
    )
    _configure_computation(model, runtime)
    pipeline_group = layout.pipe_group if layout.pipe_size > 1 else None
    fsdp_names = frozenset(local_parameters if _has_sharded_state(config) else ())
    shard_layout = ShardLayout(
        layout.state_mesh["tensor", "shard"],
        shapes,
        tensor_placements,
        fsdp_names,
        {EMBEDDING_WEIGHT} if has_tied_copy else (),
        pipeline_group,
    )
    parameter_count = sum(shape.numel() for shape in shapes.values())
    plain_parameters = dict(zip(local_parameters, wrapped_model.parameters, strict=True))
    initial_values = InitialValues(model.initial_values, shard_layout, plain_parameters)
    if initialize:
        initial_values.write_missing_values()
    return ParallelModel(
        layout,
        model,
        wrapped_model,
        shard_layout,
        plain_parameters,
        tensor_sharding.partial_gradient_names,
        tuple(shapes),
        tuple(trained),
        parameter_count,
        initial_values,
        base_model.fingerprint if base_model else None,
    )


def _configure_computation(model: Transformer, runtime: Runtime) -> None:
    """Set how the model computes its loss and its attention, and compile it, as the config says.

    With float16, the loss is not computed in chunks: its gradients would be computed before the loss is scaled, and underflow.
    """
    config, device = runtime.config, runtime.device
    if config.transformer_architecture.precision is not Precision.float16:
        vocabulary_size = config.transformer_architecture.vocab_size
        model.loss_chunk_size = config.trainer.loss_chunk_size or chunked_loss.compute_default_chunk_size(vocabulary_size)
    model.attention_kernel = config.trainer.attention_kernel
    if model.attention_kernel is AttentionKernel.flex and device.type == "cuda":
        compilation.check_compiler(device, "trainer.attention_kernel", alternative="auto")
    if compilation.should_compile(config.trainer.compile, device, LOG.warning if runtime.is_rank_zero else LOG.debug):
        compilation.compile_model(model, device)


def select_trained_parameter_names(names: Iterable[str], config: Config) -> list[str]:
    """Return the names in `names` whose parameters the config selects for training.

    Raises TrainingError if no parameter is selected, or none in some pipeline stage: no gradient would flow back from that stage.
    """
    patterns, names = config.trainer.finetunable_parameters, list(names)
    if patterns is not None:
        selected = [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
    elif config.transformer_architecture.peft_fields or config.trainer.finetunable_token_ids:
        selected = [name for name in names if is_peft_parameter(name)]
    else:
        selected = names
    if config.trainer.finetunable_token_ids:
        selected = [name for name in names if name in selected or name == EMBEDDING_WEIGHT]
    place = "config trainer.finetunable_parameters"
    if not selected:
        raise TrainingError("matches no parameter", place=place, hint=f"use parameter names such as {', '.join(names[:3])}")
    stages = partition_layers(config.topology, config.transformer_architecture)
    for stage_index, layers in enumerate(stages if len(stages) > 1 else ()):
        prefixes = [f"blocks.{layer}." for layer in layers]
        tied_prefixes = ["embedding."] if config.transformer_architecture.has_tied_embeddings else []
        prefixes += (
            ["embedding.", "positions."]
            if stage_index == 0
            else ["norm.", "head.", *tied_prefixes]
            if stage_index == len(stages) - 1
            else []
        )
        if not any(name.startswith(tuple(prefixes)) for name in selected):
            raise TrainingError(
                f"matches no parameter in stage {stage_index} of the pipeline",
                place=place,
                hint="train at least one parameter in each stage",
            )
    return selected


def _apply_model_parallelism(model: Transformer, config: Config, mesh: Mesh) -> TensorSharding:
    """Apply pipeline, tensor and context parallelism and activation checkpointing to `model`, in place.

    Return how parameters are distributed over tensor-parallel ranks.
    """
    if mesh.pipe_size > 1:
        pipeline_parallel.remove_remote_layers(model, config, mesh)
    tensor_sharding = tensor_parallel.apply_tensor_parallel(
        model, mesh.device_mesh["tensor"], sequence_parallel=config.topology.sequence_parallel
    )
    if mesh.context_mesh:
        context_parallel.apply_context_parallel(model, mesh.context_mesh)
    activation_checkpointing.checkpoint_layers(model, config.topology.activation_checkpointing_type)
    return tensor_sharding


def _load_base_model(runtime: Runtime, shapes: Mapping[str, torch.Size]) -> BaseWeights | None:
    """Return the weights in trainer.init_from; None if it is not set. Raises CheckpointError if they cannot be read."""
    folder = runtime.config.trainer.init_from
    if folder is None:
        return None
    base_shapes = {name: shape for name, shape in shapes.items() if not is_peft_parameter(name)}
    return consolidated.open_base_weights(
        folder, runtime.config.transformer_architecture, base_shapes, file_shard=(runtime.rank, runtime.world_size)
    )


@dataclass(frozen=True)
class _FineTunedParameters:
    """Parameters of a model that is fine-tuned: those of the base model, and the initial values of those that are added to it."""

    base_model: LoadedParameters
    added: ParameterSource

    def write_region(self, name: str, size: torch.Size, region: Region, target: Tensor) -> None:
        (self.added if is_peft_parameter(name) else self.base_model).write_region(name, size, region, target)


def _wrap_model(
    model: Transformer, runtime: Runtime, mesh: Mesh, materialize: Materializer, *, tied_parameter_index: int | None
) -> SingleReplicaModel | DdpModel | FsdpModel | PipelineModel:
    """Return `model`, materialized and wrapped for data parallelism or pipeline parallelism.

    `tied_parameter_index`: index of the parameter that has a tied copy on another pipeline stage; None if no parameter has one.
    """
    config = runtime.config
    sum_dtype = get_sum_dtype(config.transformer_architecture.precision)
    if config.transformer_architecture.precision is Precision.float32 and _count_summed_gradients(config.topology) <= 2:
        sum_dtype = None  # a sum of two numbers is rounded only once, so it is independent of the order even without float64
    if not _has_sharded_state(config):
        materialize(model)
    if mesh.pipe_size > 1:
        return PipelineModel(
            model,
            config,
            mesh,
            runtime.device,
            materialize_shards=materialize if _has_sharded_state(config) else None,
            tied_parameter_index=tied_parameter_index,
        )
    if _has_sharded_state(config):
        return FsdpModel(model, config, mesh, materialize)
    return (
        SingleReplicaModel(model, sum_dtype=sum_dtype)
        if mesh.data_parallel_group.size() == 1
        else DdpModel(model, config, mesh, runtime.device, sum_dtype=sum_dtype)
    )


def _has_sharded_state(config: Config) -> bool:
    """Return whether replicas shard their parameters or optimizer state (FSDP or ZeRO)."""
    return config.optimizer.zero or config.topology.data_parallel_type is not DataParallelType.ddp


def _count_summed_gradients(topology: TopologyConfig) -> int:
    """Return the number of gradients that are summed per parameter in one step."""
    return topology.micro_batches_per_learner * topology.context_parallel_size
