"""The config: one pydantic model, with one module per top-level key.

`load_config` (in swarmtrain.config.loader) reads YAML and overrides into a Config and reports every error at once.
Keys and fields that exist in Aleph Alpha's Scaling have the same names as in Scaling.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from swarmtrain.config.pipeline_layout import partition_layers
from swarmtrain.config.schema.data import DataConfig
from swarmtrain.config.schema.fields.gradient_compression import GradientCompression
from swarmtrain.config.schema.fields.notify_channel import ChannelName, NotifyChannelConfig
from swarmtrain.config.schema.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.config.schema.logger import LoggerConfig
from swarmtrain.config.schema.optimizer import DilocoConfig, OptimizerConfig, OptimizerMethod
from swarmtrain.config.schema.profiler import ProfilerConfig
from swarmtrain.config.schema.runner import QUEUE_KEYS, RunnerConfig
from swarmtrain.config.schema.runner_types import DEPLOYED_CONTEXT
from swarmtrain.config.schema.section import Section, build_field_error, check_is_multiple, format_duplicates
from swarmtrain.config.schema.topology import MicroBatchAssignment, TopologyConfig
from swarmtrain.config.schema.trainer import TrainerConfig
from swarmtrain.config.schema.training_groups import TrainingGroupConfig
from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig

__all__ = ["Config"]
_FLOAT8_ALIGNMENT = 16


class Config(Section):
    """The complete config of one run."""

    runner: RunnerConfig = Field(RunnerConfig(), description="Where the job runs and what it starts.")
    logger: LoggerConfig = Field(LoggerConfig(), description="Log output and metrics sinks.")
    topology: TopologyConfig = Field(TopologyConfig(global_batch_size=8, micro_batch_size=8), description="Parallelism and batch sizes.")
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="Optimizer, gradient clipping and loss scaling.")
    diloco: DilocoConfig = Field(DilocoConfig(), description="Rounds and outer optimizer of a run with topology.learners (DiLoCo).")
    learning_rate_scheduler: LearningRateSchedulerConfig = Field(
        LearningRateSchedulerConfig(), description="Learning rate schedule of the default group, inherited by training_groups."
    )
    training_groups: tuple[TrainingGroupConfig, ...] = Field(
        (), description="Parameter groups with their own optimizer, weight decay and schedule. []: one group with all parameters."
    )
    trainer: TrainerConfig = Field(TrainerConfig(), description="Training length, checkpoints, initialization and evaluation.")
    profiler: ProfilerConfig = Field(ProfilerConfig(), description="torch.profiler traces and timelines of some steps.")
    transformer_architecture: TransformerArchitectureConfig = Field(TransformerArchitectureConfig(), description="Model architecture.")
    data: DataConfig = Field(DataConfig(), description="Training and validation data.")
    notify: dict[ChannelName, NotifyChannelConfig] = Field({}, description="Channels that receive notifications about the run, by name.")
    script: dict[str, Any] = Field({}, description="Options of a custom script. swarmtrain passes them on without interpreting them.")

    @model_validator(mode="after")
    def _check_model_fits_topology(self) -> Config:
        if names := format_duplicates(group.group_name for group in self.training_groups):
            raise build_field_error("training_groups", f"has {names} more than once: group names must be unique")
        architecture, tensor = self.transformer_architecture, self.topology.tensor_parallel_size
        for name, size in (
            ("num_attention_heads", architecture.num_attention_heads),
            ("attention_num_kv_heads", architecture.kv_heads),
            ("vocab_size", architecture.vocab_size),
        ):
            check_is_multiple(f"transformer_architecture.{name}", size, "topology.model_parallel_size", tensor)
        if self.topology.sequence_parallel:
            check_is_multiple(
                "transformer_architecture.sequence_length", architecture.sequence_length, "topology.model_parallel_size", tensor
            )
        if self.topology.context_parallel_size > 1:
            name, sequence_chunks = "2 x topology.context_parallel_size", 2 * self.topology.context_parallel_size
            if self.topology.sequence_parallel:
                name, sequence_chunks = f"{name} x model_parallel_size", sequence_chunks * tensor
            check_is_multiple("transformer_architecture.sequence_length", architecture.sequence_length, f"{name} =", sequence_chunks)
        if architecture.mlp_width % tensor:
            raise build_field_error(
                "transformer_architecture.mlp_factor",
                f"gives an MLP width of {architecture.mlp_width}, which is not a multiple of topology.model_parallel_size {tensor}",
            )
        if self.optimizer.zero and self.topology.micro_batch_assignment is MicroBatchAssignment.by_speed:
            reason = "by_speed does not support optimizer.zero, with which all replicas take part in each micro batch"
            raise build_field_error("topology.micro_batch_assignment", reason, "set it to equal, or optimizer.zero to false")
        partition_layers(self.topology, architecture)
        _check_float8_layer_sizes(architecture, self.topology)
        _check_gradient_compression(self)
        if architecture.umup.enable:
            _check_umup_optimizer(self.optimizer, self.training_groups)
        return self

    @model_validator(mode="after")
    def _check_learners(self) -> Config:
        if self.topology.learners is None:
            if self.diloco != DilocoConfig():
                raise build_field_error("diloco", "has no effect: topology.learners is null", "set topology.learners, or remove diloco")
            return self
        layers = self.transformer_architecture.num_layers
        if self.diloco.fragments > layers:
            raise build_field_error("diloco.fragments", f"{self.diloco.fragments} is above transformer_architecture.num_layers {layers}")
        unsupported = {
            "trainer.contrastive_config": self.trainer.contrastive_config is not None,
            "trainer.tensor_statistics_recorder_config": self.trainer.tensor_statistics_recorder_config is not None,
        }
        for name, is_set in unsupported.items():
            if is_set:
                raise build_field_error(name, "is not supported with topology.learners", f"remove {name}, or topology.learners")
        return self

    @model_validator(mode="after")
    def _check_channels_reachable(self) -> Config:
        if self.notify and self.runner.swarm.internal:
            reason = "the coordinator cannot reach a channel from an internal network"
            raise build_field_error("notify", reason, "remove it, or set runner.swarm.internal to false")
        return self

    @model_validator(mode="after")
    def _check_trainer_and_logger(self) -> Config:
        for name in ("log_file_per_rank", "use_csv", "use_tensorboard"):
            if getattr(self.logger, name) and not (self.logger.log_dir or self.trainer.save_dir):
                raise build_field_error(f"logger.{name}", "has no output directory", "set logger.log_dir, for example logger.log_dir: logs")
        vocabulary = self.transformer_architecture.vocab_size
        if out_of_range := [token for token in self.trainer.finetunable_token_ids if token >= vocabulary]:
            raise build_field_error(
                "trainer.finetunable_token_ids", f"{out_of_range[0]} is not smaller than transformer_architecture.vocab_size {vocabulary}"
            )
        if self.trainer.sampling_config is not None:
            _check_topology_allows_sampling(self.topology, self.transformer_architecture)
        if self.trainer.objective_config is None:  # a custom objective may use any of these settings
            _check_preference_tuning(self)
            _check_contrastive_training(self)
        return self

    def to_json(self) -> str:
        """Return the full config, including defaults, as JSON text. Equal configs give equal bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"

    def hide_environment(self) -> Config:
        """Return the config with … for the values of `runner.env`, which may be confidential."""
        return self.model_copy(update={"runner": self.runner.model_copy(update={"env": dict.fromkeys(self.runner.env, "…")})})

    def to_node_config(self) -> Config:
        """Return the config in the form that every node receives and every checkpoint stores.

        The hosts, the current node count, the settings for a queue and the channels of notifications are removed, and min_nodes and
        max_nodes are filled in: otherwise `swarmtrain scale`, or another priority, would change the config of all nodes, and so restart
        them.
        """
        low, _, high = self.runner.node_range
        defaults = {key: RunnerConfig.model_fields[key].default for key in QUEUE_KEYS}
        runner = self.runner.model_copy(update={**defaults, "hosts": None, "nodes": None, "min_nodes": low, "max_nodes": high})
        return self.model_copy(update={"runner": runner, "notify": {}})

    def dump_notify(self) -> str:
        """Return the section notify as JSON text; empty if it has no channels. The nodes do not receive it."""
        channels = {name: channel.model_dump(mode="json") for name, channel in self.notify.items()}
        return json.dumps(channels, sort_keys=True) if channels else ""

    def restore_notify(self, text: str) -> Config:
        """Return the config with the section notify that `dump_notify` has returned as `text`. Raises pydantic.ValidationError."""
        channels = {name: NotifyChannelConfig.model_validate_json(json.dumps(item)) for name, item in json.loads(text or "{}").items()}
        return self.model_copy(update={"notify": channels})

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Return the config that `to_json` has serialized as `text`. The package of its launcher need not be installed: nodes may lack it.

        Raises pydantic.ValidationError if it is invalid.
        """
        return cls.model_validate_json(text, context=DEPLOYED_CONTEXT)

    @property
    def digest(self) -> str:
        """First 10 hexadecimal digits of the SHA-256 of the config's JSON text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:10]


def _check_gradient_compression(config: Config) -> None:
    """Check that the optimizer and the precision allow gradients to be compressed."""
    mode, key = config.topology.gradient_compression, "topology.gradient_compression"
    if mode is not GradientCompression.none and config.optimizer.zero:
        raise build_field_error(key, f"{mode} does not support optimizer.zero, which shards the sums of gradients", "remove one of the two")
    is_float16 = config.transformer_architecture.precision is Precision.float16
    scales_loss = is_float16 if config.optimizer.loss_scaler.enable is None else config.optimizer.loss_scaler.enable
    if mode is GradientCompression.powersgd and scales_loss:
        reason = "powersgd does not support loss scaling: when the scale changes, the error feedback has the wrong one"
        hint = "set gradient_compression to bf16, or transformer_architecture.precision to bfloat16 without optimizer.loss_scaler.enable"
        raise build_field_error(key, reason, hint)


def _check_preference_tuning(config: Config) -> None:
    """Check the settings of preference tuning (DPO): the adapter is compared with its base model, so the base model must be frozen."""
    trainer, key = config.trainer, "trainer.preference_config"
    if (trainer.preference_config is None) == bool(config.data.rejected_prefixes):
        config_state, prefixes_state = ("is null", "is set") if config.data.rejected_prefixes else ("is set", "is empty")
        raise build_field_error(key, f"{config_state}, but data.rejected_prefixes {prefixes_state}: set both or neither")
    if trainer.preference_config is None:
        return
    if not config.transformer_architecture.peft_fields:
        raise build_field_error(key, "needs adapter parameters to train", "set transformer_architecture.lora_config to {}")
    if trainer.finetunable_parameters is not None or trainer.finetunable_token_ids:
        raise build_field_error(
            key, "uses the base model as the reference model, which finetunable_parameters or finetunable_token_ids would change"
        )
    if config.topology.context_parallel_size > 1:
        raise build_field_error(
            key, "does not support topology.context_parallel_size above 1: the likelihood of a response is summed over the full sequence"
        )


def _check_contrastive_training(config: Config) -> None:
    """Check the settings of contrastive training: each embedding is computed from a full text and compared with other embeddings."""
    trainer, key = config.trainer, "trainer.contrastive_config"
    enabled = trainer.contrastive_config is not None
    for name, is_set in (
        ("data.positive_prefixes", bool(config.data.positive_prefixes)),
        ("transformer_architecture.embedding_head_config", config.transformer_architecture.embedding_head_config is not None),
    ):
        if is_set != enabled:
            config_state, other_state = ("is set", "not") if enabled else ("is null", "set")
            raise build_field_error(key, f"{config_state}, and {name} is {other_state}: set both or neither")
    if not enabled:
        return
    if config.topology.context_parallel_size > 1:
        raise build_field_error(key, "does not support topology.context_parallel_size above 1: an embedding is computed from the full text")


def _check_topology_allows_sampling(topology: TopologyConfig, architecture: TransformerArchitectureConfig) -> None:
    """Check that the model can generate text, and that `topology` supports it.

    Tokens are generated one at a time, so each rank needs full sequences and all layers.
    """
    if architecture.embedding_head_config is not None:
        raise build_field_error(
            "trainer.sampling_config", "needs a model that generates text, but transformer_architecture.embedding_head_config is set"
        )
    parallelism = {
        "pipe_parallel_size": topology.pipeline_parallel_size > 1,
        "context_parallel_size": topology.context_parallel_size > 1,
        "sequence_parallel": topology.sequence_parallel,
    }
    if conflicts := [name for name, enabled in parallelism.items() if enabled]:
        reason = f"does not support topology.{conflicts[0]}: tokens are generated one at a time"
        raise build_field_error("trainer.sampling_config", reason, "remove it, and run swarmtrain sample on the run's checkpoints")


def _check_float8_layer_sizes(architecture: TransformerArchitectureConfig, topology: TopologyConfig) -> None:
    """Check that the sizes of float8 layers are multiples of 16 times the degree by which they are sharded.

    The kernels require multiples of 16: in_features in the forward pass, out_features and the number of tokens in the backward pass.
    """
    width_multiple = _describe_float8_multiple("model_parallel_size", topology.tensor_parallel_size)
    for field in architecture.float8_layers:
        check_is_multiple("transformer_architecture.hidden_size", architecture.hidden_size, *width_multiple)
        name, width = "", architecture.hidden_size
        if field == "fp8_config_attention":
            name, width = "attention_num_kv_heads", architecture.kv_heads * architecture.head_size
        elif field == "fp8_config_attention_dense_out":
            name, width = "attention_head_size", architecture.attention_width
        elif "mlp" in field:
            name, width = "mlp_factor", architecture.mlp_width
        if width % width_multiple[1]:
            reason = f"gives a width of {width}, which is not a multiple of {width_multiple[0]} {width_multiple[1]}"
            raise build_field_error(f"transformer_architecture.{name}", reason, f"leave {field} out, or change the width")
    if architecture.float8_layers:
        token_multiple = _describe_float8_multiple("context_parallel_size", topology.context_parallel_size)
        check_is_multiple("transformer_architecture.sequence_length", architecture.sequence_length, *token_multiple)


def _describe_float8_multiple(degree_name: str, degree: int) -> tuple[str, int]:
    return (
        ("the float8 alignment", _FLOAT8_ALIGNMENT)
        if degree == 1
        else (f"the float8 alignment {_FLOAT8_ALIGNMENT} x topology.{degree_name} =", _FLOAT8_ALIGNMENT * degree)
    )


def _check_umup_optimizer(optimizer: OptimizerConfig, training_groups: Sequence[TrainingGroupConfig]) -> None:
    """Check that the optimizer settings are compatible with u-muP.

    u-muP's learning rates are for AdamW. Each gradient value has unit scale, so the global gradient norm grows with the model, and a fixed
    clipping threshold does not fit.
    """
    other_methods = {optimizer.method, *(group.method for group in training_groups)} - {None, OptimizerMethod.adamw}
    if other_methods:
        key = "optimizer.method" if optimizer.method in other_methods else "training_groups"
        raise build_field_error(
            key,
            f"transformer_architecture.umup defines learning rates only for adamw, not for {', '.join(sorted(map(str, other_methods)))}",
        )
    if optimizer.gradient_clipping:
        reason = (
            f"{optimizer.gradient_clipping:g} would clip most steps: with transformer_architecture.umup, gradients have a different scale"
        )
        raise build_field_error("optimizer.gradient_clipping", reason, "set it to 0 to disable clipping")
