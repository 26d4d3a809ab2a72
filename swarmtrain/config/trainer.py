"""`trainer`: how long to train, when to save, and what from."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from swarmtrain.config.base import Section


class TrainerConfig(Section):
    """How long to train, when to save, and what from."""

    train_iterations: int = Field(1000, ge=0, description="Optimizer steps in all, over every restart.")
    save_dir: Path | None = Field(None, description="Directory for checkpoints, one that every node sees. null: nothing is saved.")
    save_interval: int | None = Field(None, ge=1, description="Steps between checkpoints. null: only at the end and when asked to leave.")
    keep_checkpoints: int = Field(3, ge=1, description="Newest checkpoints to keep.")
    load_dir: Path | None = Field(None, description="Directory to start from if save_dir has no checkpoint yet.")
    eval_interval: int | None = Field(
        None, ge=1, description="Steps between held-out losses. null: only before the first and after the last."
    )
    eval_iterations: int = Field(10, ge=1, description="Global batches in one held-out loss.")
    seed: int = Field(42, ge=0, description="Seed of parameters and of the order of samples.")
