"""Checkpoints as training goes: when they are due, when ranks are asked to leave, at the end; and who is told of them."""

from __future__ import annotations

import time
from typing import NoReturn

from swarmtrain.trainer.checkpoint import Checkpoints, Progress
from swarmtrain.trainer.checkpoint.rhythm import Rhythm
from swarmtrain.trainer.guard import Patience
from swarmtrain.trainer.metrics import Report


class Saving:
    """Saves into the run's save_dir, if it has one. All methods but `wished` and `tell` are called by all ranks together."""

    def __init__(self, checkpoints: Checkpoints, rhythm: Rhythm, patience: Patience, report: Report) -> None:
        self._checkpoints, self._rhythm, self._patience, self._report = checkpoints, rhythm, patience, report

    @property
    def wished(self) -> bool:
        """Whether a checkpoint is due by this rank's clock, which all are to learn at the end of the next step."""
        return self._rhythm.wished

    def save_if_due(self, progress: Progress, *, wished: bool) -> None:
        """Begin a checkpoint if one is due, as some rank wished or after this step, and there is none of it.

        Raises what Checkpoints.save does.
        """
        due = wished or self._rhythm.due(progress.step, progress.consumed_samples, measured=progress.held_out_loss is not None)
        if not due or self._checkpoints.save_dir is None or self._checkpoints.saved == progress.step:
            return
        begun = time.monotonic()
        with self._patience.suspended():
            self._checkpoints.save(progress)
        self._rhythm.stood(time.monotonic() - begun)
        self.tell()

    def stand(self, progress: Progress) -> None:
        """Return when the checkpoint of this step stands. Raises what Checkpoints.stand does."""
        with self._patience.suspended():
            self._checkpoints.stand(progress)
        self.tell()

    def tell(self) -> None:
        """Report what has come to stand since this was last called."""
        for saved in self._checkpoints.landed():
            self._report.saved(saved)
            self._rhythm.wrote(saved.seconds)

    def leave(self, progress: Progress) -> NoReturn:
        """Save what there is, and end this rank as planned."""
        if progress.step:
            self.stand(progress)
        with self._patience.suspended():
            code = self._report.leaves(progress.step)
        raise SystemExit(code)
