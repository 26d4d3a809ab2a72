"""One optimizer step, and one held-out loss: the passes of this rank's micro batches, and what ranks exchange about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer import agreement, checks
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.rows import Rows
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.model import dropout
from swarmtrain.trainer.optim import Optimizer, Update
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.contrast import Contrast, contrast
from swarmtrain.trainer.parallel.pipeline import Pipeline, Scaled
from swarmtrain.trainer.parts import BACKWARD, COMMUNICATION, DATA, FORWARD, LOGGING, OPTIMIZER, OTHER, Parts
from swarmtrain.trainer.runtime import Runtime, derived_seed, seed

NARROW = {Precision.bfloat16: torch.bfloat16, Precision.float16: torch.float16}
Dealt = Sequence[tuple[int, Ids]]
"""A replica's micro batches, with their numbers in the whole step."""


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
    sums = _passes(here, model, data, mine, number=number, scaled=lambda loss: optimizer.scaled(loss / counted), parts=parts)
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
        sums = _held_out_passes(here, model, data, batch.dealt(mesh.shares, mesh.data_rank, topology.micro_batch))
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


def _passes(
    here: Runtime, model: ParallelModel, data: Samples, dealt: Dealt, *, number: int, scaled: Scaled, parts: Parts
) -> tuple[Tensor, Tensor]:
    """Make this rank's passes of step `number`: gradients of the loss, `scaled`. Return the loss, a sum, and how many were right."""
    forward = partial(_forward, here, number, parts)
    compared = _compared(here, model, data, dealt, forward)
    if isinstance(model.replicas, Pipeline):
        first = dealt[0][0] if dealt else 0
        rows = _together(here, data, dealt)
        parts.begins(BACKWARD)  # between passes it waits for other stages
        loss = model.replicas.step(
            rows,
            scaled,
            lambda index, stage: forward(first + index, stage),
            lambda index, stage: parts.of(BACKWARD, first + index, stage),
            compared.pulls if compared else None,
        )
        return _come_to(model, compared, loss)
    summed = torch.zeros((), dtype=torch.float64, device=here.device)
    passes = _filled(dealt, model.replicas.passes)
    for index, (micro, ids) in enumerate(passes):
        with model.replicas.micro_batch(last=index == len(passes) - 1):
            parts.begins(DATA)
            rows = _rows(here, data, ids)
            with forward(micro):
                made: Tensor = model.replicas(*rows)
                loss = (made * compared.of(index, len(made))).sum() if compared else made
            parts.begins(BACKWARD, micro)
            torch.autograd.backward(scaled(loss))
        summed += loss.detach()
    return _come_to(model, compared, summed)


def _come_to(model: ParallelModel, compared: Contrast | None, summed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of passes, a sum, and how many were right: of pairs, or of queries. `summed`: what the model has made of them."""
    if compared:
        return compared.loss, compared.right
    right = model.local.preference.taken() if model.local.preference else None
    return summed, summed.new_zeros(()) if right is None else right


def _compared(
    here: Runtime, model: ParallelModel, data: Samples, dealt: Dealt, forward: Callable[..., AbstractContextManager[object]]
) -> Contrast | None:
    """Return how this replica's vectors compare with all others of the global batch; None if they are not to, or it has none here.

    `forward` takes a micro batch's number, and in a pipeline the stage's.
    """
    config, topology, mesh = here.config.trainer.contrastive_config, here.config.topology, model.mesh
    if config is None:
        return None
    first = dealt[0][0] if dealt else 0
    with torch.no_grad():
        if isinstance(model.replicas, Pipeline):
            mine = model.replicas.vectors(_together(here, data, dealt), lambda index, stage: forward(first + index, stage))
        else:
            made = []
            for micro, ids in _filled(dealt, model.replicas.passes):
                rows = _rows(here, data, ids)
                with forward(micro):
                    made.append(model.local(*rows)[: 0 if ids is None else None])
            mine = torch.cat(made)
    if mine is None:
        return None
    first = sum(mesh.shares[: mesh.data_rank]) * topology.micro_batch
    return contrast(mine, config, rows=data.rows, first=first, samples=topology.global_batch, group=mesh.data_group)


def _held_out_passes(here: Runtime, model: ParallelModel, data: Samples, dealt: Dealt) -> tuple[Tensor, Tensor]:
    summed = torch.zeros((), dtype=torch.float64, device=here.device)
    if here.config.trainer.contrastive_config:
        return _come_to(model, _compared(here, model, data, dealt, lambda *_: autocast(here)), summed)
    if isinstance(model.replicas, Pipeline):
        return _come_to(model, None, model.replicas.evaluate(_together(here, data, dealt), lambda *_: autocast(here)))
    for _, ids in _filled(dealt, model.replicas.passes):
        rows = _rows(here, data, ids)
        with autocast(here):
            summed += model.local(*rows)
    return _come_to(model, None, summed)


def _filled(dealt: Dealt, passes: int) -> Sequence[tuple[int, Ids | None]]:
    """Return the micro batches `dealt`, and as many empty ones as the other replicas need."""
    return [*dealt, *[(0, None)] * (passes - len(dealt))]


def _together(here: Runtime, data: Samples, dealt: Dealt) -> Rows:
    return _sent(here, data.load(np.concatenate([np.empty(0, dtype=np.int64), *(ids for _, ids in dealt)])))


def _rows(here: Runtime, data: Samples, ids: Ids | None) -> Rows:
    return _sent(here, data.empty() if ids is None else data.load(ids))


def _sent(here: Runtime, rows: Rows) -> Rows:
    """Return `rows` on the device. They go there from pinned memory: from any other a copy waits for all that is queued."""
    pinned = rows.map(Tensor.pin_memory) if here.device.type == "cuda" else rows
    return pinned.map(lambda tensor: tensor.to(here.device, non_blocking=True))


@contextmanager
def _forward(here: Runtime, number: int, parts: Parts, micro: int, *stage: int) -> Iterator[None]:
    """The forward pass of micro batch `micro` of step `number`, through this `stage` of a pipeline if there is one, goes in the body."""
    with (
        parts.of(FORWARD, micro, *stage),
        autocast(here),
        dropout.at(derived_seed(here.config.trainer.seed, number), micro * here.config.topology.micro_batch * here.config.data.rows),
    ):
        seed(here.config.trainer.seed, number, micro)
        yield


def autocast(here: Runtime) -> AbstractContextManager[object]:
    """Return what a forward pass is made in: numbers as narrow as the config has them."""
    narrow = NARROW.get(here.config.transformer_architecture.precision)
    return torch.autocast(here.device.type, narrow or torch.bfloat16, enabled=narrow is not None)
