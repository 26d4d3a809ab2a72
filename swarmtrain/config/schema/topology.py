"""`topology`: parallelism and batch sizes, and the quantities that are derived from them when a world forms.

Global batch, micro batch, tensor- and pipeline-parallel size are fixed by the config. World size, data-parallel size and
gradient accumulation belong to a *world*: they are derived whenever a world forms.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.schema.fields.gradient_compression import GradientCompression, PowerSgdConfig
from swarmtrain.config.schema.section import Section, build_field_error, check_is_multiple

_MIN_MICRO_BATCHES_BY_SPEED = 2
"""Minimum number of micro batches per replica, on average, for which they can be assigned by speed.

A replica that has two or more keeps sums of gradients, and needs the same memory for any number of them. A replica that had only one might
not have the memory for a second.
"""


class PipePartitionMethod(StrEnum):
    """Ways to partition the layers into pipeline stages."""

    uniform = "uniform"
    balanced = "balanced"


class DataParallelType(StrEnum):
    """Data parallelism: which part of the model state replicas shard, and which they replicate."""

    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class ActivationCheckpointing(StrEnum):
    """Which activations are recomputed in the backward pass."""

    disabled = "disabled"
    selective = "selective"
    every_layer = "every_layer"
    every_pipe_stage = "every_pipe_stage"


class MicroBatchAssignment(StrEnum):
    """How many of a global batch's micro batches each replica processes."""

    equal = "equal"
    by_speed = "by_speed"


class TopologyConfig(Section):
    """Sizes of the parallel groups and of the batch.

    Any three of world size, model-, pipe- and data-parallel size determine the fourth. Any two of global batch size, micro
    batch size and gradient accumulation steps determine the third.
    """

    world_size: int | None = Field(None, ge=1, description="Total number of ranks. null: the sum of the nodes' slots.")
    model_parallel_size: int | None = Field(
        None, ge=1, description="Tensor-parallel degree: ranks that each layer is sharded over. null: 1."
    )
    sequence_parallel: bool = Field(False, description="Sequence parallelism: also divide the sequence over the tensor-parallel ranks.")
    pipe_parallel_size: int | None = Field(
        None, ge=1, description="Pipeline-parallel degree: ranks that the layers are divided over. null: 1."
    )
    context_parallel_size: int = Field(1, ge=1, description="Context-parallel degree: ranks that each sample's sequence is divided over.")
    data_parallel_size: int | None = Field(
        None, ge=1, description="Data-parallel degree: replicas of the model. null: as many as the world has ranks for."
    )
    learners: int | None = Field(
        None,
        ge=1,
        description="DiLoCo: number of learners, which train independently and combine their parameters every diloco.inner_steps steps. "
        "Ranks are divided over learners, or learners over ranks; the result depends on the number of learners only. null: no DiLoCo.",
    )
    data_parallel_type: DataParallelType = Field(
        DataParallelType.ddp,
        description="ddp: each replica keeps the full state. fsdp: all replicas shard it. hsdp: groups of "
        "data_parallel_shard_size ranks shard it.",
    )
    data_parallel_shard_size: int | None = Field(None, ge=1, description="Ranks per shard group. Required for hsdp, null otherwise.")
    cpu_offload: bool = Field(
        False,
        description="Keep the shards of parameters and optimizer state in host memory, and run the optimizer there. For "
        "fsdp and hsdp only.",
    )
    reduce_every_micro_batch: bool | None = Field(
        None,
        description="Reduce-scatter gradients after each micro batch instead of once per step: less memory, more "
        "traffic. For fsdp and hsdp only. null: true, except with pipeline parallelism.",
    )
    gradient_compression: GradientCompression = Field(
        GradientCompression.none,
        description="How replicas sum gradients. none: exact sums. bf16: values rounded to bfloat16, half the bytes of float32 sums, "
        "a quarter of float64 sums. powersgd: low-rank factors of matrices, far fewer bytes. For slow networks; losses then depend on the "
        "number of replicas. For ddp only.",
    )
    powersgd: PowerSgdConfig = Field(PowerSgdConfig(), description="Settings of gradient_compression: powersgd.")
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples per optimizer step, at every world size, and of all learners together. null: derived from the other two "
        "batch keys.",
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="Samples per forward pass on one rank. null: derived from the other two batch keys."
    )
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="Micro batches per replica and step. null: derived from the other two batch keys."
    )
    micro_batch_assignment: MicroBatchAssignment = Field(
        MicroBatchAssignment.equal,
        description="Micro batches of each replica. equal: equally many, or one more. by_speed: fewer on replicas that are measured to "
        "be slower. For ddp without pipeline parallelism only.",
    )
    micro_batch_reassignment_interval: int = Field(
        20, ge=1, description="Minimum number of steps between two reassignments of micro batches by speed."
    )
    micro_batch_reassignment_threshold: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Fraction by which a reassignment must shorten the computation of a step. At 0.1, noise of ±5 % causes none.",
    )

    pipe_partition_method: PipePartitionMethod = Field(
        PipePartitionMethod.uniform,
        description="uniform: equally many layers per stage. balanced: equal compute per stage, including the output layer.",
    )
    pipe_partition_overwrite: tuple[int, ...] | None = Field(
        None, description="First layer of each stage, starting with 0. null: by pipe_partition_method."
    )
    pipe_stages_per_rank: int = Field(1, ge=1, description="Pipeline stages per rank. Above 1: interleaved 1F1B schedule.")
    activation_checkpointing_type: ActivationCheckpointing = Field(
        ActivationCheckpointing.disabled,
        description="Activations to recompute in the backward pass. selective: all but matmuls. every_layer, "
        "every_pipe_stage: all, per layer or stage.",
    )

    @model_validator(mode="after")
    def _derive_parallel_and_batch_sizes(self) -> TopologyConfig:
        sizes = self.model_parallel_size, self.pipe_parallel_size, self.data_parallel_size
        values = _derive_parallel_sizes(self.world_size, *sizes, self.context_parallel_size)
        values |= _derive_batch_sizes(
            self.global_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, values["data_parallel_size"]
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _check_shard_size(self)
        _check_pipeline_settings(self)
        _check_sharding_options(self)
        _check_gradient_compression(self)
        _check_assignment_by_speed(self)
        _check_learners(self)
        return self

    @property
    def tensor_parallel_size(self) -> int:
        """Tensor-parallel degree: model_parallel_size, or 1 if it is not set."""
        return self.model_parallel_size or 1

    @property
    def pipeline_parallel_size(self) -> int:
        """Pipeline-parallel degree: pipe_parallel_size, or 1 if it is not set."""
        return self.pipe_parallel_size or 1

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that hold and compute one model replica together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def pipeline_stage_count(self) -> int:
        """Total number of pipeline stages."""
        return self.pipeline_parallel_size * self.pipe_stages_per_rank

    @property
    def samples_per_step(self) -> int:
        """Number of samples in one optimizer step (the global batch size)."""
        return self.global_batch_size or 1

    @property
    def samples_per_micro_batch(self) -> int:
        """Number of samples in one forward pass of one replica (the micro batch size)."""
        return self.micro_batch_size or 1

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro batches in one optimizer step, over all replicas."""
        return self.samples_per_step // self.samples_per_micro_batch

    @property
    def micro_batches_per_learner(self) -> int:
        """Number of micro batches of each learner in one optimizer step; of all replicas if there are no learners."""
        return self.micro_batches_per_step // (self.learners or 1)

    def compute_data_parallel_size(self, world_size: int) -> int:
        """Return the data-parallel size, which is the number of replicas, of a world of `world_size` ranks.

        Raises ValueError if `world_size` is not a multiple of the ranks per replica, or contradicts the sizes in the config.
        """
        context, replica = self.context_parallel_size, self.ranks_per_replica
        name, product = ("", "") if context == 1 else (" x context_parallel_size", f" x {context}")
        if world_size % replica:
            sizes = f"model_parallel_size x pipe_parallel_size{name} = {self.tensor_parallel_size} x {self.pipeline_parallel_size}{product}"
            raise ValueError(f"{world_size} ranks are not a multiple of {sizes}")
        replicas, shard = world_size // replica, self.data_parallel_shard_size or 1
        if self.learners and replicas > self.learners and replicas % self.learners:
            raise ValueError(f"{replicas} replicas are more than learners {self.learners}, but not a multiple of them")
        sharding, per_learner = (replicas // min(replicas, self.learners), " per learner") if self.learners else (replicas, "")
        if sharding * context % shard:
            raise ValueError(f"{sharding * context} replicas{per_learner}{name} are not a multiple of data_parallel_shard_size {shard}")
        return replicas

    def compute_shard_group_size(self, replicas: int, *, zero: bool) -> int:
        """Return the number of ranks that shard one copy of the model state if there are `replicas` replicas.

        Context-parallel ranks also shard it. `zero`: whether the optimizer state is sharded with ddp (optimizer.zero).
        """
        is_sharded = zero or self.data_parallel_type is DataParallelType.fsdp
        return self.data_parallel_shard_size or (replicas * self.context_parallel_size if is_sharded else 1)

    def compute_rank_coordinates(self, rank: int, world_size: int) -> dict[str, int]:
        """Return the coordinates of `rank` in a world of `world_size` ranks: pipe (pipeline), data (replica), model (tensor parallel).

        Consecutive ranks vary along the tensor-parallel group first, then along the context-parallel group, the replicas, and the pipeline
        stages. In a world that does not match the topology, the coordinates are approximate.
        """
        ranks_per_stage = max(1, world_size // self.pipeline_parallel_size)
        data_rank = rank % ranks_per_stage // self.tensor_parallel_size // self.context_parallel_size
        return {"pipe": rank // ranks_per_stage, "data": data_rank, "model": rank % self.tensor_parallel_size}

    def assign_micro_batches(self, world_size: int) -> tuple[int, ...]:
        """Return the number of micro batches of each replica in one step, in descending order; their sum gives the global batch.

        The numbers differ by at most one. If there are more replicas than micro batches, some replicas are assigned none. Raises
        ValueError in the same cases as `compute_data_parallel_size`.
        """
        groups = self.assign_learners(world_size)
        per_learner = self.divide_micro_batches(self.compute_data_parallel_size(world_size) // len(groups), learners=1)
        return tuple(sorted((len(learners) * count for learners in groups for count in per_learner), reverse=True))

    def divide_micro_batches(self, replicas: int, *, learners: int | None = None) -> tuple[int, ...]:
        """Return how many micro batches of a step each of `replicas` replicas has: of `learners` learners, or of all (None)."""
        return _divide_evenly(self.micro_batches_per_learner * (learners or self.learners or 1), replicas)

    def assign_learners(self, world_size: int) -> tuple[range, ...]:
        """Return the learners of each learner group: the replicas of a group train the same learners.

        With at most as many replicas as learners, each replica is a group, with one or more learners. With more replicas, each learner
        has a group of several replicas. Without learners, all replicas are one group, with one learner. Raises ValueError in the same cases
        as `compute_data_parallel_size`.
        """
        learners = self.learners or 1
        counts = _divide_evenly(learners, min(learners, self.compute_data_parallel_size(world_size)))
        return tuple(range(sum(counts[:group]), sum(counts[: group + 1])) for group in range(len(counts)))

    def reassigns_micro_batches(self, replicas: int) -> bool:
        """Return whether micro batches are reassigned by speed in a world of `replicas` replicas: each must have several to begin with."""
        is_by_speed = self.micro_batch_assignment is MicroBatchAssignment.by_speed
        return is_by_speed and replicas > 1 and self.micro_batches_per_step >= _MIN_MICRO_BATCHES_BY_SPEED * replicas


def _divide_evenly(count: int, parts: int) -> tuple[int, ...]:
    """Return how many of `count` items each of `parts` parts has: the numbers are in descending order, and differ by at most one."""
    base_count, remainder = divmod(count, parts)
    return tuple(base_count + (index < remainder) for index in range(parts))


def _derive_parallel_sizes(
    world_size: int | None,
    tensor_parallel_size: int | None,
    pipeline_parallel_size: int | None,
    data_parallel_size: int | None,
    context_parallel_size: int,
) -> dict[str, int | None]:
    name, factor_text = ("", "") if context_parallel_size == 1 else (" x context_parallel_size", f" x {context_parallel_size}")
    if tensor_parallel_size is None:
        divisor_name = f"data_parallel_size x pipe_parallel_size{name} ="
        tensor_parallel_size = (
            check_is_multiple(
                "world_size", world_size, divisor_name, data_parallel_size * (pipeline_parallel_size or 1) * context_parallel_size
            )
            if world_size and data_parallel_size
            else 1
        )
    if pipeline_parallel_size is None:
        other_ranks = (data_parallel_size or 1) * tensor_parallel_size * context_parallel_size
        pipeline_parallel_size = world_size // other_ranks if world_size and data_parallel_size and world_size % other_ranks == 0 else 1
    if world_size and not data_parallel_size:
        data_parallel_size = check_is_multiple(
            "world_size",
            world_size,
            f"model_parallel_size x pipe_parallel_size{name} =",
            tensor_parallel_size * pipeline_parallel_size * context_parallel_size,
        )
    if (
        world_size
        and data_parallel_size
        and world_size != data_parallel_size * tensor_parallel_size * pipeline_parallel_size * context_parallel_size
    ):
        product = f"{tensor_parallel_size} x {pipeline_parallel_size} x {data_parallel_size}{factor_text}"
        raise build_field_error(
            "world_size", f"{world_size} is not model_parallel_size x pipe_parallel_size x data_parallel_size{name} = {product}"
        )
    world_size = data_parallel_size * tensor_parallel_size * pipeline_parallel_size * context_parallel_size if data_parallel_size else None
    return {
        "world_size": world_size,
        "model_parallel_size": tensor_parallel_size,
        "pipe_parallel_size": pipeline_parallel_size,
        "data_parallel_size": data_parallel_size,
    }


def _check_pipeline_settings(topology: TopologyConfig) -> None:
    """Raise a validation error if the batch sizes or settings do not fit the pipeline.

    A global batch with fewer micro batches than the pipeline needs is an error, since no world could fill the pipeline. A single replica
    may have too few micro batches; they are padded (config.pipeline_layout.count_scheduled_micro_batches).
    """
    ranks, count = topology.pipeline_parallel_size, topology.micro_batches_per_step
    if topology.pipe_stages_per_rank == 1 and count < ranks:
        hint = f"{ranks * topology.samples_per_micro_batch} would fit; otherwise reduce micro_batch_size"
        raise build_field_error("global_batch_size", f"{count} micro batches per step are fewer than pipe_parallel_size {ranks}", hint)
    if topology.activation_checkpointing_type is ActivationCheckpointing.every_pipe_stage and ranks == 1:
        raise build_field_error(
            "activation_checkpointing_type",
            "every_pipe_stage requires pipe_parallel_size > 1",
            "use every_layer, which works without a pipeline",
        )
    if topology.pipe_stages_per_rank > 1 and ranks == 1:
        raise build_field_error(
            "pipe_stages_per_rank", f"{topology.pipe_stages_per_rank} requires pipe_parallel_size > 1", "set it to 1 without a pipeline"
        )
    if topology.pipe_stages_per_rank > 1 and count % ranks:
        hint = f"{(count // ranks + 1) * ranks * topology.samples_per_micro_batch} would fit"
        raise build_field_error(
            "global_batch_size", f"{count} micro batches per step are not a multiple of pipe_parallel_size {ranks}", hint
        )


def _check_shard_size(topology: TopologyConfig) -> None:
    kind, shard, data = topology.data_parallel_type, topology.data_parallel_shard_size, topology.data_parallel_size
    if kind is DataParallelType.hsdp and shard is None:
        raise build_field_error(
            "data_parallel_type", "hsdp needs data_parallel_shard_size", "set it, usually to the number of GPUs per node"
        )
    if kind is not DataParallelType.hsdp and shard is not None:
        raise build_field_error("data_parallel_shard_size", f"requires hsdp, but data_parallel_type is {kind}")
    if shard and data and (data * topology.context_parallel_size) % shard:
        check_is_multiple("data_parallel_size", data, "data_parallel_shard_size", shard)


def _check_sharding_options(topology: TopologyConfig) -> None:
    """Raise a validation error for sharding options that ddp or pipeline parallelism does not support."""
    is_replicated = topology.data_parallel_type is DataParallelType.ddp
    for name in ("cpu_offload", "reduce_every_micro_batch"):
        if is_replicated and getattr(topology, name):
            raise build_field_error(
                name,
                "requires fsdp or hsdp, but data_parallel_type is ddp",
                "set data_parallel_type to fsdp, which shards what ddp replicates",
            )
    if topology.reduce_every_micro_batch and topology.pipeline_parallel_size > 1:
        reason = "does not support pipeline parallelism, which reduces gradients once per step"
        raise build_field_error("reduce_every_micro_batch", reason, "remove it, or pipe_parallel_size")


def _check_gradient_compression(topology: TopologyConfig) -> None:
    """Raise a validation error if gradients cannot be compressed: fully_shard sums them itself, where no rank has a whole matrix."""
    mode, name = topology.gradient_compression, "gradient_compression"
    if topology.powersgd != PowerSgdConfig() and mode is not GradientCompression.powersgd:
        raise build_field_error("powersgd", f"requires gradient_compression: powersgd, but it is {mode}", "set it, or remove this")
    if mode is GradientCompression.none:
        return
    if topology.data_parallel_type is not DataParallelType.ddp:
        reason = f"{mode} requires ddp, but data_parallel_type is {topology.data_parallel_type}"
        raise build_field_error(name, reason, "set data_parallel_type to ddp, or gradient_compression to none")


def _check_assignment_by_speed(topology: TopologyConfig) -> None:
    """Raise a validation error if micro batches cannot be assigned by speed.

    That requires micro batches without communication between replicas, and replicas that have several.
    """
    if topology.micro_batch_assignment is not MicroBatchAssignment.by_speed:
        return
    name, hint = "micro_batch_assignment", "set it to equal"
    if topology.data_parallel_type is not DataParallelType.ddp:
        reason = f"by_speed requires ddp: with {topology.data_parallel_type}, all ranks of a shard group take part in each micro batch"
        raise build_field_error(name, reason, hint)
    if topology.pipeline_parallel_size > 1:
        raise build_field_error(name, "by_speed does not support pipeline parallelism, whose schedule is fixed at the start", hint)
    replicas, count = topology.data_parallel_size or 2, topology.micro_batches_per_step
    if replicas > 1 and not topology.reassigns_micro_batches(replicas):
        reason = f"by_speed requires {_MIN_MICRO_BATCHES_BY_SPEED} micro batches per replica, but {replicas} replicas have {count}"
        required = _MIN_MICRO_BATCHES_BY_SPEED * replicas * topology.samples_per_micro_batch
        hint = f"reduce micro_batch_size, or set global_batch_size to {required} or more"
        raise build_field_error(name, reason, hint)


def _check_learners(topology: TopologyConfig) -> None:
    """Raise a validation error if the batch or the parallel dimensions do not fit the learners."""
    if topology.learners is None:
        return
    if topology.micro_batches_per_step % topology.learners:
        size = topology.learners * topology.samples_per_micro_batch
        check_is_multiple("global_batch_size", topology.samples_per_step, "learners x micro_batch_size =", size)
    unsupported = {
        "cpu_offload": topology.cpu_offload,
        "pipe_parallel_size": topology.pipeline_parallel_size > 1,
        "context_parallel_size": topology.context_parallel_size > 1,
        "gradient_compression": topology.gradient_compression is not GradientCompression.none,
        "micro_batch_assignment": topology.micro_batch_assignment is not MicroBatchAssignment.equal,
    }
    for name, is_set in unsupported.items():
        if is_set:
            reason = "is not supported with learners: within a learner, ranks can be data and tensor parallel, and shard their state"
            raise build_field_error(name, reason, f"remove {name}, or learners")


def _derive_batch_sizes(
    global_batch_size: int | None, micro_batch_size: int | None, gradient_accumulation_steps: int | None, data_parallel_size: int | None
) -> dict[str, int | None]:
    if [global_batch_size, micro_batch_size, gradient_accumulation_steps].count(None) > 1:
        raise ValueError("set two of global_batch_size, micro_batch_size and gradient_accumulation_steps; the third is derived")
    if gradient_accumulation_steps and not data_parallel_size:
        reason = "needs data_parallel_size or world_size; or set global_batch_size and micro_batch_size instead"
        raise build_field_error("gradient_accumulation_steps", reason)
    micro_batches_per_replica_step = (gradient_accumulation_steps or 1) * (data_parallel_size or 1)
    if micro_batch_size and gradient_accumulation_steps:
        global_batch_size = global_batch_size or micro_batch_size * micro_batches_per_replica_step
        if global_batch_size != micro_batch_size * micro_batches_per_replica_step:
            product = f"{micro_batch_size} x {gradient_accumulation_steps} x {data_parallel_size}"
            raise build_field_error(
                "global_batch_size",
                f"{global_batch_size} is not micro_batch_size x gradient_accumulation_steps x data_parallel_size = {product}",
            )
    elif global_batch_size and micro_batch_size:
        check_is_multiple("global_batch_size", global_batch_size, "micro_batch_size", micro_batch_size)
    elif global_batch_size:
        micro_batch_size = check_is_multiple(
            "global_batch_size", global_batch_size, "gradient_accumulation_steps x data_parallel_size =", micro_batches_per_replica_step
        )
    return {
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
