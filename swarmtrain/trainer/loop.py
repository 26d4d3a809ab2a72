"""The training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import agreement, replicas
from swarmtrain.trainer.attended import Attended
from swarmtrain.trainer.checkpoint import Checkpoints, survive
from swarmtrain.trainer.checkpoint.held import Trained
from swarmtrain.trainer.checkpoint.restore import restore
from swarmtrain.trainer.checkpoint.rhythm import Rhythm
from swarmtrain.trainer.data import vocabulary
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.determined import Trial
from swarmtrain.trainer.guard import Patience, StopFlag
from swarmtrain.trainer.metrics import Report
from swarmtrain.trainer.metrics.files import AuditFile
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parts import CHECKPOINT, EVALUATION, LOGGING
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.saving import Saving
from swarmtrain.trainer.soundness import Soundness
from swarmtrain.trainer.step import Step, asked_to_leave, evaluate, make_step
from swarmtrain.trainer.use.meanwhile import Sampling


@dataclass(frozen=True)
class Result:
    """How a finished run ended: held-out losses in nats per token, None without held-out data."""

    step: int
    loss_before: float | None
    loss_after: float | None


def train(
    here: Runtime, model: ParallelModel, optimizer: Optimizer, data: Samples, held_out: Samples | None, *, facts: Mapping[str, Any]
) -> Result:
    """Train to the config's last step, from the newest checkpoint on. Called by all ranks together.

    `facts` join the event that says that the run is finished. When any rank has been asked to leave (SIGTERM, or a trial's
    master), all save the same step and raise SystemExit(EXIT_PLANNED); with 0 if the master has been told that there is more
    to train. When a rank dies, the others save the last step that is whole among them.
    Raises TrainingError if the run cannot go on, CheckpointError if it cannot be saved or taken up again.
    """
    config, last = here.config.trainer, here.config.trainer.train_iterations
    patience, trial = Patience(model.mesh.groups), Trial(here)
    with Report(here, trial) as report, StopFlag(trial.asks) as stop, Attended(here, model, optimizer, patience) as attended:
        _check_same_data(here, data, held_out)
        trained = Trained(model, optimizer, apart=not config.save_frozen_parameters)
        checkpoints = Checkpoints(here, trained, data.fingerprint, report.note)
        progress, path = restore(here, checkpoints, trained, data.fingerprint, report.note)
        _begin(here, data, held_out, lambda: report.begins(progress.step, path, checkpoints.token, model))
        saving = Saving(checkpoints, Rhythm(config, len(data), here.config.topology.global_batch), patience, report)
        soundness, sampling = Soundness(here), Sampling(here, model)
        parts = attended.measures(data, progress.step)
        audit = AuditFile(here.config.logger.audit_dir, checkpoints.token, here.rank)
        made: Step | None = None
        loss = None
        with survive.outlived(here, model, optimizer, checkpoints, come=lambda: progress, saved=lambda step: report.catches_up(step, made)):
            if asked_to_leave(stop):
                saving.leave(progress)
            while True:
                done = progress.step >= last
                if held_out and (done or progress.loss_before is None or _due(progress.step, config.eval_interval)):
                    with parts.of(EVALUATION):
                        measured = evaluate(here, model, held_out, None if done else stop)
                    if measured is None:
                        saving.leave(progress)
                    loss = measured.loss
                    progress = progress.measured(loss)
                    report.evaluated(progress.step, measured)
                report.sampled(progress.step, sampling.samples(progress.step, parts, done=done))
                if done:
                    break
                with parts.of(CHECKPOINT):
                    saving.save_if_due(progress, wished=made is not None and made.to_be_saved)
                progress = soundness.past(progress)
                position, number, wish = progress.consumed_samples, progress.step + 1, here.first and saving.wished
                with attended.step(number):
                    made = make_step(
                        here,
                        model,
                        optimizer,
                        data,
                        position=position,
                        number=number,
                        stop=stop,
                        save=wish,
                        parts=parts,
                        passed=attended.passed,
                    )
                    soundness.judge(made, position, data)
                audit.write(made)  # what survivors save has been recorded
                progress = progress.after(number, position + here.config.topology.global_batch)
                with parts.of(LOGGING):
                    report.step(made, attended.taken)
                report.compared(attended.compared())
                saving.tell()
                if _due(number, config.check_replicas_interval):
                    replicas.check(here, model, optimizer, number)
                if made.asked_to_leave and number < last:
                    saving.leave(progress)
            saving.stand(progress)
        report.finished(progress.step, {"loss_before": progress.loss_before, "loss_after": loss, **facts})
        return Result(progress.step, progress.loss_before, loss)


def _begin(here: Runtime, data: Samples, held_out: Samples | None, tell: Callable[[], None]) -> None:
    """Look through the data, now that it is known whose they are, and tell that it begins. Raises DataError, TrainingError."""
    vocabulary.look_through(here, [*data.files, *(held_out.files if held_out else ())])
    tell()


def _due(step: int, interval: int | None) -> bool:
    return step > 0 and interval is not None and step % interval == 0


def _check_same_data(here: Runtime, data: Samples, held_out: Samples | None) -> None:
    """Raise TrainingError if ranks have different data."""
    prints = agreement.gather((data.fingerprint, held_out.fingerprint if held_out else "", here.node))
    for rank, (*others, node) in enumerate(prints):
        if others != list(prints[0][:-1]):
            raise TrainingError(
                f"rank {rank} on {node} has other data than rank 0 on {prints[0][-1]}",
                place="config data",
                hint="prepare it from the same source on every node",
            )
