"""`trainer`: how long to train, when to save, and what from."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from swarmtrain.config.base import Patterns, Section, wrong
from swarmtrain.config.contrastive import ContrastiveConfig
from swarmtrain.config.interval import AUTO, IntervalText
from swarmtrain.config.preference import PreferenceConfig
from swarmtrain.config.sampling import SamplingConfig
from swarmtrain.config.tensor_statistics import TensorStatisticsRecorderConfig


def _several(value: object) -> object:
    """Return one folder, or none, as several."""
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


Folders = Annotated[tuple[Path, ...], BeforeValidator(_several)]


class Deterministic(StrEnum):
    """What becomes of operations whose result differs from run to run."""

    ignore = "ignore"
    prefer = "prefer"
    require = "require"


class NonFinite(StrEnum):
    """What becomes of a run in which a loss or a gradient is no number."""

    stop = "stop"
    skip = "skip"
    roll_back = "roll_back"


class Best(StrEnum):
    """Which of several numbers is best."""

    lowest = "lowest"
    highest = "highest"


class TrainerConfig(Section):
    """How long to train, when to save, and what from."""

    train_iterations: int = Field(1000, ge=0, description="Optimizer steps in all, over every restart.")
    save_dir: Path | None = Field(
        None, description="Directory for checkpoints, one that every node sees unless save_dir_shared is false. null: nothing is saved."
    )
    save_dir_shared: bool = Field(
        True,
        description="false: save_dir is a folder of each node's own, on its own disk. Each then has a whole copy of every checkpoint.",
    )
    save_interval: IntervalText = Field(
        AUTO,
        description="Steps between checkpoints, or as '10 minutes', '2 hours', '1 epoch'. auto: by what one costs, so that training stands "
        "still for less than a hundredth of the time. null: only at the end and when asked to leave.",
    )
    save_in_background: bool = Field(
        True, description="Train on while a checkpoint is written. It takes memory of the host's, as much as a rank's part of it."
    )
    keep_checkpoints: int = Field(3, ge=1, description="Newest checkpoints to keep.")
    keep_best_checkpoints: int = Field(
        0, ge=0, description="Beside them, so many with the lowest held-out loss: one is saved after each that is measured."
    )
    best_checkpoints_are: Best = Field(
        Best.lowest, description="Which are best: lowest, of a loss; highest, where a script of your own measures a score."
    )
    keep_checkpoints_every: int | None = Field(
        None, ge=1, description="Beside them, all whose step is a multiple of this: one is saved at each. null: none."
    )
    load_dir: Folders = Field(
        (),
        description="Directory to start from if save_dir has no checkpoint yet; or several, of which the first that has a parameter "
        "gives it, and the first of all says how far the run is.",
    )
    load_optimizer_states: bool = Field(True, description="Take the optimizer's state from load_dir too. false: parameters alone.")
    load_context: bool = Field(True, description="Take step and place in the data from load_dir too. false: begin at step 0.")
    init_from: Path | None = Field(
        None,
        description="Folder of a model as Hugging Face has it, config.json and safetensors, or of a checkpoint: a new run begins with its "
        "weights. Every start reads it, so leave it there. null: with noise.",
    )
    finetunable_parameters: Patterns | None = Field(
        None,
        description="Regular expressions searched in parameter names: what they match is trained, and all else stays as it is. null: all; "
        "with lora_config or adapter_config, what belongs to these; with finetunable_token_ids alone, the embedding.",
    )
    finetunable_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (),
        description="Of the embedding, and of the output layer where weight_tying makes it the same, the rows of these tokens alone are "
        "trained, without weight decay. []: all, if any.",
    )
    preference_config: PreferenceConfig | None = Field(
        None,
        description="Learn from pairs of answers, data.data_prefixes and data.rejected_prefixes, by DPO; {} for the usual. What is tuned "
        "stands beside a model (lora_config, adapter_config), with which it is compared. null: learn what the data say.",
    )
    contrastive_config: ContrastiveConfig | None = Field(
        None,
        description="Learn which of data.positive_prefixes is the answer to each of data.data_prefixes; {} for the usual. It needs "
        "transformer_architecture.embedding_head_config. null: learn to go on.",
    )
    save_frozen_parameters: bool = Field(
        True,
        description="false: checkpoints have what is trained alone, and the rest is read from init_from at every start.",
    )
    ignore_keys_in_checkpoint: Patterns = Field(
        (), description="Regular expressions searched in parameter names: what they match is not taken from load_dir."
    )
    allowed_missing_keys_in_checkpoint: Patterns = Field(
        (), description="Regular expressions: parameters that load_dir may lack. They begin as in a new run."
    )
    allowed_unexpected_keys_in_checkpoint: Patterns = Field(
        (), description="Regular expressions: parameters that load_dir may have and the model has not."
    )
    eval_interval: int | None = Field(
        None, ge=1, description="Steps between held-out losses. null: only before the first and after the last."
    )
    eval_iterations: int = Field(10, ge=1, description="Global batches in one held-out loss.")
    check_replicas_interval: int | None = Field(
        None,
        ge=1,
        description="Steps between checks that all replicas have the same parameters and optimizer state, bit for bit. null: none. "
        "What divides save_interval keeps a difference out of checkpoints.",
    )
    non_finite: NonFinite = Field(
        NonFinite.stop,
        description="When a loss or a gradient is no number. stop: end the run. skip: leave out the step, which changes nothing. "
        "roll_back: begin again at the newest checkpoint, and leave out the batch. In save_dir stands which samples it had.",
    )
    non_finite_steps: int = Field(10, ge=1, description="With skip: so many such steps in a row end the run.")
    detect_anomaly: bool = Field(
        False, description="End the run at the operation whose gradient is no number, and show where it was called. Slow: for a search."
    )
    deterministic: Deterministic = Field(
        Deterministic.prefer,
        description="Operations that give the same result in every run. ignore: the fastest. prefer: these, on GPUs, where there are some. "
        "require: nothing else.",
    )
    compile: bool = Field(
        False,
        description="Compile the blocks by torch.compile: faster steps, and a first one that takes a minute longer, or seconds if "
        "docker_config.cache_dir has what an earlier run compiled. Needs a C++ compiler in the image, and Triton on GPUs.",
    )
    loss_chunk_size: int = Field(
        2048,
        ge=1,
        description="Tokens of a micro batch whose logits are there at a time. Fewer need less memory, and very few are slow. "
        "In float16 all are, whose small gradients need the loss's scale.",
    )
    sampling_config: SamplingConfig | None = Field(
        None, description="Let the model go on from some prompts now and then, into the log and all places that metrics go to. null: never."
    )
    tensor_statistics_recorder_config: TensorStatisticsRecorderConfig | None = Field(
        None, description="Figures of weights, activations and gradients. {}: the usual ones every 100 steps. null: none."
    )
    seed: int = Field(42, ge=0, description="Seed of parameters and of the order of samples.")

    @model_validator(mode="after")
    def _there_is_somewhere_to_go_back_to(self) -> TrainerConfig:
        if self.non_finite is NonFinite.roll_back and self.save_dir is None:
            raise wrong("non_finite", "there is nothing to go back to: save_dir is null", "trainer.save_dir: runs/mine")
        return self

    @model_validator(mode="after")
    def _begins_with_one(self) -> TrainerConfig:
        if self.init_from is not None and self.load_dir:
            raise wrong("init_from", "load_dir gives the weights already", "leave out one of the two")
        return self

    @model_validator(mode="after")
    def _the_rest_is_somewhere(self) -> TrainerConfig:
        if not self.save_frozen_parameters and self.init_from is None:
            raise wrong("save_frozen_parameters", "the rest would be nowhere: init_from is null", "trainer.init_from: a model's folder")
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> TrainerConfig:
        if self.keep_best_checkpoints and self.eval_interval is None:
            raise wrong("keep_best_checkpoints", "nothing is measured on the way: eval_interval is null", "trainer.eval_interval: 100")
        return self
