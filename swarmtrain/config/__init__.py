"""The config: one pydantic model, one module for each of its top-level keys.

`load` (in swarmtrain.config.load) reads YAML and overrides into a Config and reports every error at once.
Keys and fields are those of Aleph Alpha's Scaling wherever both have the same thing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, check_multiple, twice, wrong
from swarmtrain.config.data import DataConfig
from swarmtrain.config.learning_rate_scheduler import LearningRateSchedulerConfig
from swarmtrain.config.logger import LoggerConfig
from swarmtrain.config.optimizer import OptimizerConfig, OptimizerMethod
from swarmtrain.config.pipeline import cuts
from swarmtrain.config.profiler import ProfilerConfig
from swarmtrain.config.runner import RunnerConfig
from swarmtrain.config.topology import TopologyConfig
from swarmtrain.config.trainer import TrainerConfig
from swarmtrain.config.training_groups import TrainingGroupConfig
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig

__all__ = ["Config"]
_FLOAT8_ROW = 16


class Config(Section):
    """All that one run is told."""

    runner: RunnerConfig = Field(RunnerConfig(), description="Where the job runs, and what is started there.")
    logger: LoggerConfig = Field(LoggerConfig(), description="What is written down, how often, and where to.")
    topology: TopologyConfig = Field(
        TopologyConfig(global_batch_size=8, micro_batch_size=8), description="How ranks and batches are divided."
    )
    optimizer: OptimizerConfig = Field(OptimizerConfig(), description="How gradients become steps.")
    learning_rate_scheduler: LearningRateSchedulerConfig = Field(
        LearningRateSchedulerConfig(), description="Schedule of the default group, which training_groups inherit."
    )
    training_groups: tuple[TrainingGroupConfig, ...] = Field(
        (), description="Parameters that are trained in a way of their own. []: one group."
    )
    trainer: TrainerConfig = Field(TrainerConfig(), description="How long to train, when to save, and what from.")
    profiler: ProfilerConfig = Field(ProfilerConfig(), description="A trace of some steps.")
    transformer_architecture: TransformerArchitectureConfig = Field(TransformerArchitectureConfig(), description="The shape of the model.")
    data: DataConfig = Field(DataConfig(), description="What is read.")
    script: dict[str, Any] = Field({}, description="Your script's own options. swarmtrain hands them on unread.")

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        if names := twice(group.group_name for group in self.training_groups):
            raise wrong("training_groups", f"has {names} more than once: a group's name must be its own")
        shape, tensor = self.transformer_architecture, self.topology.tensor
        for name, size in (
            ("num_attention_heads", shape.num_attention_heads),
            ("attention_num_kv_heads", shape.kv_heads),
            ("vocab_size", shape.vocab_size),
        ):
            check_multiple(f"transformer_architecture.{name}", size, "topology.model_parallel_size", tensor)
        if self.topology.sequence_parallel:
            check_multiple("transformer_architecture.sequence_length", shape.sequence_length, "topology.model_parallel_size", tensor)
        if self.topology.context_parallel_size > 1:
            name, parts = "2 x topology.context_parallel_size", 2 * self.topology.context_parallel_size
            if self.topology.sequence_parallel:
                name, parts = f"{name} x model_parallel_size", parts * tensor
            check_multiple("transformer_architecture.sequence_length", shape.sequence_length, f"{name} =", parts)
        if shape.mlp_width % tensor:
            raise wrong(
                "transformer_architecture.mlp_factor", f"makes a width that is no multiple of topology.model_parallel_size {tensor}"
            )
        for name, size in (("model_parallel_size", tensor), ("context_parallel_size", self.topology.context_parallel_size)):
            if self.trainer.compile and size > 1:
                raise wrong("trainer.compile", f"is not for ranks that share a layer or a sequence, and topology.{name} is {size}")
        cuts(self.topology, shape)
        _check_float8(shape, self.topology)
        if shape.umup.enable:
            _check_umup(self.optimizer, self.training_groups)
        return self

    @model_validator(mode="after")
    def _trainer_and_logger_fit(self) -> Config:
        for name in ("log_file_per_rank", "use_csv", "use_tensorboard"):
            if getattr(self.logger, name) and not (self.logger.log_dir or self.trainer.save_dir):
                raise wrong(f"logger.{name}", "has no folder to write to", "logger.log_dir: logs")
        vocabulary = self.transformer_architecture.vocab_size
        if beyond := [token for token in self.trainer.finetunable_token_ids if token >= vocabulary]:
            raise wrong("trainer.finetunable_token_ids", f"{beyond[0]} is not below transformer_architecture.vocab_size {vocabulary}")
        if self.trainer.sampling_config is not None:
            _check_samples(self.topology)
        _check_pairs(self)
        _check_texts(self)
        return self

    def to_json(self) -> str:
        """Return the whole config, defaults included, as JSON: the same config gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"

    def resolved(self) -> Config:
        """Return the config as every node and every checkpoint has it.

        Which machines are used, and how many at the moment, is taken out and min_nodes and max_nodes are filled in:
        what scaling changes must not change what the nodes were given, or all of them would restart.
        """
        low, _, high = self.runner.node_range
        runner = self.runner.model_copy(update={"hosts": None, "nodes": None, "min_nodes": low, "max_nodes": high})
        return self.model_copy(update={"runner": runner})

    @classmethod
    def from_json(cls, text: str) -> Config:
        """Read what `to_json` wrote. Raises pydantic.ValidationError."""
        return cls.model_validate_json(text)

    @property
    def digest(self) -> str:
        """First 10 hexadecimal digits of the SHA-256 of `to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:10]


def _check_pairs(config: Config) -> None:
    """What is tuned is compared with the model that it stands beside, which must not change."""
    trainer, place = config.trainer, "trainer.preference_config"
    if (trainer.preference_config is None) == bool(config.data.rejected_prefixes):
        one, other = ("is null", "are some") if config.data.rejected_prefixes else ("is set", "are none")
        raise wrong(place, f"{one}, and data.rejected_prefixes {other}: they go together")
    if trainer.preference_config is None:
        return
    if not config.transformer_architecture.beside:
        raise wrong(place, "needs something to tune beside the model", "transformer_architecture.lora_config: {}")
    if trainer.finetunable_parameters is not None or trainer.finetunable_token_ids:
        raise wrong(place, "compares with the model itself, and finetunable_parameters or finetunable_token_ids would change it")
    if config.topology.context_parallel_size > 1:
        raise wrong(place, "is not for topology.context_parallel_size above 1: an answer's likelihood is a sum over all of it")


def _check_texts(config: Config) -> None:
    """A text's vector is made of all of it, and compared with those of other texts."""
    trainer, place = config.trainer, "trainer.contrastive_config"
    wanted = trainer.contrastive_config is not None
    for name, there in (
        ("data.positive_prefixes", bool(config.data.positive_prefixes)),
        ("transformer_architecture.embedding_head_config", config.transformer_architecture.embedding_head_config is not None),
    ):
        if there != wanted:
            one, other = ("is set", "not") if wanted else ("is null", "set")
            raise wrong(place, f"{one}, and {name} is {other}: they go together")
    if not wanted:
        return
    if config.topology.context_parallel_size > 1:
        raise wrong(place, "is not for topology.context_parallel_size above 1: a vector is made of all of a text")
    if trainer.sampling_config is not None:
        raise wrong("trainer.sampling_config", "is for a model that goes on from a text, and trainer.contrastive_config makes vectors")


def _check_samples(topology: TopologyConfig) -> None:
    """Tokens come one by one, so each rank must have whole sequences and all layers."""
    divides = {
        "pipe_parallel_size": topology.pipeline > 1,
        "context_parallel_size": topology.context_parallel_size > 1,
        "sequence_parallel": topology.sequence_parallel,
    }
    if found := [name for name, divided in divides.items() if divided]:
        reason = f"is not for topology.{found[0]}: a token that comes alone cannot be divided"
        raise wrong("trainer.sampling_config", reason, "leave it out, and run swarmtrain sample on the run's checkpoints")


def _check_float8(shape: TransformerArchitectureConfig, topology: TopologyConfig) -> None:
    """Kernels take rows of 16 numbers: of a layer's inputs in the forward pass, of its outputs and of tokens in the backward pass."""
    whole = _of_float8("model_parallel_size", topology.tensor)
    for field in shape.float8:
        check_multiple("transformer_architecture.hidden_size", shape.hidden_size, *whole)
        name, width = "", shape.hidden_size
        if field == "fp8_config_attention":
            name, width = "attention_num_kv_heads", shape.kv_heads * shape.head_size
        elif field == "fp8_config_attention_dense_out":
            name, width = "attention_head_size", shape.attention_width
        elif "mlp" in field:
            name, width = "mlp_factor", shape.mlp_width
        if width % whole[1]:
            reason = f"makes a width of {width}, which is no multiple of {whole[0]} {whole[1]}"
            raise wrong(f"transformer_architecture.{name}", reason, f"leave {field} out, or another width")
    if shape.float8:
        tokens = _of_float8("context_parallel_size", topology.context_parallel_size)
        check_multiple("transformer_architecture.sequence_length", shape.sequence_length, *tokens)


def _of_float8(name: str, parts: int) -> tuple[str, int]:
    return ("float8's", _FLOAT8_ROW) if parts == 1 else (f"float8's {_FLOAT8_ROW} x topology.{name} =", _FLOAT8_ROW * parts)


def _check_umup(optimizer: OptimizerConfig, groups: Sequence[TrainingGroupConfig]) -> None:
    """Its rates are AdamW's, and its gradients are of one size each, so that the norm of all grows with the model."""
    others = {optimizer.method, *(group.method for group in groups)} - {None, OptimizerMethod.adamw}
    if others:
        place = "optimizer.method" if optimizer.method in others else "training_groups"
        raise wrong(place, f"transformer_architecture.umup has rates for adamw alone, not for {', '.join(sorted(map(str, others)))}")
    if optimizer.gradient_clipping:
        reason = f"{optimizer.gradient_clipping:g} would cut most steps: with transformer_architecture.umup gradients have another scale"
        raise wrong("optimizer.gradient_clipping", reason, "0 is for no clipping")
