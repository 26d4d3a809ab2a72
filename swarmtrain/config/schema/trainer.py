"""`trainer`: training length, checkpoints, initialization and evaluation."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from swarmtrain.config.schema.fields.interval import AUTO, IntervalText
from swarmtrain.config.schema.objectives import ContrastiveConfig, PreferenceConfig
from swarmtrain.config.schema.section import RegexPatterns, Section, build_field_error
from swarmtrain.config.schema.tensor_statistics import TensorStatisticsRecorderConfig


def _parse_paths(value: object) -> object:
    """Return the config value `value` as a tuple of paths: a single path becomes a tuple of one, None an empty tuple."""
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


PathList = Annotated[tuple[Path, ...], BeforeValidator(_parse_paths, json_schema_input_type=tuple[Path, ...] | Path | None)]


class DeterminismMode(StrEnum):
    """How to handle nondeterministic operations, whose results differ from run to run."""

    ignore = "ignore"
    prefer = "prefer"
    require = "require"


class AttentionKernel(StrEnum):
    """Kernels for attention to a window or to documents."""

    auto = "auto"
    flex = "flex"
    dense = "dense"


class FrozenPrecision(StrEnum):
    """Data types of frozen parameters."""

    working = "working"
    float32 = "float32"


class NonFiniteAction(StrEnum):
    """How to handle a NaN or Inf loss or gradient."""

    stop = "stop"
    skip = "skip"
    roll_back = "roll_back"


class BestCheckpointMode(StrEnum):
    """Whether the lowest or the highest value of the metric marks the best checkpoint."""

    min = "min"
    max = "max"


class SamplingConfig(Section):
    """Prompts that the model completes at intervals during training."""

    prompts: tuple[str, ...] = Field(min_length=1, description="Prompts to complete.")
    interval: int = Field(500, ge=1, description="Steps between generations. Text is also generated after the last step.")
    max_tokens: int = Field(64, ge=1, description="Maximum number of generated tokens per prompt.")
    temperature: float = Field(
        0.8, ge=0, description="Sampling temperature. Above 1: more random; below 1: less random; 0: greedy decoding."
    )
    top_k: int = Field(0, ge=0, description="Sample from the k most likely tokens only. 0: from all tokens.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling: sample from the most likely tokens with this cumulative probability. 1: from all tokens.",
    )
    chat: bool = Field(
        False, description="Each prompt is a user's message: it is rendered with the chat template of the data, else of the tokenizer."
    )
    tokenizer: str | None = Field(
        None,
        description="Path of a tokenizer.json that every node can read, or bytes. null: the tokenizer recorded with "
        "data.data_prefixes, else bytes if vocab_size allows only these.",
    )


class TrainerConfig(Section):
    """Training length, checkpoints, initialization and evaluation."""

    train_iterations: int = Field(1000, ge=0, description="Total number of optimizer steps, across restarts.")
    save_dir: Path | None = Field(
        None, description="Checkpoint directory, visible to every node unless save_dir_shared is false. null: no checkpoints."
    )
    save_dir_shared: bool = Field(
        True,
        description="false: save_dir is local to each node, on its own disk. Each node then has a full copy of every checkpoint.",
    )
    save_interval: IntervalText = Field(
        AUTO,
        description="Steps between checkpoints, or a time or epochs, as '10 minutes', '2 hours', '1 epoch'. auto: by the "
        "cost of a checkpoint, so that training is stalled for less than 1 % of the time. null: only at the "
        "end and when a stop is requested.",
    )
    save_in_background: bool = Field(
        True, description="Continue training while a checkpoint is written. Takes as much host memory as the rank's part of the checkpoint."
    )
    keep_checkpoints: int = Field(3, ge=1, description="Number of newest checkpoints to keep.")
    keep_best_checkpoints: int = Field(
        0, ge=0, description="Number of best checkpoints to keep in addition, by validation loss: one is saved after every validation."
    )
    best_checkpoint_mode: BestCheckpointMode = Field(
        BestCheckpointMode.min, description="Which checkpoints are best: min for a loss; max if a custom script reports a score."
    )
    keep_checkpoints_every: int | None = Field(
        None, ge=1, description="Save a checkpoint at each multiple of this many steps, and keep all of these in addition. null: none."
    )
    load_dir: PathList = Field(
        (),
        description="Checkpoint directory to start from if save_dir has no checkpoint yet. With several, each parameter "
        "comes from the first that has it, and the step from the first of all.",
    )
    load_optimizer_states: bool = Field(True, description="Load the optimizer state from load_dir, too. false: parameters only.")
    load_context: bool = Field(True, description="Load step and data position from load_dir, too. false: start at step 0.")
    init_from: Path | None = Field(
        None,
        description="Folder of a Hugging Face model (config.json and safetensors) or of a checkpoint to initialize a new "
        "run's weights from. Every start reads it, so keep it in place. null: random initialization.",
    )
    finetunable_parameters: RegexPatterns | None = Field(
        None,
        description="Regular expressions, searched in parameter names: matches are trained, all others are frozen. null: "
        "all; with lora_config or adapter_config, the adapters; with only finetunable_token_ids, the "
        "embedding.",
    )
    finetunable_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (),
        description="Train only these tokens' rows of the embedding (and of the output layer with weight_tying), without "
        "weight decay. []: all rows, if the embedding is trained.",
    )
    preference_config: PreferenceConfig | None = Field(
        None,
        description="Preference tuning (DPO) on pairs from data.data_prefixes and data.rejected_prefixes; {} for the "
        "defaults. Trains an adapter (lora_config, adapter_config); the model without it is the reference "
        "model. null: next-token prediction.",
    )
    contrastive_config: ContrastiveConfig | None = Field(
        None,
        description="Contrastive embedding training: match each text of data.data_prefixes with its text in "
        "data.positive_prefixes; {} for the defaults. Needs transformer_architecture.embedding_head_config. "
        "null: next-token prediction.",
    )
    objective_config: dict[str, Any] | None = Field(
        None,
        description="Custom objective, such as {_target_: my_module.FocalLoss, gamma: 2.0}: _target_ is the dotted path of a class "
        "derived from swarmtrain.trainer.Objective, the other keys are its arguments. The module is one of runner.code or "
        "of the image. null: next-token prediction.",
    )
    save_frozen_parameters: bool = Field(
        True,
        description="false: checkpoints have only trained parameters; frozen ones are read from init_from at every start.",
    )
    frozen_precision: FrozenPrecision = Field(
        FrozenPrecision.working,
        description="Data type of frozen parameters. working: transformer_architecture.precision, in which the model computes with them "
        "anyway; with bfloat16 they take 2 bytes each, not 6. float32: as those that are trained, so that checkpoints and exports have the "
        "values of init_from unrounded, if these are float32.",
    )
    ignore_keys_in_checkpoint: RegexPatterns = Field(
        (), description="Regular expressions, searched in parameter names: matches are not loaded from load_dir."
    )
    allowed_missing_keys_in_checkpoint: RegexPatterns = Field(
        (), description="Regular expressions: parameters that may be missing in load_dir. They are initialized as in a new run."
    )
    allowed_unexpected_keys_in_checkpoint: RegexPatterns = Field(
        (), description="Regular expressions: parameters that load_dir may have although the model does not."
    )
    eval_interval: int | None = Field(
        None, ge=1, description="Steps between validations. null: only before the first and after the last step."
    )
    eval_iterations: int = Field(10, ge=1, description="Global batches per validation.")
    check_replicas_interval: int | None = Field(
        None,
        ge=1,
        description="Steps between checks that all replicas have bitwise identical parameters and optimizer state. null: "
        "no checks. A divisor of save_interval keeps a divergence out of checkpoints.",
    )
    non_finite: NonFiniteAction = Field(
        NonFiniteAction.stop,
        description="On NaN or Inf loss or gradient. stop: end the run. skip: skip the step, without an update. "
        "roll_back: restart from the newest checkpoint and skip the batch. The batch's sample ids are "
        "recorded in save_dir. Custom scripts update by themselves: stop is decided by the metric named loss, skip only counts, and "
        "roll_back is rejected.",
    )
    non_finite_steps: int = Field(10, ge=1, description="With non_finite: skip, consecutive non-finite steps that end the run.")
    detect_anomaly: bool = Field(
        False,
        description="torch autograd anomaly detection: end the run at the operation whose gradient is NaN, and show "
        "where it was called. Slow; for debugging.",
    )
    deterministic: DeterminismMode = Field(
        DeterminismMode.prefer,
        description="Deterministic operations. ignore: the fastest operations. prefer: deterministic ones on GPUs if "
        "there are any, except for gradients of attention, which torch may sum in any order. require: only deterministic ones, so that a "
        "resumed run equals an uninterrupted one bit for bit; an error if an operation has none.",
    )
    compile: bool | None = Field(
        None,
        description="Compile the blocks, the output layer and the loss with torch.compile. The first step takes about 60 s longer, or a "
        "few seconds if docker_config.cache_dir has the compilation cache of an earlier run. Needs a C++ compiler in the "
        "image, and Triton on GPUs. null: on GPUs, unless something is missing, which is logged.",
    )
    attention_kernel: AttentionKernel = Field(
        AttentionKernel.auto,
        description="Kernel for windows, documents and context parallelism on GPUs. auto: flash attention on segments (varlen_attn), if "
        "precision is bfloat16 or float16. flex: flex attention, which needs a C++ compiler in the image, and supports "
        "attention_softcap. dense: masks of one byte per pair of tokens, at most 64 MiB at a time; also used where the chosen kernel "
        "cannot be.",
    )
    loss_chunk_size: int | None = Field(
        None,
        ge=1,
        description="Tokens of a micro batch whose logits are in memory at a time. Fewer need less memory; very few are slow. null: 2048, "
        "or as many as have 2^28 logits, rounded down to a power of two: 4096 for a vocabulary of 50,000, 8192 for one of 32,000. Ignored "
        "with float16, which keeps all logits, as small gradients need the loss scale.",
    )
    sampling_config: SamplingConfig | None = Field(
        None, description="Generate text from fixed prompts during training, into the log and all metrics sinks. null: never."
    )
    tensor_statistics_recorder_config: TensorStatisticsRecorderConfig | None = Field(
        None, description="Record statistics of weights, activations and gradients. {}: the default ones every 100 steps. null: none."
    )
    seed: int = Field(42, ge=0, description="Seed of parameter initialization and sample order.")

    @model_validator(mode="after")
    def _check_custom_objective(self) -> TrainerConfig:
        if self.objective_config is None:
            return self
        if not isinstance(self.objective_config.get("_target_"), str):
            raise build_field_error(
                "objective_config", "has no _target_", "set it to the dotted path of a class, such as my_module.FocalLoss"
            )
        for name in ("preference_config", "contrastive_config"):
            if getattr(self, name) is not None:
                raise build_field_error("objective_config", f"{name} is set, too: a run has one objective", "remove one of the two")
        return self

    @model_validator(mode="after")
    def _check_rollback_needs_save_dir(self) -> TrainerConfig:
        if self.non_finite is NonFiniteAction.roll_back and self.save_dir is None:
            raise build_field_error(
                "non_finite", "cannot roll back without checkpoints: save_dir is null", "set trainer.save_dir, such as runs/mine"
            )
        return self

    @model_validator(mode="after")
    def _check_single_weight_source(self) -> TrainerConfig:
        if self.init_from is not None and self.load_dir:
            raise build_field_error("init_from", "load_dir already provides the weights", "remove one of the two")
        return self

    @model_validator(mode="after")
    def _check_frozen_parameters(self) -> TrainerConfig:
        if not self.save_frozen_parameters and self.init_from is None:
            raise build_field_error(
                "save_frozen_parameters",
                "frozen parameters would not be saved anywhere: init_from is null",
                "set trainer.init_from to a model folder",
            )
        return self

    @model_validator(mode="after")
    def _check_best_checkpoints(self) -> TrainerConfig:
        if self.keep_best_checkpoints and self.eval_interval is None:
            raise build_field_error(
                "keep_best_checkpoints",
                "there is no validation during training: eval_interval is null",
                "set trainer.eval_interval, such as 100",
            )
        return self
