"""`topology`: how ranks and batches are divided, and what follows from it once a world has formed.

Global batch, micro batch, tensor and pipeline size are the config's. World size, data-parallel size and gradient
accumulation belong to a *world*: they are derived when one forms, and again when it changes.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, check_multiple, wrong


class PipePartitionMethod(StrEnum):
    """Ways to cut the layers into stages."""

    uniform = "uniform"
    balanced = "balanced"


class DataParallelType(StrEnum):
    """What replicas have in common, and what each keeps for itself."""

    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class ActivationCheckpointing(StrEnum):
    """What a forward pass leaves out, for the backward pass to compute again."""

    disabled = "disabled"
    selective = "selective"
    every_layer = "every_layer"
    every_pipe_stage = "every_pipe_stage"


class TopologyConfig(Section):
    """Sizes of the parallel groups and of the batch. Any three of the first four give the fourth, any two of the last three the third."""

    world_size: int | None = Field(None, ge=1, description="Ranks in all. null: what the nodes' slots add up to.")
    model_parallel_size: int | None = Field(None, ge=1, description="Ranks that share each layer (tensor parallel). null: 1.")
    sequence_parallel: bool = Field(False, description="Divide the sequence too, over the ranks that share each layer.")
    pipe_parallel_size: int | None = Field(None, ge=1, description="Ranks that share the layers in turn (pipeline parallel). null: 1.")
    context_parallel_size: int = Field(1, ge=1, description="Ranks that share each sample's sequence (context parallel).")
    data_parallel_size: int | None = Field(None, ge=1, description="Replicas of the model. null: what the world has room for.")
    data_parallel_type: DataParallelType = Field(
        DataParallelType.ddp, description="ddp: each replica keeps all. fsdp: they divide it. hsdp: groups of data_parallel_shard_size do."
    )
    data_parallel_shard_size: int | None = Field(None, ge=1, description="Ranks that divide the model among them; for hsdp only.")
    cpu_offload: bool = Field(
        False, description="Keep parts of parameters and optimizer state in the node's memory, and step there. For fsdp and hsdp only."
    )
    reduce_every_micro_batch: bool = Field(
        False, description="Divide gradients after each micro batch, not once a step: less memory, more traffic. For fsdp and hsdp only."
    )
    global_batch_size: int | None = Field(None, ge=1, description="Samples in one optimizer step, at every world size.")
    micro_batch_size: int | None = Field(None, ge=1, description="Samples in one forward pass on one rank.")
    gradient_accumulation_steps: int | None = Field(None, ge=1, description="Micro batches a replica adds up per step.")

    pipe_partition_method: PipePartitionMethod = Field(
        PipePartitionMethod.uniform, description="uniform: as many layers to each stage. balanced: as much work, the head's included."
    )
    pipe_partition_overwrite: tuple[int, ...] | None = Field(
        None, description="First layer of each stage, beginning with 0. null: as pipe_partition_method says."
    )
    pipe_stages_per_rank: int = Field(1, ge=1, description="Stages on each rank of a pipeline. Over 1: interleaved 1F1B.")
    activation_checkpointing_type: ActivationCheckpointing = Field(
        ActivationCheckpointing.disabled,
        description="What is computed again in the backward pass. selective: all but matrix products. every_layer, every_pipe_stage: all.",
    )

    @model_validator(mode="after")
    def _derive(self) -> TopologyConfig:
        sizes = self.model_parallel_size, self.pipe_parallel_size, self.data_parallel_size
        values = _parallel_sizes(self.world_size, *sizes, self.context_parallel_size)
        values |= _batch_sizes(
            self.global_batch_size, self.micro_batch_size, self.gradient_accumulation_steps, values["data_parallel_size"]
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _check_shards(self)
        _check_pipeline(self)
        _check_parts(self)
        return self

    @property
    def tensor(self) -> int:
        """Tensor-parallel size."""
        return self.model_parallel_size or 1

    @property
    def pipeline(self) -> int:
        """Pipeline-parallel size."""
        return self.pipe_parallel_size or 1

    @property
    def replica(self) -> int:
        """Ranks that hold and compute one model together."""
        return self.tensor * self.pipeline * self.context_parallel_size

    @property
    def stages(self) -> int:
        """Parts that the layers are cut into."""
        return self.pipeline * self.pipe_stages_per_rank

    @property
    def global_batch(self) -> int:
        """Samples in one optimizer step."""
        return self.global_batch_size or 1

    @property
    def micro_batch(self) -> int:
        """Samples in one forward pass."""
        return self.micro_batch_size or 1

    @property
    def micro_batches(self) -> int:
        """Micro batches in one optimizer step, all replicas together."""
        return self.global_batch // self.micro_batch

    def data_parallel(self, world_size: int) -> int:
        """Return the number of replicas in a world of `world_size` ranks.

        Raises ValueError if the world is no whole number of replicas, or contradicts what the config fixes.
        """
        context, replica = self.context_parallel_size, self.replica
        name, product = ("", "") if context == 1 else (" x context_parallel_size", f" x {context}")
        if world_size % replica:
            sizes = f"model_parallel_size x pipe_parallel_size{name} = {self.tensor} x {self.pipeline}{product}"
            raise ValueError(f"{world_size} ranks are no multiple of {sizes}")
        replicas, shard = world_size // replica, self.data_parallel_shard_size or 1
        if replicas * context % shard:
            raise ValueError(f"{replicas * context} replicas{name} are no multiple of data_parallel_shard_size {shard}")
        return replicas

    def shard_size(self, replicas: int, *, zero: bool) -> int:
        """Return how many ranks divide the state of a model among them, of which there are `replicas`. Ranks that share a sequence do.

        `zero`: ddp's optimizer state is to be divided too (optimizer.zero).
        """
        divided = zero or self.data_parallel_type is DataParallelType.fsdp
        return self.data_parallel_shard_size or (replicas * self.context_parallel_size if divided else 1)

    def place(self, rank: int, world_size: int) -> dict[str, int]:
        """Return where `rank` stands in a world of that size: its stage (pipe), its replica (data), its place in each layer (model).

        Neighbours share layers first, then a sequence, then come the replicas of a stage, then the stages. In a world that
        does not fit the topology, numbers are as near as can be.
        """
        stage = max(1, world_size // self.pipeline)
        data = rank % stage // self.tensor // self.context_parallel_size
        return {"pipe": rank // stage, "data": data, "model": rank % self.tensor}

    def deal(self, world_size: int) -> tuple[int, ...]:
        """Return how many micro batches each replica takes in one step, largest first; they add up to the global batch.

        Shares differ by at most one; a replica may get none when there are more replicas than micro batches.
        Raises ValueError as `data_parallel` does.
        """
        replicas = self.data_parallel(world_size)
        whole, rest = divmod(self.micro_batches, replicas)
        return tuple(whole + (index < rest) for index in range(replicas))


def _parallel_sizes(world: int | None, tensor: int | None, pipeline: int | None, data: int | None, context: int) -> dict[str, int | None]:
    name, number = ("", "") if context == 1 else (" x context_parallel_size", f" x {context}")
    if tensor is None:
        others = f"data_parallel_size x pipe_parallel_size{name} ="
        tensor = check_multiple("world_size", world, others, data * (pipeline or 1) * context) if world and data else 1
    if pipeline is None:
        rest = (data or 1) * tensor * context
        pipeline = world // rest if world and data and world % rest == 0 else 1
    if world and not data:
        data = check_multiple("world_size", world, f"model_parallel_size x pipe_parallel_size{name} =", tensor * pipeline * context)
    if world and data and world != data * tensor * pipeline * context:
        product = f"{tensor} x {pipeline} x {data}{number}"
        raise wrong("world_size", f"{world} is not model_parallel_size x pipe_parallel_size x data_parallel_size{name} = {product}")
    world = data * tensor * pipeline * context if data else None
    return {"world_size": world, "model_parallel_size": tensor, "pipe_parallel_size": pipeline, "data_parallel_size": data}


def _check_pipeline(topology: TopologyConfig) -> None:
    """No world could fill a pipeline whose whole batch is too small for it. A replica's share may be: see config.pipeline.on_schedule."""
    ranks, count = topology.pipeline, topology.micro_batches
    if topology.pipe_stages_per_rank == 1 and count < ranks:
        hint = f"{ranks * topology.micro_batch} would fit, or a smaller micro_batch_size"
        raise wrong("global_batch_size", f"{count} micro batches a step are fewer than pipe_parallel_size {ranks}", hint)
    if topology.activation_checkpointing_type is ActivationCheckpointing.every_pipe_stage and ranks == 1:
        raise wrong(
            "activation_checkpointing_type", "every_pipe_stage needs a pipe_parallel_size over 1", "every_layer saves memory without"
        )
    if topology.pipe_stages_per_rank > 1 and ranks == 1:
        raise wrong("pipe_stages_per_rank", f"{topology.pipe_stages_per_rank} needs a pipe_parallel_size over 1", "1 is for no pipeline")
    if topology.pipe_stages_per_rank > 1 and count % ranks:
        hint = f"{(count // ranks + 1) * ranks * topology.micro_batch} would fit"
        raise wrong("global_batch_size", f"{count} micro batches a step do not divide into rounds of pipe_parallel_size {ranks}", hint)


def _check_shards(topology: TopologyConfig) -> None:
    kind, shard, data = topology.data_parallel_type, topology.data_parallel_shard_size, topology.data_parallel_size
    if kind is DataParallelType.hsdp and shard is None:
        raise wrong("data_parallel_type", "hsdp needs data_parallel_shard_size beside it", "as many as a node has GPUs is usual")
    if kind is not DataParallelType.hsdp and shard is not None:
        raise wrong("data_parallel_shard_size", f"is for hsdp, and data_parallel_type is {kind}")
    if shard and data and (data * topology.context_parallel_size) % shard:
        check_multiple("data_parallel_size", data, "data_parallel_shard_size", shard)


def _check_parts(topology: TopologyConfig) -> None:
    """Refuse what is for parts of a state where there are none, and what a pipeline cannot do."""
    copies = topology.data_parallel_type is DataParallelType.ddp
    for name in ("cpu_offload", "reduce_every_micro_batch"):
        if copies and getattr(topology, name):
            raise wrong(name, "is for fsdp and hsdp, and data_parallel_type is ddp", "data_parallel_type: fsdp divides what ddp copies")
    if topology.reduce_every_micro_batch and topology.pipeline > 1:
        reason = "is not for a pipeline, which sums gradients once a step"
        raise wrong("reduce_every_micro_batch", reason, "leave it out, or pipe_parallel_size")


def _batch_sizes(total: int | None, micro: int | None, accumulation: int | None, data: int | None) -> dict[str, int | None]:
    if [total, micro, accumulation].count(None) > 1:
        raise ValueError("give two of global_batch_size, micro_batch_size and gradient_accumulation_steps; the third follows")
    if accumulation and not data:
        reason = "needs data_parallel_size or world_size beside it; or give global_batch_size and micro_batch_size instead"
        raise wrong("gradient_accumulation_steps", reason)
    parts = (accumulation or 1) * (data or 1)
    if micro and accumulation:
        total = total or micro * parts
        if total != micro * parts:
            product = f"{micro} x {accumulation} x {data}"
            raise wrong(
                "global_batch_size", f"{total} is not micro_batch_size x gradient_accumulation_steps x data_parallel_size = {product}"
            )
    elif total and micro:
        check_multiple("global_batch_size", total, "micro_batch_size", micro)
    elif total:
        micro = check_multiple("global_batch_size", total, "gradient_accumulation_steps x data_parallel_size =", parts)
    return {"global_batch_size": total, "micro_batch_size": micro, "gradient_accumulation_steps": accumulation}
