"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import agreement, checks, replicas, shortage
from swarmtrain.trainer.checkpoint import Checkpoints, Progress, survive
from swarmtrain.trainer.checkpoint.rhythm import Rhythm
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.guard import Patience, StopFlag
from swarmtrain.trainer.metrics import Report
from swarmtrain.trainer.metrics.files import AuditFile
from swarmtrain.trainer.metrics.profile import Profile
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import Step, asked_to_leave, held_out_loss, make_step
from swarmtrain.trainer.watchdog import Watchdog
from swarmtrain.wire import EXIT_PLANNED


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

    `facts` join the event that says that the run is finished. When any rank has been asked to leave (SIGTERM), all save
    the same step and raise SystemExit(EXIT_PLANNED). When a rank dies, the others save the last step that is whole among them.
    Raises TrainingError if the run cannot go on, CheckpointError if it cannot be saved or taken up again.
    """
    config, last = here.config.trainer, here.config.trainer.train_iterations

    def held() -> dict[str, list[Tensor | None]]:
        parameters = list(model.parameters.values())
        gradients = [parameter.grad for parameter in parameters]
        return {"parameters": [*parameters], "gradients": gradients, "optimizer state": [*optimizer.moments().values()]}

    with Report(here) as report, StopFlag() as stop, Watchdog(here) as watchdog:
        _check_same_data(here, data, held_out)
        checkpoints = Checkpoints(here, model, optimizer, data.fingerprint, report.note)
        progress, path = checkpoints.restore()
        report.begins(progress.step, path, checkpoints.token, model)
        patience, profile = Patience(model.mesh.groups), Profile(here)
        audit = AuditFile(here.config.logger.audit_dir, checkpoints.token, here.rank)
        rhythm, to_be_saved = Rhythm(config, len(data), here.config.topology.global_batch), False
        loss = None
        made: Step | None = None
        with survive.outlived(here, model, optimizer, checkpoints, come=lambda: progress, saved=lambda step: report.catches_up(step, made)):
            if asked_to_leave(stop):
                _leave(checkpoints, progress, report, patience)
            while True:
                done = progress.step >= last
                measured = held_out is not None and (done or progress.loss_before is None or _due(progress.step, config.eval_interval))
                if held_out and measured:
                    loss = held_out_loss(here, model, held_out, None if done else stop)
                    if loss is None:
                        _leave(checkpoints, progress, report, patience)
                    report.evaluated(progress.step, loss)
                    progress = replace(
                        progress, held_out_loss=loss, loss_before=loss if progress.loss_before is None else progress.loss_before
                    )
                if done or to_be_saved or rhythm.due(progress.step, progress.consumed_samples, measured=measured):
                    _save(checkpoints, progress, report, patience, rhythm)
                if done:
                    break
                profile.before_step()
                begun, position, number = time.monotonic(), progress.consumed_samples, progress.step + 1
                wish = here.first and rhythm.wished
                with watchdog.step(number), checks.explained(number), shortage.told(f"step {number} on rank {here.rank}", held):
                    made = make_step(here, model, optimizer, data, position=position, number=number, stop=stop, save=wish)
                patience.step_took(time.monotonic() - begun)
                profile.after_step()
                audit.write(made)  # what survivors save has been recorded
                consumed, to_be_saved = position + here.config.topology.global_batch, made.to_be_saved
                progress = replace(progress, step=made.number, consumed_samples=consumed, held_out_loss=None)
                report.step(made)
                _tell(checkpoints, report, rhythm)
                if _due(made.number, config.check_replicas_interval):
                    replicas.check(here, model, optimizer, made.number)
                if made.asked_to_leave and made.number < last:
                    _leave(checkpoints, progress, report, patience)
            _stand(checkpoints, progress, report, patience)
        report.finished(progress.step, {"loss_before": progress.loss_before, "loss_after": loss, **facts})
        return Result(progress.step, progress.loss_before, loss)


def _due(step: int, interval: int | None) -> bool:
    return step > 0 and interval is not None and step % interval == 0


def _save(checkpoints: Checkpoints, progress: Progress, report: Report, patience: Patience, rhythm: Rhythm) -> None:
    if checkpoints.save_dir is None or checkpoints.saved == progress.step:
        return
    begun = time.monotonic()
    with patience.suspended():
        checkpoints.save(progress)
    rhythm.stood(time.monotonic() - begun)
    _tell(checkpoints, report, rhythm)


def _stand(checkpoints: Checkpoints, progress: Progress, report: Report, patience: Patience) -> None:
    with patience.suspended():
        checkpoints.stand(progress)
    _tell(checkpoints, report)


def _tell(checkpoints: Checkpoints, report: Report, rhythm: Rhythm | None = None) -> None:
    for saved in checkpoints.landed():
        report.saved(saved)
        if rhythm:
            rhythm.wrote(saved.seconds)


def _leave(checkpoints: Checkpoints, progress: Progress, report: Report, patience: Patience) -> NoReturn:
    if progress.step:
        _stand(checkpoints, progress, report, patience)
    report.leaves(progress.step)
    raise SystemExit(EXIT_PLANNED)


def _check_same_data(here: Runtime, data: Samples, held_out: Samples | None) -> None:
    prints = agreement.gather((here.node, data.fingerprint, held_out.fingerprint if held_out else ""))
    for node, *others in prints:
        if others != list(prints[0][1:]):
            raise TrainingError(
                f"{node} has other data than {prints[0][0]}", place="config data", hint="prepare it from the same source on every node"
            )
