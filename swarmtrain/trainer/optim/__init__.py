"""The optimizer: turns accumulated gradients, clipped by their global norm, into an update of the parameters.

param_groups    assign parameters to training groups
update_rules    AdamW, SGD
muon            Muon
loss_scaler     dynamic loss scaling
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from swarmtrain.config import Config
from swarmtrain.config.learning_rate_schedule import compute_learning_rate
from swarmtrain.config.schema.optimizer import OptimizerMethod
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.model import umup
from swarmtrain.trainer.optim import gradient_checks, loss_scaler, param_groups
from swarmtrain.trainer.optim.loss_scaler import LossScaler
from swarmtrain.trainer.optim.muon import Muon
from swarmtrain.trainer.optim.param_groups import ParameterGroup
from swarmtrain.trainer.optim.update_rules import AdamW, Sgd, UpdateRule, get_gradient_or_raise
from swarmtrain.trainer.parallel import EMBEDDING_WEIGHT, ParallelModel

_LOSS_SCALE = "loss_scale/state"
"""Name of the loss scaler's state among the tensors of the optimizer state."""
_CLIPPING_MARGIN = 0.999
"""Gradients whose norm is below this part of the maximum are not clipped: torch would multiply all of them by exactly 1."""


@dataclass(frozen=True)
class OptimizerUpdate:
    """Result of one optimizer update; equal on every rank except `non_finite_counts` and `extra_scalars`."""

    gradient_norm: float
    """Global gradient norm before clipping."""
    learning_rates: Mapping[str, float]
    """Learning rate of each training group, by the group's name."""
    loss_scale: float | None = None
    """Factor by which the loss was multiplied; None without loss scaling."""
    skipped: bool = False
    """True if the scaled gradients overflowed or `skip_step` was called: parameters and optimizer state did not change."""
    non_finite_counts: Mapping[str, int] = field(default_factory=dict)
    """Number of NaN/Inf values in this rank's shard of each gradient, by parameter name."""
    extra_scalars: tuple[float, ...] = ()
    """Values of the `extra_scalars` of `prepare_step` on this rank, read from the device together with the norm."""
    clipped: bool = False
    """True if the gradient norm exceeded optimizer.gradient_clipping."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first training group."""
        return next(iter(self.learning_rates.values()))


class StatefulOptimizer(Protocol):
    """Interface of an optimizer whose state is saved in checkpoints: Optimizer, or that of a run with learners (see trainer/diloco)."""

    @property
    def is_prepared(self) -> bool:
        """True if a step is prepared, so that `step` needs no communication."""

    @property
    def is_updating(self) -> bool:
        """True while an update is in progress: some parameters and moments are already updated, others not yet."""

    @property
    def last_step(self) -> int:
        """Number of the last step that this process ran; 0 before the first."""

    def step(self, number: int) -> object:
        """Run step `number`, which is prepared."""

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizer state, named MOMENT/PARAMETER. They are not copies."""

    def reset_state(self, kept_names: Collection[str] = ()) -> None:
        """Set the optimizer state to that at the start of a run, except the tensors `kept_names`."""


class Optimizer:
    """Updates all trained parameters, each with the update rule, learning rate and weight decay of its training group."""

    def __init__(self, model: ParallelModel, config: Config, *, device_type: str | None = None) -> None:
        """Create the update rules of all groups. Raises TrainingError if the training_groups do not match the model's parameters.

        If parameters of `model` have no values yet, the optimizer state has none either, until Run.prepare_training loads or writes both.
        `device_type`: use the kernels for this type of device, such as "cuda"; default: that of the parameters.
        """
        self.parameters = {name: parameter for name, parameter in model.parameters.items() if name in model.trained_names}
        self.param_groups = param_groups.build_parameter_groups(model.trained_names, config)
        self._shard_layout = model.shard_layout
        self._max_gradient_norm = config.optimizer.gradient_clipping
        self._total_steps = config.trainer.train_iterations
        self._loss_scaler = loss_scaler.build_loss_scaler(config)
        self._frozen_rows = _build_frozen_row_masks(model, config)
        self._update_rules = [
            each for group in self.param_groups for each in _build_update_rules(group, model, config, self._frozen_rows, device_type)
        ]
        self._prepared_update: OptimizerUpdate | None = None
        self.last_step = 0
        """Number of the last step that this process ran; 0 before the first."""
        self.is_updating = False
        """True while an update is in progress: some parameters and moments are already updated, others not yet."""
        if not model.initial_values.has_missing_values:
            self.reset_state()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return `loss` times the loss scale, to be differentiated in its place; without loss scaling `loss` itself."""
        return loss * self._loss_scaler.current_state.factor if self._loss_scaler else loss

    @property
    def is_prepared(self) -> bool:
        """True if a step is prepared, and its gradients are finite or it is skipped: `step` then needs no communication."""
        update = self._prepared_update
        return update is not None and (update.skipped or math.isfinite(update.gradient_norm))

    @torch.no_grad()
    def prepare_step(self, number: int, *extra_scalars: Tensor, check_results: Callable[[], None] | None = None) -> OptimizerUpdate:
        """Unscale and clip the gradients of step `number`, and run all collectives of the step. Return the update that `step` will apply.

        `extra_scalars`, tensors on the device, are read together with the gradient norm: this is the only point in a step at which the
        host waits for the device.

        Parameters and optimizer state do not change, so they remain valid if a peer dies in the meantime. With loss scaling, a step with
        non-finite gradients is skipped, on all ranks: all have the same norm. `check_results` is called whenever the results of collectives
        are known, and raises an exception if they are invalid; the step is then not prepared.

        Raises TrainingError if gradients are non-finite at the lowest loss scale.
        """
        check_results = check_results or _accept_results
        self._zero_frozen_row_gradients()
        gradients = {name: get_gradient_or_raise(parameter) for name, parameter in self.parameters.items()}
        loss_scale = self._loss_scaler.current_state.factor if self._loss_scaler else None
        if self._loss_scaler:
            loss_scaler.unscale_gradients(list(gradients.values()), self._loss_scaler)
        norm_tensor = self._shard_layout.compute_global_norm(gradients)
        norm, *read_scalars = torch.stack([value.to(norm_tensor.device, torch.float64) for value in (norm_tensor, *extra_scalars)]).tolist()
        check_results()
        is_finite = math.isfinite(norm)
        if is_finite and self._max_gradient_norm and norm > _CLIPPING_MARGIN * self._max_gradient_norm:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self._max_gradient_norm, norm_tensor, foreach=True)
        skipped = self._loss_scaler is not None and not is_finite
        if not skipped:
            for _, _, rule in self._update_rules:
                rule.prepare_step()
            if norm_tensor.is_cuda and any(rule.communicates for _, _, rule in self._update_rules):
                torch.cuda.current_stream().synchronize()
                check_results()
        non_finite = {} if is_finite else gradient_checks.count_non_finite_values(gradients)
        if skipped and self._loss_scaler and self._loss_scaler.is_at_minimum:
            raise _build_min_loss_scale_error(self._loss_scaler, number, non_finite)
        learning_rates = {group.name: compute_learning_rate(group.schedule, number, self._total_steps) for group in self.param_groups}
        clipped = is_finite and bool(self._max_gradient_norm) and norm > self._max_gradient_norm
        self._prepared_update = OptimizerUpdate(norm, learning_rates, loss_scale, skipped, non_finite, tuple(read_scalars), clipped)
        return self._prepared_update

    def skip_step(self) -> OptimizerUpdate:
        """Mark the prepared step as skipped, so that `step` leaves the parameters unchanged.

        Return the prepared update, marked as skipped.

        Raises ValueError if no step is prepared.
        """
        if self._prepared_update is None:
            raise ValueError("skip_step() requires a prepared step: call prepare_step() first")
        self._prepared_update = replace(self._prepared_update, skipped=True)
        return self._prepared_update

    @torch.no_grad()
    def step(self, number: int) -> OptimizerUpdate:
        """Run optimizer step `number` (the first is 1) with the current gradients, then clear them. Return the update.

        Calls `prepare_step` first if the caller has not, and raises the same errors.
        """
        update = self._prepared_update or self.prepare_step(number)
        self.is_updating, self._prepared_update = True, None
        if not update.skipped:
            for group, lr_multiplier, rule in self._update_rules:
                weight_decay = group.weight_decay / lr_multiplier if group.independent_weight_decay else group.weight_decay
                rule.step(number, lr_multiplier * compute_learning_rate(group.schedule, number, self._total_steps), weight_decay)
            torch.autograd.graph.increment_version(list(self.parameters.values()))  # fused kernels do not, see WorkingWeights
        if self._loss_scaler:
            self._loss_scaler.record_step(overflow=update.skipped)
        self.is_updating, self.last_step = False, number
        for parameter in self.parameters.values():
            parameter.grad = None
        return update

    def _zero_frozen_row_gradients(self) -> None:
        """Set the gradients of frozen embedding rows to zero.

        Before this process's first step, also set the optimizer state of these rows to zero: it may come from a checkpoint of another run.
        """
        for name, rows in self._frozen_rows.items():
            get_gradient_or_raise(self.parameters[name])[rows] = 0
            for _, _, rule in self._update_rules if self.last_step == 0 else ():
                for state in rule.moments.values():
                    if name in state:
                        state[name][rows] = 0

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the optimizer state, named MOMENT/PARAMETER.

        The tensors are not copies: a checkpoint is loaded into them in place.
        """
        tensors = {
            f"{kind}/{name}": tensor
            for _, _, rule in self._update_rules
            for kind, state in rule.moments.items()
            for name, tensor in state.items()
        }
        return {**tensors, _LOSS_SCALE: self._loss_scaler.state} if self._loss_scaler else tensors

    def reset_state(self, kept_names: Collection[str] = ()) -> None:
        """Set the optimizer state to that at the start of a run, except the tensors `kept_names`, as `collect_state_tensors` names them."""
        for name, tensor in self.collect_state_tensors().items():
            if name in kept_names:
                continue
            if name == _LOSS_SCALE and self._loss_scaler:
                self._loss_scaler.reset()
            else:
                tensor.zero_()


def _accept_results() -> None: ...


def _build_min_loss_scale_error(scaler: LossScaler, step: int, non_finite_counts: Mapping[str, int]) -> TrainingError:
    return TrainingError(
        f"at the lowest loss scale {scaler.current_state.factor:g}, {gradient_checks.describe_non_finite_gradients(non_finite_counts)}",
        place=f"step {step}",
        hint="lower learning_rate_scheduler.learning_rate, or train with transformer_architecture.precision: bfloat16",
    )


def _build_frozen_row_masks(model: ParallelModel, config: Config) -> dict[str, Tensor]:
    """Return a boolean mask of the frozen rows in this rank's shard of the embedding, by parameter name; empty if all rows are trained."""
    if not config.trainer.finetunable_token_ids or EMBEDDING_WEIGHT not in model.parameters:
        return {}
    rows = model.shard_layout.find_local_region(EMBEDDING_WEIGHT)[0]
    trained = torch.isin(torch.arange(rows.start, rows.stop), torch.tensor(config.trainer.finetunable_token_ids))
    return {EMBEDDING_WEIGHT: (~trained).to(model.parameters[EMBEDDING_WEIGHT].device)}


def _build_update_rules(
    group: ParameterGroup, model: ParallelModel, config: Config, partly_frozen_names: Collection[str], device_type: str | None
) -> Iterator[tuple[ParameterGroup, float, UpdateRule]]:
    """Yield each update rule of `group`, with the settings of its parameters and its learning rate multiplier.

    `partly_frozen_names`: names of parameters with frozen rows; they have no weight decay. Raises TrainingError if such a parameter uses
    Muon, which would also update its frozen rows.
    """
    parameters_by_rule: dict[tuple[float, OptimizerMethod, bool], dict[str, nn.Parameter]] = defaultdict(dict)
    shapes = model.shard_layout.shapes
    for name in group.parameter_names:
        if name not in model.parameters:
            continue  # another pipeline stage holds this parameter
        parameter = model.parameters[name]
        lr_multiplier = umup.compute_lr_multiplier(name, shapes[name], config.transformer_architecture)
        parameters_by_rule[
            lr_multiplier,
            param_groups.choose_optimizer_method(group, name, parameter.dim(), config.optimizer.method),
            name in partly_frozen_names,
        ][name] = parameter
    for (lr_multiplier, method, is_partly_frozen), parameters in parameters_by_rule.items():
        rule_group = replace(group, weight_decay=0.0) if is_partly_frozen else group
        match method:
            case OptimizerMethod.adamw:
                yield rule_group, lr_multiplier, AdamW(parameters, config.optimizer, shapes, device_type)
            case OptimizerMethod.sgd:
                yield rule_group, lr_multiplier, Sgd(parameters, config.optimizer)
            case OptimizerMethod.muon if is_partly_frozen:
                place, hint = f"config training_groups, group {group.name}", "use AdamW for this group"
                raise TrainingError("Muon would update the whole embedding, not only trainer.finetunable_token_ids", place=place, hint=hint)
            case OptimizerMethod.muon:
                full_precision = config.transformer_architecture.precision in (Precision.float32, Precision.float64)
                yield (
                    rule_group,
                    lr_multiplier,
                    Muon(parameters, config.optimizer, model.shard_layout, model.mesh.replica_group, full_precision=full_precision),
                )
