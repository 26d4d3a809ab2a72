"""Training objectives that the config can select.

language_model   next-token prediction
preference       direct preference optimization (DPO) on pairs of responses
contrastive      text embeddings, compared over a whole global batch

trainer/model/objective.py defines the interface.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.model.objective import EmbeddingObjective, LanguageModelObjective, Objective
from swarmtrain.trainer.object_factory import instantiate
from swarmtrain.trainer.objectives.contrastive import ContrastiveObjective
from swarmtrain.trainer.objectives.preference import PreferenceObjective

_OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "preference_config": PreferenceObjective,
    "contrastive_config": ContrastiveObjective,
    "objective_config": instantiate,
}
"""For each section of `trainer` that selects an objective, the function that builds it from the section. At most one is set."""


def build_objective(config: Config) -> Objective:
    """Return the objective that `config` selects.

    Raises TrainingError if trainer.objective_config does not create an Objective, or if it is incompatible with the model or the topology.
    """
    for name, build in _OBJECTIVES.items():
        if (section := getattr(config.trainer, name)) is not None:
            objective = build(section)
            _check_objective(objective, config, f"config trainer.{name}")
            return objective
    return LanguageModelObjective()


def _check_objective(objective: object, config: Config, place: str) -> None:
    """Raise TrainingError if `objective` is not an Objective, or is incompatible with the model or the topology."""
    if not isinstance(objective, Objective):
        raise TrainingError(
            f"{type(objective).__name__} is not an Objective", place=place, hint="derive the class from swarmtrain.trainer.Objective"
        )
    has_vectors = config.transformer_architecture.embedding_head_config is not None
    if isinstance(objective, EmbeddingObjective) != has_vectors:
        needed, state = ("logits", "set") if has_vectors else ("vectors", "null")
        raise TrainingError(f"needs {needed}, but transformer_architecture.embedding_head_config is {state}", place=place)
    if not objective.is_sum_over_tokens and config.topology.context_parallel_size > 1:
        raise TrainingError("does not support topology.context_parallel_size above 1: it needs full sequences", place=place)
