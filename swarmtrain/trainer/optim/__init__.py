"""The optimizer: from the gradients at hand to a step, with the gradient of the whole model clipped by its norm.

groups      which parameter is trained how
schedule    learning rates, functions of the step
methods     AdamW, SGD
muon        Muon
scale       loss scaling
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from swarmtrain.config import Config
from swarmtrain.config.optimizer import OptimizerMethod
from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import checks
from swarmtrain.trainer.model import umup
from swarmtrain.trainer.optim import groups, scale
from swarmtrain.trainer.optim.groups import Group
from swarmtrain.trainer.optim.methods import AdamW, Method, Sgd, gradient
from swarmtrain.trainer.optim.muon import Muon
from swarmtrain.trainer.optim.scale import LossScale
from swarmtrain.trainer.optim.schedule import learning_rate
from swarmtrain.trainer.parallel import EMBEDDING, ParallelModel


@dataclass(frozen=True)
class Update:
    """What has been made of one step's gradients; the same on every rank but for `non_finite`."""

    gradient_norm: float
    """Of the whole gradient, before clipping."""
    learning_rates: Mapping[str, float]
    """By training group."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None without loss scaling."""
    skipped: bool = False
    """True if the scaled gradients overflowed: parameters and state are what they were."""
    non_finite: Mapping[str, int] = field(default_factory=dict)
    """Parameter to the number of values of its gradient, in this rank's part, that are infinite or no number."""
    beside: tuple[float, ...] = ()
    """This rank's numbers that were read beside the norm."""
    clipped: bool = False
    """True if the gradient was longer than it may be."""

    @property
    def learning_rate(self) -> float:
        """The first group's."""
        return next(iter(self.learning_rates.values()))


class Optimizer:
    """Makes the steps of all parameters, each by its group's method, rate and weight decay."""

    def __init__(self, model: ParallelModel, config: Config) -> None:
        """Raises TrainingError if training_groups do not fit the model's parameters."""
        self.parameters = {name: parameter for name, parameter in model.parameters.items() if name in model.trained}
        self.groups = groups.divide(model.trained, config)
        self._shards = model.shards
        self._clipping = config.optimizer.gradient_clipping
        self._steps = config.trainer.train_iterations
        self._scale = scale.wanted(config)
        self._still = _still(model, config)
        self._methods = [each for group in self.groups for each in _methods(group, model, config, self._still)]
        self._prepared: Update | None = None
        self.made = 0
        """Number of the last step made here, 0 before the first."""
        self.writing = False
        """True while parameters and state are neither those before a step nor those after it."""

    def scaled(self, loss: Tensor) -> Tensor:
        """Return what to differentiate instead of `loss`: itself, or with loss scaling a multiple."""
        return loss * self._scale.now.factor if self._scale else loss

    @property
    def prepared(self) -> bool:
        """True if the next step is known, is sound as far as can be seen here, and needs no other rank."""
        update = self._prepared
        return update is not None and (update.skipped or math.isfinite(update.gradient_norm))

    @torch.no_grad()
    def prepare(self, number: int, *beside: Tensor) -> Update:
        """Do all of step `number` for which ranks need each other, and return what the step will be.

        Numbers on the device that are wanted here, `beside` the norm, are read with it: this is the one time in a step that
        the host waits for the device, and what comes after is queued while ranks tell each other what they have read.
        Neither parameters nor state change, so that a peer that dies meanwhile leaves them whole. With loss scaling a step
        whose gradients are not finite is skipped, by all ranks, since all have the same norm.
        Raises TrainingError if that happens at the lowest scale.
        """
        self._hold_still()
        gradients = {name: gradient(parameter) for name, parameter in self.parameters.items()}
        used = self._scale.now.factor if self._scale else None
        if self._scale:
            scale.unscale(list(gradients.values()), self._scale)
        size = self._shards.norm(gradients)
        norm, *read = torch.stack([value.to(size.device, torch.float64) for value in (size, *beside)]).tolist()
        finite = math.isfinite(norm)
        if finite:
            self._clip(size)
        skipped = self._scale is not None and not finite
        if not skipped:
            for _, _, method in self._methods:
                method.prepare()
        non_finite = {} if finite else checks.non_finite(gradients)
        if skipped and self._scale and self._scale.lowest:
            raise _stuck(self._scale, number, non_finite)
        rates = {group.name: learning_rate(group.schedule, number, self._steps) for group in self.groups}
        clipped = finite and bool(self._clipping) and norm > self._clipping
        self._prepared = Update(norm, rates, used, skipped, non_finite, tuple(read), clipped)
        return self._prepared

    def skip(self) -> Update:
        """Let the step that is prepared change nothing, and return what it will be then."""
        if self._prepared is None:
            raise ValueError("skip() without prepare()")
        self._prepared = replace(self._prepared, skipped=True)
        return self._prepared

    @torch.no_grad()
    def step(self, number: int) -> Update:
        """Make optimizer step `number` (the first is 1) with the gradients at hand, and clear them. Raises what `prepare` does."""
        update = self._prepared or self.prepare(number)
        self.writing, self._prepared = True, None
        if not update.skipped:
            for group, gain, method in self._methods:
                decay = group.weight_decay / gain if group.independent else group.weight_decay
                method.step(number, gain * learning_rate(group.schedule, number, self._steps), decay)
        if self._scale:
            self._scale.note(overflow=update.skipped)
        self.writing, self.made = False, number
        for parameter in self.parameters.values():
            parameter.grad = None
        return update

    def _hold_still(self) -> None:
        """Take from gradients, and at first from state that comes from elsewhere, what rows would move that are to stay."""
        for name, rows in self._still.items():
            gradient(self.parameters[name])[rows] = 0
            for _, _, method in self._methods if self.made == 0 else ():
                for state in method.moments.values():
                    if name in state:
                        state[name][rows] = 0

    def moments(self) -> dict[str, Tensor]:
        """Return the state's tensors, named MOMENT/PARAMETER, to be read or filled in place."""
        moments = {
            f"{kind}/{name}": tensor
            for _, _, method in self._methods
            for kind, state in method.moments.items()
            for name, tensor in state.items()
        }
        return {**moments, "loss_scale/state": self._scale.state} if self._scale else moments

    def _clip(self, size: Tensor) -> None:
        if self._clipping:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self._clipping, size)


def _stuck(scaling: LossScale, number: int, non_finite: Mapping[str, int]) -> TrainingError:
    return TrainingError(
        f"at the lowest loss scale {scaling.now.factor:g}, {checks.told(non_finite)}",
        place=f"step {number}",
        hint="lower learning_rate_scheduler.learning_rate, or train with transformer_architecture.precision: bfloat16",
    )


def _still(model: ParallelModel, config: Config) -> dict[str, Tensor]:
    """Return, by the names of parameters of which some rows are trained, which of this rank's rows are not."""
    if not config.trainer.finetunable_token_ids or EMBEDDING not in model.parameters:
        return {}
    trained = torch.isin(model.shards.rows(EMBEDDING), torch.tensor(config.trainer.finetunable_token_ids))
    return {EMBEDDING: (~trained).to(model.parameters[EMBEDDING].device)}


def _methods(group: Group, model: ParallelModel, config: Config, still: Collection[str]) -> Iterator[tuple[Group, float, Method]]:
    """Yield what trains `group`, each with what its learning rate is multiplied by. What is `still` in part does not decay.

    Raises TrainingError if that is to be trained by a method that would move all of it.
    """
    parts: dict[tuple[float, OptimizerMethod, bool], dict[str, nn.Parameter]] = defaultdict(dict)
    shapes = model.shards.shapes
    for name in group.parameters:
        if name not in model.parameters:
            continue  # another stage of the pipeline has it
        parameter = model.parameters[name]
        gain = umup.gain(name, shapes[name], config.transformer_architecture)
        parts[gain, groups.method(group, name, parameter.dim(), config.optimizer.method), name in still][name] = parameter
    for (gain, method, stays), parameters in parts.items():
        part = replace(group, weight_decay=0.0) if stays else group
        match method:
            case OptimizerMethod.adamw:
                yield part, gain, AdamW(parameters, config.optimizer, shapes)
            case OptimizerMethod.sgd:
                yield part, gain, Sgd(parameters, config.optimizer)
            case OptimizerMethod.muon if stays:
                place, hint = f"config training_groups, group {group.name}", "leave it to AdamW"
                raise TrainingError("Muon would move all of the embedding, not trainer.finetunable_token_ids alone", place=place, hint=hint)
            case OptimizerMethod.muon:
                exact = config.transformer_architecture.precision in (Precision.float32, Precision.float64)
                yield part, gain, Muon(parameters, config.optimizer, model.shards, model.mesh.replica_group, exact=exact)
