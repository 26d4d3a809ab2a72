"""Pipeline parallelism: torch's stages and schedules over the mesh's pipe group, on parts of one Transformer.

Whatever a rank does not hold is taken out of the model and something that hands its input on is put in. So what is left
keeps its names, and a stage's forward pass is the model's own: hidden states go in where tokens went, hidden states come
out where there is no head, and a loss where there is one.

Gradients are summed over replicas after the last backward pass, not during it: a rank of a pipeline has time then, while
the stages before it drain. As between replicas (see data.py) they are added in fp64 when the run is to be exact. Where
replicas divide their state (see sharded.py), each stage gathers its parameters once a step and holds them till its last
backward pass: micro batches pass in both directions, and gathering for each of them would make all stages wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from swarmtrain.config import Config
from swarmtrain.config.pipeline import cuts, on_schedule
from swarmtrain.config.topology import TopologyConfig
from swarmtrain.config.transformer_architecture import Precision, TransformerArchitectureConfig
from swarmtrain.trainer.data.rows import Rows
from swarmtrain.trainer.model.targets import IGNORE
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import recompute
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.sharded import Divided, Fill

Around = Callable[[int, int], AbstractContextManager[object]]
"""What a pass of a replica's micro batch, by its number there, through a stage, by its number, is made in."""
Scaled = Callable[[Tensor], Tensor]
"""Makes of a summed loss what is differentiated."""
_Differentiated = Callable[[Tensor, Tensor], Tensor]
"""Makes that of what the last stage has made, and what it was to."""


def cut(model: Transformer, config: Config, mesh: Mesh) -> None:
    """Take out of `model`, in place, what other ranks of the pipeline hold."""
    stages = cuts(config.topology, config.transformer_architecture)
    mine = stages[mesh.pipe_rank :: mesh.pipe_size]
    _keep(model, {layer for layers in mine for layer in layers})


class Pipeline:
    """This rank's stages of one pipeline, as one model whose gradients are summed over its replicas."""

    def __init__(
        self, model: Transformer, config: Config, mesh: Mesh, device: torch.device, *, divided: Fill | None, tied: int | None
    ) -> None:
        """`model` is cut. `divided`: replicas divide its state, which has no values yet; this gives them.

        `tied`: the place of the parameter whose copy the other end has.
        """
        self._mesh, self._device = mesh, device
        topology, shape = config.topology, config.transformer_architecture
        count, exact = on_schedule(topology, mesh.shares[mesh.data_rank]), shape.precision is Precision.float32
        rows = topology.micro_batch * config.data.rows
        self._rows = count * rows
        places = list(enumerate(cuts(topology, shape)))[mesh.pipe_rank :: mesh.pipe_size]
        views = [_view(model, layers) for _, layers in places]
        self._state = Divided(model, views, config, mesh, divided, hold=True) if divided else _Copies(model, mesh, exact=exact, tied=tied)
        self._tied = self._state.parameters[tied] if divided and tied is not None else None
        for view in views:
            recompute.stage(view, topology.activation_checkpointing_type)
        self._stages = [
            _stage(view, index, topology, shape, rows=rows, mesh=mesh, device=device)
            for view, (index, _) in zip(views, places, strict=True)
        ]
        for stage in self._stages:
            stage.copies = None if isinstance(self._state, Divided) else self._state
        if len(self._stages) == 1:
            self._schedule: Any = Schedule1F1B(self._stages[0], count, self._differentiated, scale_grads=False)
        else:
            self._schedule = ScheduleInterleaved1F1B(list(self._stages), count, self._differentiated, scale_grads=False)
        self._makes: _Differentiated = _as_it_is
        self._made: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What this rank keeps of each parameter, in the order of the model's."""
        return self._state.parameters

    def step(self, rows: Rows, scaled: Scaled, forward: Around, backward: Around, pulls: Tensor | None = None) -> Tensor:
        """Make the forward and backward passes of `rows`: this replica's in one step.

        Return their summed loss in fp64, zero on a rank without the last stage. Every rank then has the gradient of the
        sum over all replicas, `scaled`. `pulls`: of the vectors that the last stage makes of `rows`, the gradients of the loss.
        """
        if pulls is None:
            made = self._run(self._schedule.step, rows, lambda loss, _: scaled(loss), (forward, backward))
        else:
            self._run(self._schedule.step, rows, lambda vectors, pull: scaled((vectors * pull).sum()), (forward, backward), pulls)
            made = []
        self._state.take_gradients()
        if self._tied is not None and self._tied.grad is not None:
            self._tied.grad = _with_twin(self._tied.grad, self._mesh)
        return self._summed(made)

    def evaluate(self, rows: Rows, forward: Around) -> Tensor:
        """Return the summed loss of `rows` in fp64, zero on a rank without the last stage."""
        return self._summed(self._run(self._schedule.eval, rows, _as_it_is, (forward, forward)))

    def vectors(self, rows: Rows, forward: Around) -> Tensor | None:
        """Return what the last stage makes of each of `rows`; None on a rank without it."""
        made = self._run(self._schedule.eval, rows, _as_it_is, (forward, forward))
        return torch.cat(made)[: len(rows.inputs)] if made else None

    def _run(
        self,
        run: Callable[..., object],
        rows: Rows,
        makes: _Differentiated,
        around: tuple[Around, Around],
        wanted: Tensor | None = None,
    ) -> list[Tensor]:
        """Return what the last stage has made, if it is this rank's: of each micro batch."""
        self._makes, self._made = makes, []
        for stage in self._stages:
            stage.around_forward, stage.around_backward = around
        given = (self._filled(rows.inputs, 0),) if self._stages[0].is_first else ()
        named = {} if rows.documents is None else {"documents": self._filled(rows.documents, 0)}
        if self._stages[-1].is_last:
            named["targets"] = self._filled(rows.targets, IGNORE)
            named["target"] = named["targets"] if wanted is None else self._filled(wanted, 0)
        try:
            run(*given, return_outputs=False, **named)
        except RuntimeError as error:  # torch tells of the stage and its arguments; what happened is the cause
            raise error.__cause__ or error from None
        return self._made

    def _summed(self, losses: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(losses)).double().sum() if losses else torch.zeros((), dtype=torch.float64, device=self._device)

    def _filled(self, rows: Tensor, value: int) -> Tensor:
        """Return `rows` and as many empty samples as the schedule wants beside them."""
        filled = torch.full((self._rows, rows.shape[1]), value, dtype=rows.dtype, device=self._device)
        filled[: len(rows)] = rows
        return filled

    def _differentiated(self, made: Tensor, wanted: Tensor) -> Tensor:
        self._made.append(made.detach())
        return self._makes(made, wanted)


class _Stage(PipelineStage):
    """A stage that knows when a micro batch begins, and when its gradients are there."""

    around_forward: Around
    around_backward: Around
    copies: _Copies | None = None
    """Who is to have the gradients; None if fully_shard does."""

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        with self.around_forward(fwd_chunk_id, self.stage_index):
            return super().forward_one_chunk(fwd_chunk_id, args, self._own(kwargs or {}), save_forward_output)

    def _own(self, named: dict[str, Any]) -> dict[str, Any]:
        """Of a rank's several stages only the last one has a loss to make."""
        return {name: value for name, value in named.items() if self.is_last or name != "targets"}

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        with self.around_backward(bwd_chunk_id, self.stage_index):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
            if self.copies:
                self.copies.set_aside(self.submod.parameters())


class _Copies:
    """Parameters that every replica has whole, and their gradients on the way: over micro batches, then over replicas."""

    def __init__(self, model: Transformer, mesh: Mesh, *, exact: bool, tied: int | None) -> None:
        """`exact`: add in fp64. `tied`: the parameter, by its place, of which the pipeline's other end holds a copy."""
        self.parameters = list(model.parameters())
        self._mesh, self._exact = mesh, exact
        self._tied = None if tied is None else self.parameters[tied]
        self._aside: dict[nn.Parameter, Tensor] = {}

    def set_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the gradients of one micro batch to the sums. If they are not to be exact, autograd does that."""
        for parameter in parameters if self._exact else ():
            if parameter.grad is None:
                continue
            if parameter in self._aside:
                self._aside[parameter] += parameter.grad
            else:
                self._aside[parameter] = parameter.grad.double()
            parameter.grad = None

    def take_gradients(self) -> None:
        """Add the sums of all replicas, and make them the gradients."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._aside[parameter], parameter.grad = parameter.grad, None
        group = self._mesh.data_group
        if group.size() > 1:
            for work in [dist.all_reduce(total, group=group, async_op=True) for total in self._aside.values()]:
                work.wait()
        if self._tied in self._aside:
            self._aside[self._tied] = _with_twin(self._aside[self._tied], self._mesh)
        for parameter, total in self._aside.items():
            parameter.grad = total.to(parameter.dtype)
        self._aside.clear()


def _with_twin(gradient: Tensor, mesh: Mesh) -> Tensor:
    """Return `gradient` and that of the copy on the pipeline's other end. Both ends add them, so the copies stay equal to the last bit."""
    mine = gradient.contiguous()
    theirs = torch.empty_like(mine)
    group = mesh.pipe_group
    peer = dist.get_global_rank(group, mesh.pipe_size - 1 - mesh.pipe_rank)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]):
        work.wait()
    return mine + theirs


class _Elsewhere(nn.Module):
    """Stands where a part of the model is that another rank holds."""

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden


def _as_it_is(made: Tensor, _: Tensor) -> Tensor:
    return made


def _keep(model: Transformer, layers: Collection[int]) -> None:
    """Leave in `model` only `layers`, with the embedding before the first of all and the head after the last."""
    first, last = 0 in layers, len(model.blocks) - 1 in layers
    absent = [f"blocks.{layer}" for layer in range(len(model.blocks)) if layer not in layers]
    absent += [] if first else ["embedding", "embedding_dropout"]
    absent += [] if last else ["norm", "head"]
    for name in absent:
        model.set_submodule(name, _Elsewhere())
    if not first:
        model.positions = None
    model.tied = model.tied and first and last
    model.place = min(layers), model.place[1]


def _view(model: Transformer, layers: Collection[int]) -> Transformer:
    """Return `model` showing only `layers`, and sharing them with it."""
    view = copy.copy(model)
    # Modules and hooks of its own: fully_shard hangs some on each view.
    vars(view).update({name: copy.copy(value) for name, value in vars(model).items() if isinstance(value, dict)})
    view.blocks = nn.ModuleList(model.blocks)
    _keep(view, layers)
    return view


def _stage(
    part: Transformer,
    index: int,
    topology: TopologyConfig,
    shape: TransformerArchitectureConfig,
    *,
    rows: int,
    mesh: Mesh,
    device: torch.device,
) -> _Stage:
    """Return stage number `index`, for micro batches of so many `rows`.

    What goes in and out is told rather than found out by a pass that nobody asked for.
    """
    length = shape.sequence_length
    tokens = torch.empty((rows, length), dtype=torch.int64, device="meta")
    between = length // topology.context_parallel_size // (topology.tensor if topology.sequence_parallel else 1)
    seen = rows if part.preference is None else 2 * rows
    hidden = torch.empty((seen, between, shape.hidden_size), dtype=next(part.parameters()).dtype, device="meta", requires_grad=True)
    last = torch.empty((), device="meta", requires_grad=True)
    if shape.embedding_size is not None:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        last = torch.empty((rows, shape.embedding_size), dtype=wide, device="meta", requires_grad=True)
    given, made = tokens if index == 0 else hidden, last if index == topology.stages - 1 else hidden
    return _Stage(part, index, topology.stages, device, input_args=given, output_args=made, group=mesh.pipe_group)
