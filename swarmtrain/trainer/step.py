"""One optimizer step, and one held-out loss: the passes of this rank's micro batches, and what ranks exchange about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

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
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer, Update
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.data import Alone, Replicas
from swarmtrain.trainer.parallel.pipeline import Pipeline, Scaled
from swarmtrain.trainer.parallel.sharded import ShardedReplicas
from swarmtrain.trainer.runtime import Runtime, derived_seed, seed

_NARROW = {Precision.bfloat16: torch.bfloat16, Precision.float16: torch.float16}
Dealt = Sequence[tuple[int, Ids]]
"""A replica's micro batches, with their numbers in the whole step."""


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
    gradient_norm: float
    learning_rate: float
    asked_to_leave: bool
    """True if any rank has been."""
    to_be_saved: bool = False
    """True if any rank wished so."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None without loss scaling."""
    skipped: bool = False
    """True if gradients overflowed at that scale, so that nothing was changed."""
    unsound: str = ""
    """What of it was no number, if anything was: then it was skipped too."""


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
) -> Step:
    """Make optimizer step `number` with the global batch that begins at `position`. `save`: this rank wishes it to be saved.

    A step whose loss or gradient is no number changes nothing.
    """
    topology, mesh = here.config.topology, model.mesh
    batch, following = (data.batch(first, topology.global_batch) for first in (position, position + topology.global_batch))
    mine, ahead = (each.dealt(mesh.shares, mesh.data_rank, topology.micro_batch) for each in (batch, following))
    for _, ids in ahead:
        data.expect(ids)  # read from the disk while this step is computed
    summed = _passes(here, model, data, mine, number=number, scaled=lambda loss: optimizer.scaled(loss / batch.tokens))
    update = optimizer.prepare(number, summed)
    # The last thing for which ranks need each other comes before the first that is changed: who gets through it completes
    # the step, and a peer that dies before leaves the last step whole.
    (loss_sum,), (asked, to_be_saved) = _exchange(model, update.beside, stop.raised, save)
    mean = loss_sum / batch.tokens
    unsound = "" if update.skipped else _unsound(mean, update)
    if unsound:
        update = optimizer.skip()
    optimizer.step(number)
    samples = tuple(int(sample) for _, ids in mine for sample in ids)
    told = update.gradient_norm, update.learning_rate
    return Step(number, samples, batch.tokens, mean, *told, asked, to_be_saved, update.loss_scale, update.skipped, unsound)


@torch.no_grad()
def held_out_loss(here: Runtime, model: ParallelModel, data: Samples, stop: StopFlag | None) -> float | None:
    """Return the mean loss, in nats per token, over the first `eval_iterations` global batches of `data`.

    None if `stop` is given and any rank has been asked to leave meanwhile.
    """
    topology, mesh = here.config.topology, model.mesh
    loss, tokens = 0.0, 0
    count = min(topology.global_batch * here.config.trainer.eval_iterations, len(data))
    for position in range(0, count, topology.global_batch):
        batch = data.batch(position, topology.global_batch)
        model.local.eval()
        summed = _held_out_passes(here, model, data, batch.dealt(mesh.shares, mesh.data_rank, topology.micro_batch))
        model.local.train()
        (loss_sum,), (asked,) = _exchange(model, [float(summed)], stop is not None and stop.raised)
        if asked:
            return None
        loss, tokens = loss + loss_sum, tokens + batch.tokens
    return loss / tokens


def asked_to_leave(stop: StopFlag) -> bool:
    """Return, on every rank alike, whether any rank has been asked to leave."""
    return agreement.totals([stop.raised])[0] > 0


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


def _passes(here: Runtime, model: ParallelModel, data: Samples, dealt: Dealt, *, number: int, scaled: Scaled) -> Tensor:
    """Make this rank's passes of step `number`: gradients of the loss, `scaled`. Return the loss, a sum."""
    if isinstance(model.replicas, Pipeline):
        first = dealt[0][0] if dealt else 0
        return model.replicas.step(_together(here, data, dealt), scaled, lambda index: _micro_batch(here, number, first + index))
    summed = torch.zeros((), dtype=torch.float64, device=here.device)
    passes = _filled(dealt, model.replicas.passes)
    for index, (micro, ids) in enumerate(passes):
        with model.replicas.micro_batch(last=index == len(passes) - 1):
            with _micro_batch(here, number, micro):
                loss = _loss(here, model.replicas, data, ids)
            torch.autograd.backward(scaled(loss))
        summed += loss.detach()
    return summed


def _held_out_passes(here: Runtime, model: ParallelModel, data: Samples, dealt: Dealt) -> Tensor:
    if isinstance(model.replicas, Pipeline):
        return model.replicas.evaluate(_together(here, data, dealt), lambda _: _autocast(here))
    summed = torch.zeros((), dtype=torch.float64, device=here.device)
    for _, ids in _filled(dealt, model.replicas.passes):
        with _autocast(here):
            summed += _loss(here, model.local, data, ids)
    return summed


def _filled(dealt: Dealt, passes: int) -> Sequence[tuple[int, Ids | None]]:
    """Return the micro batches `dealt`, and as many empty ones as the other replicas need."""
    return [*dealt, *[(0, None)] * (passes - len(dealt))]


def _together(here: Runtime, data: Samples, dealt: Dealt) -> Rows:
    return _sent(here, data.load(np.concatenate([np.empty(0, dtype=np.int64), *(ids for _, ids in dealt)])))


def _loss(here: Runtime, model: Alone | Replicas | ShardedReplicas | Transformer, data: Samples, ids: Ids | None) -> Tensor:
    loss: Tensor = model(*_sent(here, data.empty() if ids is None else data.load(ids)))
    return loss


def _sent(here: Runtime, rows: Rows) -> Rows:
    """Return `rows` on the device. They go there from pinned memory: from any other a copy waits for all that is queued."""
    pinned = rows.map(Tensor.pin_memory) if here.device.type == "cuda" else rows
    return pinned.map(lambda tensor: tensor.to(here.device, non_blocking=True))


@contextmanager
def _micro_batch(here: Runtime, number: int, micro: int) -> Iterator[None]:
    """The forward pass of micro batch `micro` of step `number` goes in the body."""
    seed(here.config.trainer.seed, number, micro)
    with _autocast(here), dropout.at(derived_seed(here.config.trainer.seed, number), micro * here.config.topology.micro_batch):
        yield


def _autocast(here: Runtime) -> AbstractContextManager[object]:
    narrow = _NARROW.get(here.config.transformer_architecture.precision)
    return torch.autocast(here.device.type, narrow or torch.bfloat16, enabled=narrow is not None)
