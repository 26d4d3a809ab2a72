"""What a run tells: log lines, events on the notice board, numbers for its sinks. The last two are rank 0's alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from swarmtrain import wire
from swarmtrain.trainer import started
from swarmtrain.trainer.checkpoint import Saved
from swarmtrain.trainer.determined import Trial
from swarmtrain.trainer.metrics import flops
from swarmtrain.trainer.metrics.board import Poster
from swarmtrain.trainer.metrics.files import finite
from swarmtrain.trainer.metrics.pace import Work
from swarmtrain.trainer.metrics.room import used_memory
from swarmtrain.trainer.metrics.sinks import Sinks, folder_of
from swarmtrain.trainer.metrics.sinks.lines import add_missing
from swarmtrain.trainer.metrics.sinks.texts import NAME, Sample
from swarmtrain.trainer.metrics.speed import Speed
from swarmtrain.trainer.metrics.stragglers import Stragglers, slower
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import HeldOut, Step
from swarmtrain.wire import Event

LOG = logging.getLogger("swarmtrain")
_FLUSH = 10.0


class Report:
    """One world's report. Use it as a context manager, so that what must not be lost is sent before the process ends."""

    def __init__(self, here: Runtime, trial: Trial) -> None:
        self._here, self._trial = here, trial
        self._steps = here.config.trainer.train_iterations
        self._poster = Poster(here.board) if here.first and here.board else None
        self._sinks = Sinks(trial)
        self._speed = Speed()
        self._stragglers = Stragglers()
        self._slowest: dict[str, Any] = {}
        """What the next line is to say of the slowest rank."""
        self._flops = 0
        """Floating point operations that a token costs."""
        self._peak: float | None = None
        """The most that a device makes in a second, if that is known."""
        self._replicas = 1
        self._memory: dict[str, int] = {}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        self._sinks.close()
        if self._poster:
            self._poster.close(_FLUSH)

    def begins(self, step: int, path: Path | None, token: int, model: ParallelModel) -> None:
        """World `token` trains `model` from `step` on, which stands at `path` (None: from nothing). Called by all ranks together.

        Raises TrainingError if a sink cannot be opened.
        """
        self._tell_what_runs(token, model)
        mesh = model.mesh
        LOG.info("world %d: ranks %d, replicas %d, parameters %s", token, self._here.size, mesh.data_size, f"{model.size:,}")
        if path:
            LOG.info("goes on after step %d, from %s", step, path)
            self._post(wire.RESUMED, step=step, path=str(path))
        config = self._here.config
        self._flops, self._replicas = flops.per_token(config.transformer_architecture, model.size), mesh.data_size
        if self._here.device.type == "cuda":
            self._peak = flops.peak(torch.cuda.get_device_name(self._here.device), config.transformer_architecture.precision)
        self._sinks.open(self._here, step)
        self._speed = Speed()

    def _tell_what_runs(self, token: int, model: ParallelModel) -> None:
        facts = started.gather(self._here, token, model)
        if not self._here.first:
            return
        for line in started.lines(facts):
            LOG.info("%s", line)
        if folder := folder_of(self._here):
            started.write(facts, folder)
        for node, told in started.by_node(facts):
            self._post(wire.REPORT, node=node, **told)

    def step(self, made: Step, parts: Mapping[str, float]) -> None:
        """An optimizer step is done, or has been skipped. `parts`: seconds that each part of a step took, of the last that is known."""
        step, update = made.number, made.update
        self._speed.step(made.tokens)
        speed, eta = self._speed.tokens_per_second, self._speed.eta(self._steps - step)
        values = {"loss": finite(made.loss), "learning_rate": update.learning_rate, "tokens_per_second": round(speed, 1)}
        more = self._more(made, speed, parts)
        shown = step % self._here.config.logger.log_interval == 0 or step == self._steps
        memory = used_memory(self._here.device) if shown else {}
        times = {f"{part}_seconds": round(seconds, 6) for part, seconds in {"step": sum(parts.values()), **parts}.items() if parts}
        self._sinks.write(
            {"step": step, **values, **more, **times, **{f"memory_{kind}": size for kind, size in memory.items()}, **self._slowest}
        )
        self._slowest = {}
        if self._poster:
            self._memory = memory or self._memory
            told = {"step": step, "steps": self._steps, **values, **more, "parts": parts, "memory": self._memory}
            self._poster.progress(Event(wire.PROGRESS, {**told, "eta_seconds": round(eta, 1)}))
        if shown or made.skipped:
            why = made.unsound or f"gradients overflow at loss scale {update.loss_scale or 1:g}"
            LOG.info(
                "step %*d/%d  loss %.4f%s  lr %.2e  grad norm %.2f  %s tokens/s%s  eta %s%s",
                len(str(self._steps)),
                step,
                self._steps,
                made.loss,
                _chosen(made.accuracy),
                update.learning_rate,
                update.gradient_norm,
                f"{speed:,.0f}",
                f"  mfu {more['mfu']:.1%}" if "mfu" in more else "",
                timedelta(seconds=round(eta)),
                f"  skipped: {why}" if made.skipped else "",
            )

    def _more(self, made: Step, speed: float, parts: Mapping[str, float]) -> dict[str, Any]:
        """Return the numbers of a step that stand beside loss and speed: those that there are."""
        update, size = made.update, self._here.size
        found: dict[str, Any] = {"gradient_norm": finite(update.gradient_norm), "tflops": round(speed * self._flops / 1e12, 4)}
        if made.accuracy is not None:
            found["accuracy"] = made.accuracy
        if self._replicas > 1:
            found["loss_max"] = finite(made.highest_loss)
        if size > 1:
            found["tokens_per_second_per_device"] = round(speed / size, 1)
        if self._peak:
            found["mfu"] = round(speed * self._flops / self._peak / size, 4)
        if len(update.learning_rates) > 1:
            found |= {f"learning_rate/{name}": rate for name, rate in update.learning_rates.items()}
        if update.loss_scale is not None:
            found |= {"loss_scale": update.loss_scale, "skipped": made.skipped}
        return found | ({"skipped": True} if made.skipped else {}) | ({"clipped": True} if update.clipped else {})

    def compared(self, everybody: list[Work] | None) -> None:
        """Ranks have compared how fast they are; None if it was not time to."""
        if not self._here.first or everybody is None:
            return
        found = slower(everybody)
        self._slowest = {"slowest_rank": found[0].rank, "slowest_by": round(found[0].by, 3)} if found else {"slowest_by": 0.0}
        if told := self._stragglers.judge(found):
            LOG.warning("%s", told.message)
            facts = asdict(told.slowest) if told.slowest else {"rank": None}
            self._post(wire.STRAGGLER, **facts, message=told.message)

    def catches_up(self, step: int, made: Step | None) -> None:
        """This rank has saved `step` for all. Rank 0 may have died before it wrote that step's line; `made` has it, if it is that step."""
        folder = folder_of(self._here)
        if folder and made and made.number == step:
            update = made.update
            values = {"loss": finite(made.loss), "learning_rate": update.learning_rate, "gradient_norm": finite(update.gradient_norm)}
            add_missing(folder, step, values)

    def evaluated(self, step: int, measured: HeldOut) -> None:
        """The held-out loss after `step` has been measured."""
        loss, accuracy = measured.loss, measured.accuracy
        LOG.info("step %*d/%d  held-out loss %.4f%s", len(str(self._steps)), step, self._steps, loss, _chosen(accuracy))
        chosen = {} if accuracy is None else {"held_out_accuracy": accuracy}
        self._sinks.write({"step": step, "held_out_loss": loss, **chosen})
        self._post(wire.EVALUATION, step=step, loss=loss)

    def sampled(self, step: int, samples: Sequence[Sample]) -> None:
        """After `step` the model has made of prompts what `samples` have."""
        for sample in samples:
            told = f"{sample['prompt']}{sample['text']}".replace("\n", "\\n")
            LOG.info("step %*d/%d  says: %s", len(str(self._steps)), step, self._steps, told)
        if samples:
            self._sinks.write({"step": step, NAME: samples})

    def saved(self, checkpoint: Saved) -> None:
        """A checkpoint stands."""
        if self._here.first:
            step, seconds = checkpoint.step, checkpoint.seconds
            told = f"saved {checkpoint.path} in {seconds:.2f} s; training stood still for {checkpoint.stood:.2f} s"
            LOG.info("step %*d/%d  %s", len(str(self._steps)), step, self._steps, told)
            self._post(wire.CHECKPOINT, step=step, path=str(checkpoint.path), seconds=round(seconds, 3))

    def note(self, message: str) -> None:
        """Something that a person should know."""
        if self._here.first:
            LOG.warning("%s", message)
            self._post(wire.NOTE, node=self._here.node, message=message)

    def leaves(self, step: int) -> int:
        """All ranks leave after `step`, as they were asked to. Return the exit code with which. Called by all ranks together."""
        LOG.info("asked to leave: stops after step %d", step)
        return self._trial.leaves()

    def finished(self, step: int, values: dict[str, Any]) -> None:
        """The last step is done and saved."""
        self._post(wire.FINISHED, step=step, **values)

    def _post(self, kind: str, **data: Any) -> None:
        if self._poster:
            self._poster.post(Event(kind, data))


def _chosen(accuracy: float | None) -> str:
    """Return what a line says of `accuracy`, behind a loss."""
    return "" if accuracy is None else f"  accuracy {accuracy:.1%}"
