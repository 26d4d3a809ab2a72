"""The optimizer of a run with learners: one inner optimizer per local learner, and the outer optimizer of the global parameters.

The global parameters are those of the model while no learner uses it, so validation, sampling and exports need not know about learners.

    round        `inner_steps` steps, in which each learner updates its own parameters
    outer step   after a round, and after the run's last step: an update of the global parameters p by SGD with Nesterov momentum,
                     v = m v + g,   p = p - l (g + m v),
                 where g is the mean pseudo-gradient of the learners (see exchange.py), m the momentum and l the learning rate.
                 Then all learners continue from p. They keep their optimizer state.

The step after which the last outer step ran is part of the state. So a checkpoint that surviving ranks save between the last inner step
of a round and its outer step is complete: the outer step runs when it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cached_property

import torch
from torch import Tensor

from swarmtrain.trainer.diloco.exchange import PseudoGradientExchange
from swarmtrain.trainer.diloco.learner import PARAMETERS, Learner
from swarmtrain.trainer.health.step_timer import COMMUNICATION, StepTimer
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_VELOCITY, _OUTER_STEP = "outer_momentum", "outer_step/state"


class DilocoOptimizer:
    """Inner and outer optimizers, the learners of this rank, and the global parameters."""

    def __init__(self, runtime: Runtime, model: ParallelModel, optimizer: Optimizer) -> None:
        """Create the learners of this rank. `optimizer`: inner optimizer of the first of them; the others have the same settings."""
        config, topology = runtime.config, runtime.config.topology
        others = [Optimizer(model, config) for _ in model.mesh.local_learners[1:]]
        self.learners = [Learner(*pair) for pair in zip(model.mesh.local_learners, [optimizer, *others], strict=True)]
        """The learners of this rank."""
        self.learner_count = topology.learners or 1
        """Number of learners on all ranks together."""
        self._parameters, self._settings, self._last_step = optimizer.parameters, config.diloco, config.trainer.train_iterations
        self._exchange = PseudoGradientExchange(
            topology.assign_learners(runtime.world_size), model.mesh.learner_group, config.diloco.quantization
        )
        self._velocity = {name: torch.zeros_like(parameter.data) for name, parameter in self._parameters.items()}
        self._outer_step = torch.zeros((), dtype=torch.int64)
        self._is_combining = False
        self._runtime = runtime

    @cached_property
    def bytes_per_learner(self) -> int:
        """Number of bytes that each learner sends in an outer step: its encoded pseudo-gradient, or this rank's shard of it."""
        return self._exchange.compute_bytes_per_learner(self._global_parameters)

    @property
    def is_prepared(self) -> bool:
        """True if the step of every local learner is prepared (see Optimizer.is_prepared)."""
        return all(learner.inner_optimizer.is_prepared for learner in self.learners)

    @property
    def is_updating(self) -> bool:
        """True while an update or an exchange is in progress: this rank's state is then not that after a step, or not known to be."""
        return self._is_combining or any(learner.inner_optimizer.is_updating for learner in self.learners)

    @property
    def last_step(self) -> int:
        """Number of the last step that all local learners ran in this process; -1 if some of them ran one step more than others."""
        steps = {learner.inner_optimizer.last_step for learner in self.learners}
        return steps.pop() if len(steps) == 1 else -1

    def step(self, number: int) -> None:
        """Run step `number` of each local learner, which must be prepared. No communication."""
        for learner in self.learners:
            learner.step(number)

    @torch.no_grad()
    def finish_round(self, step: int, timer: StepTimer, check_results: Callable[[], None]) -> None:
        """Run the outer step if `step` is the last of a round, and the outer step has not run yet. Collective: all ranks must call it.

        Nothing changes before all communication of the outer step is complete. `check_results` is then called, and raises an exception if
        the results are invalid.
        """
        is_round_end = step > 0 and (step % self._settings.inner_steps == 0 or step == self._last_step)
        if not is_round_end or int(self._outer_step) == step:
            return
        # If another rank fails meanwhile, this rank does not know whether other ranks have run the outer step. The exception leaves
        # `is_updating` set, so that its state does not become part of a just-in-time checkpoint.
        self._is_combining = True
        global_parameters = self._global_parameters
        with timer.time_phase(COMMUNICATION):
            means = self._exchange.compute_mean(global_parameters, self.learners)
            if self._runtime.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            check_results()
        self._update_global_parameters(means)
        for learner in self.learners:
            learner.start_from(global_parameters)
        self._outer_step.fill_(step)
        self._is_combining = False

    def start_learners(self, loaded_names: Collection[str]) -> None:
        """Set the parameters of all local learners to the global ones, except `loaded_names`, the state tensors of a checkpoint.

        Also log how the learners are assigned.
        """
        if self._runtime.is_rank_zero:
            groups = self._runtime.config.topology.assign_learners(self._runtime.world_size)
            counts = " + ".join(str(len(learners)) for learners in groups)
            sent = f"each sends {self.bytes_per_learner:,} bytes every {self._settings.inner_steps} steps"
            LOG.info("DiLoCo: learners %d (%s by replicas); %s", self.learner_count, counts, sent)
        for learner in self.learners:
            prefix = f"{learner.name_prefix}{PARAMETERS}/"
            learner.start_from({name: value for name, value in self._global_parameters.items() if f"{prefix}{name}" not in loaded_names})

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the outer optimizer, and of the learners of this rank, named KIND/PARAMETER. They are not copies."""
        tensors = {f"{_VELOCITY}/{name}": tensor for name, tensor in self._velocity.items()}
        for learner in self.learners:
            tensors |= learner.collect_state_tensors()
        return {**tensors, _OUTER_STEP: self._outer_step}

    def reset_state(self, kept_names: Collection[str] = ()) -> None:
        """Set the state to that at the start of a run, except the tensors `kept_names`. `start_learners` sets the learners' parameters."""
        for name, tensor in [*((f"{_VELOCITY}/{key}", value) for key, value in self._velocity.items()), (_OUTER_STEP, self._outer_step)]:
            if name not in kept_names:
                tensor.zero_()
        for learner in self.learners:
            prefix = learner.name_prefix
            learner.inner_optimizer.reset_state({name.removeprefix(prefix) for name in kept_names if name.startswith(prefix)})

    @property
    def _global_parameters(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def _update_global_parameters(self, gradients: dict[str, Tensor]) -> None:
        outer = self._settings.outer_optimizer
        for name, gradient in gradients.items():
            velocity, parameter = self._velocity[name].mul_(outer.momentum).add_(gradient), self._parameters[name]
            parameter.sub_(gradient.add_(velocity, alpha=outer.momentum), alpha=outer.learning_rate)
        torch.autograd.graph.increment_version(list(self._parameters.values()))
