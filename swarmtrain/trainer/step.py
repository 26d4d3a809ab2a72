"""One optimizer step, and one held-out loss: what ranks exchange about their passes, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarmtrain.trainer import agreement, checks
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.optim import Optimizer, Update
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parts import COMMUNICATION, DATA, LOGGING, OPTIMIZER, OTHER, Parts
from swarmtrain.trainer.passes import Dealt, held_out_passes, passes
from swarmtrain.trainer.runtime import Runtime


@dataclass(frozen=True)
class HeldOut:
    """What held-out data have come to, the same on every rank."""

    loss: float
    """Mean over what counted, tokens, pairs or queries, in nats."""
    accuracy: float | None
    """See Step.accuracy."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step has come to, the same on every rank but for `samples`."""

    number: int
    """The first is 1."""
    samples: tuple[int, ...]
    """Ids of the samples that this rank's replica had."""
    tokens: int
    """Tokens that counted, all replicas together."""
    loss: float
    """Mean over these tokens, in nats."""
    accuracy: float | None
    """The part of pairs, or of queries, whose right answer is the likeliest; None if the loss is no choice."""
    highest_loss: float
    """That of the replica whose tokens have the highest, in nats."""
    update: Update
    """What was made of the gradients."""
    asked_to_leave: bool
    """True if any rank has been."""
    to_be_saved: bool = False
    """True if any rank wished so."""
    unsound: str = ""
    """What of it was no number, if anything was: then it was skipped."""

    @property
    def skipped(self) -> bool:
        """True if nothing was changed: gradients overflowed at the loss scale, or something was no number."""
        return self.update.skipped


def make_step(
    here: Runtime,
    model: ParallelModel,
    optimizer: Optimizer,
    data: Samples,
    *,
    position: int,
    number: int,
    stop: StopFlag,
    save: bool = False,
    parts: Parts | None = None,
    passed: Callable[[], None] | None = None,
) -> Step:
    """Make optimizer step `number` with the global batch that begins at `position`. `save`: this rank wishes it to be saved.

    A step whose loss or gradient is no number changes nothing. `parts` is told what begins, and `passed` is
    called when the gradients are summed.
    """
    topology, mesh = here.config.topology, model.mesh
    parts = parts or Parts(here.device)
    parts.begins(DATA)
    batch, following = (data.batch(first, topology.global_batch) for first in (position, position + topology.global_batch))
    mine, ahead = (each.dealt(mesh.shares, mesh.data_rank, topology.micro_batch) for each in (batch, following))
    for _, ids in ahead:
        data.expect(ids)  # read from the disk while this step is computed
    counted = max(1, batch.counted)  # none, if the loss mask has none in these samples
    sums = passes(here, model, data, mine, number=number, scaled=lambda loss: optimizer.scaled(loss / counted), parts=parts)
    if passed:
        with parts.of(LOGGING):
            passed()
    parts.begins(OPTIMIZER)
    update = optimizer.prepare(number, *sums)
    # The last thing for which ranks need each other comes before the first that is changed: who gets through it completes
    # the step, and a peer that dies before leaves the last step whole.
    parts.begins(COMMUNICATION)
    loss_sum, right = update.beside
    means = _in_its_place(model, data, mine, loss_sum)
    (loss_sum, right, *means), (asked, to_be_saved) = _exchange(model, [loss_sum, right, *means], stop.raised, save)
    mean = loss_sum / counted
    parts.begins(OPTIMIZER)
    unsound = "" if update.skipped else _unsound(mean, update)
    if unsound:
        update = optimizer.skip()
    parts.begins(OPTIMIZER)
    optimizer.step(number)
    parts.begins(OTHER)
    samples = tuple(int(sample) for _, ids in mine for sample in ids)
    return Step(
        number,
        samples,
        batch.tokens,
        mean,
        _accuracy(here, right / counted),
        max(means),
        update,
        asked_to_leave=asked,
        to_be_saved=to_be_saved,
        unsound=unsound,
    )


@torch.no_grad()
def evaluate(here: Runtime, model: ParallelModel, data: Samples, stop: StopFlag | None) -> HeldOut | None:
    """Return what the first `eval_iterations` global batches of `data` come to.

    None if `stop` is given and any rank has been asked to leave meanwhile.
    """
    topology, mesh = here.config.topology, model.mesh
    loss, right, counted = 0.0, 0.0, 0
    count = min(topology.global_batch * here.config.trainer.eval_iterations, len(data))
    for position in range(0, count, topology.global_batch):
        batch = data.batch(position, topology.global_batch)
        model.local.eval()
        sums = held_out_passes(here, model, data, batch.dealt(mesh.shares, mesh.data_rank, topology.micro_batch))
        model.local.train()
        (loss_sum, more), (asked,) = _exchange(model, [float(each) for each in sums], stop is not None and stop.raised)
        if asked:
            return None
        loss, right, counted = loss + loss_sum, right + more, counted + batch.counted
    counted = max(1, counted)
    return HeldOut(loss / counted, _accuracy(here, right / counted))


def asked_to_leave(stop: StopFlag) -> bool:
    """Return, on every rank alike, whether any rank has been asked to leave."""
    return agreement.totals([stop.raised])[0] > 0


def _accuracy(here: Runtime, right: float) -> float | None:
    chooses = here.config.trainer.preference_config or here.config.trainer.contrastive_config
    return right if chooses else None


def _unsound(loss: float, update: Update) -> str:
    """Say what of a step is no number, if anything is. Called by all ranks together, which all know the same."""
    if math.isfinite(loss) and math.isfinite(update.gradient_norm):
        return ""
    return f"the loss is {loss:.4f}; {checks.told(update.non_finite)}"


def _exchange(model: ParallelModel, values: Sequence[float], *flags: bool) -> tuple[list[float], list[bool]]:
    """Return the sums of `values` over replicas, and which of `flags` any rank has raised."""
    counts = model.mesh.has_loss  # ranks that share layers have the same loss, and stages before the last have none
    sums = agreement.totals([*(value * counts for value in values), *flags])
    return sums[: len(values)], [flag > 0 for flag in sums[len(values) :]]


def _in_its_place(model: ParallelModel, data: Samples, mine: Dealt, loss: float) -> list[float]:
    """Return for each replica a number: of this rank's the mean of its `loss`, a sum, and zero of the others."""
    found = [0.0] * model.mesh.data_size
    if counted := sum(data.counted(ids) for _, ids in mine):
        found[model.mesh.data_rank] = loss / counted
    return found
