"""The optimizer of a run with learners: one inner optimizer per local learner, and the outer optimizer of the global parameters.

The global parameters are those of the model while no learner uses it, so validation, sampling and exports need not know about learners.

    round        `inner_steps` steps, in which each learner updates its own parameters
    outer step   after a round, and after the run's last step: an update of the global parameters p by SGD with Nesterov momentum,
                     v = m v + g,   p = p - l (g + m v),
                 where g is the mean pseudo-gradient of the learners (see exchange.py), m the momentum and l the learning rate.
                 Then all learners continue from p. They keep their optimizer state.

With P fragments (Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512), the layers are divided over them with a stride: layer i
belongs to fragment i modulo P. Each fragment has its own outer steps: it is exchanged once per round of H steps, fragment p after the
steps p H / P, p H / P + H and so on. With an overlap of t steps, the exchange of a fragment that starts after step s ends after step s +
t. At most one exchange is in progress at a time, since t is less than H / P. After the last step of the run, the exchange in progress
ends, and all fragments are exchanged without overlap.

With an overlap, learners train on while a fragment is exchanged. They then continue from a mixture of their own parameters and the global
ones. The parameters of the fragment are sent one after another, over the steps of the overlap: if all were sent at once, the reductions of
each step would wait behind them on a slow link.

The step after which exchanges last started or ended is part of the state. So a checkpoint that surviving ranks save between the last inner
step of a round and its outer step is complete: the outer step runs when it is loaded. So are the pseudo-gradients that are being exchanged:
their exchange starts again when they are loaded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import ceil

import torch
from torch import Tensor

from swarmtrain.config.schema.optimizer import DilocoConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.training_state import TrainingState
from swarmtrain.trainer.diloco.exchange import MAX_BUCKET_ELEMENTS, PendingMean, PseudoGradientExchange, divide_into_buckets
from swarmtrain.trainer.diloco.learner import PARAMETERS, Learner
from swarmtrain.trainer.health.step_timer import COMMUNICATION, StepTimer
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout
from swarmtrain.trainer.model.objective import EmbeddingObjective
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.fsdp import FsdpModel
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_VELOCITY, _PROGRESS = "outer_momentum", "outer_progress/state"
_LAYER_PATTERN = re.compile(r"^blocks\.(\d+)\.")


class DilocoOptimizer:
    """Inner and outer optimizers, the learners of this rank, and the global parameters."""

    def __init__(self, runtime: Runtime, model: ParallelModel, optimizer: Optimizer) -> None:
        """Create the learners of this rank. `optimizer`: inner optimizer of the first of them; the others have the same settings.

        Raises TrainingError if the objective compares all samples of a global batch, which learners divide.
        """
        if isinstance(model.local_model.objective, EmbeddingObjective):
            raise TrainingError(
                "is not supported by objectives that compare the embeddings of all samples of a step",
                place="config topology.learners",
                hint="remove topology.learners",
            )
        config, local_learners = runtime.config, model.mesh.local_learners
        inner_optimizers = [optimizer, *(Optimizer(model, config) for _ in local_learners[1:])]
        overlaps, sharded_model = config.diloco.overlap > 0, model.wrapped_model if isinstance(model.wrapped_model, FsdpModel) else None
        self.learners = [
            Learner(index, each, overlaps=overlaps, sharded_model=sharded_model)
            for index, each in zip(local_learners, inner_optimizers, strict=True)
        ]
        """The learners of this rank."""
        self.learner_count = config.topology.learners or 1
        """Number of learners on all ranks together."""
        self._runtime, self._settings, self._parameters = runtime, config.diloco, optimizer.parameters
        self._fragments = assign_fragments(self._parameters, config.transformer_architecture.num_layers, config.diloco.fragments)
        groups = config.topology.assign_learners(runtime.world_size)
        self._exchange = PseudoGradientExchange(groups, model.mesh.learner_group, config.diloco.quantization)
        self._pending_means: list[PendingMean] = []
        """The parts of the overlapped exchange that have started."""
        self._velocity = {name: torch.zeros_like(parameter.data) for name, parameter in self._parameters.items()}
        self._progress = torch.zeros(2, dtype=torch.int64)
        """The step after which exchanges last started or ended, and the one after which that in progress started; 0 if there is none."""
        self._is_combining = False

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
    def finish_round(self, step: int, timer: StepTimer, timeout: CollectiveTimeout, check_results: Callable[[], None]) -> None:
        """Run the outer steps, and start or continue the exchanges, that are due after `step`. All ranks must call it.

        It may be called again after the same step, also in a new world: what ran already does not run again.

        `check_results` is called when collectives are complete, before their results are used, and raises an exception if they are invalid.
        `timeout`: that of collectives; exchanges may take much longer than a step.
        """
        is_last = step > 0 and step == self._runtime.config.trainer.train_iterations
        changed_step, start_step = map(int, self._progress)
        if not self._settings.overlap:
            start_step = 0  # it is 0, except in a memory estimate, where tensors have no values
        is_ending = 0 < start_step < step and (is_last or step >= start_step + self._settings.overlap)
        starting = range(len(self._fragments)) if is_last else list_starting_fragments(self._settings, step)
        if step == changed_step or not (is_ending or starting):
            if start_step:
                with timer.time_phase(COMMUNICATION), timeout.use_initial_timeout():
                    self._continue_overlapped_exchange(start_step, step)
            return
        # If a rank fails before all ranks have reached the barrier, no rank has changed anything. If one fails later, ranks do not know
        # which others have completed the changes. The exception then leaves `is_updating` set, so that their state is not part of a
        # just-in-time checkpoint.
        self._is_combining = True
        with timer.time_phase(COMMUNICATION):
            collectives.barrier()
        with timer.time_phase(COMMUNICATION), timeout.use_initial_timeout():
            if is_ending:
                self._end_overlapped_exchange(start_step, check_results)
                start_step = 0
            for fragment in starting:
                if self._settings.overlap and not is_last:
                    self._start_overlapped_exchange(step)
                    start_step = step
                else:
                    self._exchange_fragment(self._fragments[fragment], check_results)
        self._progress.copy_(torch.tensor([step, start_step]))
        self._is_combining = False

    def start_learners(self, loaded_names: Collection[str]) -> None:
        """Set the parameters of all local learners to the global ones, except `loaded_names`, the state tensors of a checkpoint.

        Also log how the learners are assigned.
        """
        if self._runtime.is_rank_zero:
            groups = self._runtime.config.topology.assign_learners(self._runtime.world_size)
            counts = " + ".join(str(len(learners)) for learners in groups)
            sent = f"each sends {self.bytes_per_learner:,} bytes every {self._settings.inner_steps} steps"
            LOG.info("DiLoCo: learners %d, by group of replicas %s; %s", self.learner_count, counts, sent)
        for learner in self.learners:
            prefix = f"{learner.name_prefix}{PARAMETERS}/"
            learner.approach({name: value for name, value in self._global_parameters.items() if f"{prefix}{name}" not in loaded_names})

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the outer optimizer, and of the learners of this rank, named KIND/PARAMETER. They are not copies."""
        tensors = self._collect_outer_tensors()
        for learner in self.learners:
            tensors |= learner.collect_state_tensors()
        return tensors

    def reset_state(self, kept_names: Collection[str] = ()) -> None:
        """Set the state to that at the start of a run, except the tensors `kept_names`. `start_learners` sets the learners' parameters."""
        for name, tensor in self._collect_outer_tensors().items():
            if name not in kept_names:
                tensor.zero_()
        for learner in self.learners:
            prefix = learner.name_prefix
            learner.inner_optimizer.reset_state({name.removeprefix(prefix) for name in kept_names if name.startswith(prefix)})

    def _collect_outer_tensors(self) -> dict[str, Tensor]:
        return {**{f"{_VELOCITY}/{name}": tensor for name, tensor in self._velocity.items()}, _PROGRESS: self._progress}

    @property
    def _global_parameters(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._parameters.items()}

    def _exchange_fragment(self, names: Sequence[str], check_results: Callable[[], None]) -> None:
        """Exchange the pseudo-gradients of the parameters `names`, and run the outer step.

        A bucket is encoded while the one before it is sent.
        """
        pending = (
            self._exchange.start([learner.compute_pseudo_gradients(self._global_parameters, bucket) for learner in self.learners])
            for bucket in divide_into_buckets({name: self._parameters[name] for name in names}, MAX_BUCKET_ELEMENTS)
        )
        self._run_outer_step((current for current, _next in pairwise(chain(pending, [None])) if current), check_results)

    def _start_overlapped_exchange(self, step: int) -> None:
        """Start the exchange that is due after `step`. Its pseudo-gradients become part of the learners' state."""
        for learner in self.learners:
            for name, gradient in learner.compute_pseudo_gradients(self._global_parameters, self._list_in_flight_names(step)).items():
                learner.in_flight[name].copy_(gradient)
        self._continue_overlapped_exchange(step, step)

    def _continue_overlapped_exchange(self, start_step: int, step: int) -> None:
        """Start the parts of the exchange that are due after `step` and have not started in this world.

        `start_step`: step after which the exchange started, maybe in an earlier world.
        """
        parameters = {name: self._parameters[name] for name in self._list_in_flight_names(start_step)}
        part_elements = sum(parameter.numel() for parameter in parameters.values()) / self._settings.overlap
        buckets = divide_into_buckets(parameters, min(ceil(part_elements), MAX_BUCKET_ELEMENTS))
        sizes = [sum(parameters[name].numel() for name in bucket) for bucket in buckets]
        due = sum(earlier < part_elements * (step - start_step + 1) for earlier in accumulate(sizes[:-1], initial=0))
        for bucket in buckets[len(self._pending_means) : due]:
            self._pending_means.append(self._exchange.start([{name: each.in_flight[name] for name in bucket} for each in self.learners]))

    def _end_overlapped_exchange(self, start_step: int, check_results: Callable[[], None]) -> None:
        """Run the outer step of the exchange that started after `start_step`."""
        self._continue_overlapped_exchange(start_step, start_step + self._settings.overlap)
        self._run_outer_step(self._pending_means, check_results)
        self._pending_means = []

    def _list_in_flight_names(self, start_step: int) -> list[str]:
        """Return the names of the parameters whose overlapped exchange starts after `start_step`."""
        return [name for fragment in list_starting_fragments(self._settings, start_step) for name in self._fragments[fragment]]

    def _run_outer_step(self, pending_means: Iterable[PendingMean], check_results: Callable[[], None]) -> None:
        """Wait for the mean pseudo-gradients, update the global parameters with them, and let the learners continue from these."""
        gradients = {name: gradient for pending in pending_means for name, gradient in pending.wait().items()}
        if self._runtime.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        check_results()
        outer = self._settings.outer_optimizer
        for name, gradient in gradients.items():
            velocity, parameter = self._velocity[name].mul_(outer.momentum).add_(gradient), self._parameters[name]
            parameter.sub_(gradient.add_(velocity, alpha=outer.momentum), alpha=outer.learning_rate)
        torch.autograd.graph.increment_version(list(self._parameters.values()))
        for learner in self.learners:
            learner.approach({name: self._parameters[name].data for name in gradients}, self._settings.mixing)


def list_starting_fragments(settings: DilocoConfig, step: int) -> list[int]:
    """Return the fragments whose exchange starts after `step`, unless it is the last of the run: at most one."""
    interval = settings.inner_steps // settings.fragments
    return [step % settings.inner_steps // interval] if step > 0 and step % interval == 0 else []


def assign_fragments(parameter_names: Iterable[str], layer_count: int, fragment_count: int) -> list[list[str]]:
    """Return the names of the parameters of each fragment. Embedding, final norm and output layer count as parts of the nearest layer."""
    fragments: list[list[str]] = [[] for _ in range(fragment_count)]
    for name in parameter_names:
        match = _LAYER_PATTERN.match(name)
        layer = int(match[1]) if match else 0 if name.startswith(("embedding.", "positions.")) else layer_count - 1
        fragments[layer % fragment_count].append(name)
    return fragments


@dataclass(frozen=True)
class DilocoTrainingState(TrainingState):
    """State of a model, whose parameters are the global ones, and of its DilocoOptimizer, that a run saves in its checkpoints."""

    optimizer: DilocoOptimizer

    @property
    def topology(self) -> Mapping[str, int]:
        return {**super().topology, "learners": self.optimizer.learner_count}

    def write_missing_values(self, loaded_names: Collection[str] = ()) -> None:
        super().write_missing_values(loaded_names)
        self.optimizer.start_learners({name.removeprefix("optimizer/") for name in loaded_names})
