"""State of a model with learners that a run saves in its checkpoints: global parameters, outer state, and the state of each learner."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarmtrain.trainer.checkpoint.training_state import TrainingState
from swarmtrain.trainer.diloco.optimizer import DilocoOptimizer


@dataclass(frozen=True)
class DilocoTrainingState(TrainingState):
    """State of a model, whose parameters are the global ones, and of its DilocoOptimizer."""

    optimizer: DilocoOptimizer

    @property
    def topology(self) -> Mapping[str, int]:
        return {**super().topology, "learners": self.optimizer.learner_count}

    def write_missing_values(self, loaded_names: Collection[str] = ()) -> None:
        super().write_missing_values(loaded_names)
        self.optimizer.start_learners({name.removeprefix("optimizer/") for name in loaded_names})
