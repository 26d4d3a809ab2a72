"""The passes of this rank's micro batches: forward and backward in a step, forward alone for a held-out loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.rows import Rows
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.model import dropout
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.contrast import Contrast, contrast
from swarmtrain.trainer.parallel.pipeline import Pipeline, Scaled
from swarmtrain.trainer.parts import BACKWARD, DATA, FORWARD, Parts
from swarmtrain.trainer.runtime import Runtime, derived_seed, seed

NARROW = {Precision.bfloat16: torch.bfloat16, Precision.float16: torch.float16}
Dealt = Sequence[tuple[int, Ids]]
"""A replica's micro batches, with their numbers in the whole step."""


def passes(
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
    filled = _filled(dealt, model.replicas.passes)
    for index, (micro, ids) in enumerate(filled):
        with model.replicas.micro_batch(last=index == len(filled) - 1):
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


def held_out_passes(here: Runtime, model: ParallelModel, data: Samples, dealt: Dealt) -> tuple[Tensor, Tensor]:
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
