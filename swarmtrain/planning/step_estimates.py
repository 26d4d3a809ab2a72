"""Estimate the time per step of a run by each way of training that its config allows, from what `swarmtrain doctor` has measured.

Pure. All times are in seconds. The estimate of a step is

    the micro batches of the busiest rank × the time of one + the rest of a step + the network's time that is not hidden

where the network's time of an all-reduce follows from an all-reduce that doctor has measured on the same nodes: latency + bytes / rate. A
ring of N ranks on n nodes sends 2 (N - 1) / N of its bytes over each node's link. A GPU hides communication behind the backward pass of
the last micro batch; between CPUs, communication takes the cores that compute.

With DiLoCo, each learner sends its encoded parameters once per round to those of all other groups of replicas: G groups send G - 1 times
the bytes over each link. The estimate has a step's part of that. Steps that overlap with an exchange hide it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.schema.fields.gradient_compression import GradientCompression
from swarmtrain.config.schema.optimizer import DilocoConfig, Quantization
from swarmtrain.config.schema.topology import DataParallelType, TopologyConfig
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.planning.plan import Plan

_ZERO, _BF16, _POWERSGD, _DILOCO = "zero", str(GradientCompression.bf16), str(GradientCompression.powersgd), "diloco"
_DDP = {"topology.data_parallel_type": "ddp", "optimizer.zero": False, "topology.gradient_compression": "none", "topology.learners": None}
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "ddp": _DDP,
    _ZERO: {**_DDP, "optimizer.zero": True},
    "fsdp": {**_DDP, "topology.data_parallel_type": "fsdp"},
    _BF16: {**_DDP, "topology.gradient_compression": _BF16},
    _POWERSGD: {**_DDP, "topology.gradient_compression": _POWERSGD},
}
"""The config values that select each way of training, except DiLoCo, for which they depend on the nodes."""
_DILOCO_STEPS = 100
"""Steps per round of the estimate for DiLoCo, if the config has no learners."""
_BYTES_PER_VALUE = {Quantization.int8: 1 + 4 / 256, Quantization.int4: 0.5 + 4 / 256}
"""Bytes of an encoded value of a pseudo-gradient, with its part of the scale of a block of 256."""
_UNKNOWN = "are not known: swarmtrain doctor CONFIG --step-times measures them"
_BACKWARD_PART = 2 / 3
"""Part of the time of a micro batch that its backward pass takes."""
_WORTHWHILE_GAIN = 0.95
"""Another way of training is recommended if it takes at most this part of the time of the config's."""


@dataclass(frozen=True)
class AllReduceTime:
    """Duration of an all-reduce with one process on each of `node_count` nodes: `latency` + bytes / `rate` (bytes per second)."""

    node_count: int
    latency: float
    rate: float
    on_gpus: bool


@dataclass(frozen=True)
class RankStepTime:
    """Times of a rank that trains alone, with the other ranks of its node: of one micro batch, and of the rest of a step."""

    micro_batch_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class ModelStepTimes:
    """Step times of one model. `digest`: see compute_step_digest. `nodes`: by host."""

    digest: str
    trainable_parameters: int
    low_rank_values: int
    """Number of values that PowerSGD sends of the gradients."""
    nodes: Mapping[str, RankStepTime]


@dataclass(frozen=True)
class ClusterMeasurement:
    """What one run of `swarmtrain doctor` has measured, at `time` (seconds since the epoch), on `hosts`."""

    time: float
    hosts: tuple[str, ...]
    all_reduce: AllReduceTime | None = None
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Bytes per second of the link between two hosts, in the slower direction."""
    step_times: ModelStepTimes | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement in JSON-compatible form; parse_measurement is the inverse."""
        numbers = {host: number for number, host in enumerate(self.hosts)}
        links = [[numbers[a], numbers[b], round(rate)] for (a, b), rate in self.links.items()]
        return {
            "time": self.time,
            "hosts": list(self.hosts),
            "all_reduce": asdict(self.all_reduce) if self.all_reduce else None,
            "links": links,
            "step_times": asdict(self.step_times) if self.step_times else None,
        }

    def covers(self, hosts: Sequence[str]) -> bool:
        """Return whether all of `hosts` were measured."""
        return set(hosts) <= set(self.hosts)


@dataclass(frozen=True)
class StepEstimate:
    """The estimated time of a step by one way of training. `settings`: config values that select it, by key; empty: the config's own."""

    name: str
    seconds: float
    network_seconds: float
    settings: Mapping[str, object]
    is_exact: bool = True
    """Whether losses are those of one rank, without compression and learners."""


@dataclass(frozen=True)
class StepEstimates:
    """Estimates for one plan, the config's own way first, or why there are none."""

    rows: tuple[StepEstimate, ...] = ()
    missing_reason: str = ""
    exact_sum_seconds: float = 0.0
    """The part of the network's time of `ddp` that exact sums cost, which send 8 bytes per parameter instead of 4."""
    step_times_at: float = 0.0
    """When the step times were measured, in seconds since the epoch."""
    links_at: float = 0.0
    """When the links were measured."""

    @property
    def recommended(self) -> tuple[StepEstimate, ...]:
        """The fastest exact way, then the fastest of all, each only if it is clearly faster than the one before, or than the config's."""
        recommended = self.rows[:1]
        for candidates in ([row for row in self.rows if row.is_exact], self.rows):
            best = min(candidates, key=lambda row: row.seconds, default=None)
            if best and best.seconds <= _WORTHWHILE_GAIN * recommended[-1].seconds:
                recommended = (*recommended, best)
        return recommended[1:]


def compute_step_digest(config: Config) -> str:
    """Return a digest of what determines the time of a micro batch: the model, the size of micro batches, and what is trained."""
    values = json.loads(config.to_json())
    parts = [values["transformer_architecture"], values["training_groups"], config.data.rows_per_sample]
    parts += [
        config.topology.samples_per_micro_batch,
        values["topology"]["activation_checkpointing_type"],
        values["trainer"]["compile"],
        config.topology.powersgd.matrix_approximation_rank,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def explain_unmeasurable_steps(plan: Plan) -> str:
    """Return why doctor cannot measure the step times of `plan`; empty if it can."""
    if not plan.trains_built_in_model:
        return "the run trains a model of its own script"
    if plan.config.topology.ranks_per_replica > 1:
        return "replicas of several ranks (tensor, context or pipeline parallelism) are not measured"
    return ""


def estimate_steps(plan: Plan, measurements: Sequence[ClusterMeasurement]) -> StepEstimates:
    """Return the estimates for `plan`, from the newest of `measurements` that have what is needed."""
    if reason := explain_unmeasurable_steps(plan):
        return StepEstimates(missing_reason=reason)
    hosts = [node.host for node in plan.available_nodes]
    newest_first = sorted(measurements, key=lambda measurement: -measurement.time)
    digest = compute_step_digest(plan.config)
    timed = next((each for each in newest_first if each.step_times and each.step_times.digest == digest and each.covers(hosts)), None)
    linked = next((each for each in newest_first if each.all_reduce and each.covers(hosts)), None)
    if timed is None or timed.step_times is None or not hosts:
        return StepEstimates(missing_reason=f"the step times of this model {_UNKNOWN}")
    if len(hosts) > 1 and linked is None:
        return StepEstimates(missing_reason=f"the links between these nodes {_UNKNOWN}")
    model = _StepModel(plan, timed.step_times, linked.all_reduce if linked and len(hosts) > 1 else None)
    links_at = linked.time if linked and len(hosts) > 1 else 0.0
    rows = tuple(model.estimate_all())
    return StepEstimates(rows, exact_sum_seconds=model.exact_sum_seconds, step_times_at=timed.time, links_at=links_at)


class _StepModel:
    """The model of the time of a step of one plan."""

    def __init__(self, plan: Plan, times: ModelStepTimes, all_reduce: AllReduceTime | None) -> None:
        self._topology, self._precision = plan.config.topology, plan.config.transformer_architecture.precision
        self._nodes = [(times.nodes[node.host], node.slots) for node in plan.available_nodes]
        self._config, self._all_reduce = plan.config, all_reduce
        self._parameters, self._low_rank_values = times.trainable_parameters, times.low_rank_values
        self._ranks = sum(slots for _, slots in self._nodes)
        self._micro_batches = max(self._topology.assign_micro_batches(self._ranks), default=0)
        self._own = _name_own_way(plan.config)

    @property
    def exact_sum_seconds(self) -> float:
        """Seconds of the network that sums in float64 take in addition to those in float32."""
        is_exact = self._precision is Precision.float32 and self._gradient_bytes == 8
        return self._time_all_reduce(8 * self._parameters) - self._time_all_reduce(4 * self._parameters) if is_exact else 0.0

    def estimate_all(self) -> Iterator[StepEstimate]:
        """Yield the estimate of the config's own way of training, then of each other one."""
        names = [self._own, *(name for name in _SETTINGS if name != self._own)]
        for name in names:
            if name == _DILOCO:
                yield self._estimate_learners(self._config.topology, self._config.diloco, {})
                continue
            network, settings = self._time_network(name), {} if name == self._own else self._list_changes(_SETTINGS[name])
            yield StepEstimate(name, self._time_step(network), network, settings, is_exact=name not in (_BF16, _POWERSGD))
        if self._own != _DILOCO and (settings := self._choose_learners()):
            topology = self._topology.model_copy(update={"learners": settings["topology.learners"]})
            diloco = DilocoConfig(inner_steps=_DILOCO_STEPS, quantization=Quantization.int8)
            yield self._estimate_learners(topology, diloco, self._list_changes(settings))
        if len(self._nodes) > 1:
            seconds = min(self._time_one_node(times, slots) for times, slots in self._nodes)
            yield StepEstimate("one node", seconds, 0.0, {"runner.nodes": 1}, is_exact=self._own != _DILOCO)

    def _list_changes(self, settings: Mapping[str, object]) -> Mapping[str, object]:
        """Return those of `settings` that the config does not have."""
        values = json.loads(self._config.to_json())
        changes = {key: value for key, value in settings.items() if values[key.partition(".")[0]][key.partition(".")[2]] != value}
        return {"diloco": {}, **changes} if self._own == _DILOCO else changes

    def _choose_learners(self) -> Mapping[str, object]:
        """Return the settings of one learner per node; empty if there is one node only, or if the nodes or the batch are not divisible."""
        nodes = len(self._nodes)
        if nodes == 1 or len({slots for _, slots in self._nodes}) > 1 or self._topology.micro_batches_per_step % nodes:
            return {}
        learners = {"topology.learners": nodes, "diloco.inner_steps": _DILOCO_STEPS, "diloco.quantization": str(Quantization.int8)}
        return {**_DDP, "topology.micro_batch_assignment": "equal", **learners}

    def _estimate_learners(self, topology: TopologyConfig, diloco: DilocoConfig, settings: Mapping[str, object]) -> StepEstimate:
        """Return the estimate of DiLoCo with the learners of `topology`; in a learner that has several nodes, gradients are summed, too."""
        groups, micro_batches = topology.assign_learners(self._ranks), max(topology.assign_micro_batches(self._ranks), default=0)
        is_sharded = topology.data_parallel_type is not DataParallelType.ddp or self._config.optimizer.zero
        senders = 1 if is_sharded else self._ranks // len(groups)
        value_bytes = _BYTES_PER_VALUE.get(diloco.quantization, 8 if self._precision is Precision.float64 else 4)
        sent = (len(groups) - 1) * max(map(len, groups)) * senders * value_bytes * self._parameters
        round_seconds = 0.0
        if self._all_reduce and len(groups) > 1:
            link_rate = self._all_reduce.rate * 2 * (1 - 1 / self._all_reduce.node_count)
            computed = self._time_computation(micro_batches)
            fragment_seconds = self._all_reduce.latency + sent / diloco.fragments / link_rate
            round_seconds = diloco.fragments * max(0.0, fragment_seconds - diloco.overlap * computed)
        network = round_seconds / diloco.inner_steps
        if len(groups) < len(self._nodes):
            network += self._time_all_reduce(self._gradient_bytes * self._parameters)
        return StepEstimate(_DILOCO, self._time_computation(micro_batches) + network, network, settings, is_exact=False)

    @property
    def _gradient_bytes(self) -> int:
        """Bytes per parameter of the gradients that are summed: see trainer/parallel/ddp.py."""
        if self._precision is Precision.float32:
            return 8 if self._topology.micro_batches_per_step > 2 else 4
        return 8 if self._precision is Precision.float64 else 4

    @property
    def _weight_bytes(self) -> int:
        return {Precision.float32: 4, Precision.float64: 8}.get(self._precision, 2)

    def _time_network(self, name: str) -> float:
        """Return the seconds that the network takes in a step. A reduce-scatter or an all-gather is half of an all-reduce."""
        if name == _BF16:
            return self._time_all_reduce(2 * self._parameters)
        if name == _POWERSGD:
            return self._time_all_reduce(4 * self._low_rank_values)
        gradients = self._time_all_reduce(self._gradient_bytes * self._parameters)
        weights = self._time_all_reduce(self._weight_bytes * self._parameters)
        if name == DataParallelType.fsdp:  # each micro batch gathers the weights for both passes
            return self._micro_batches * (weights + gradients / 2)
        return (gradients + weights) / 2 if name == _ZERO else gradients

    def _time_all_reduce(self, size: float) -> float:
        """Return the seconds of an all-reduce of `size` bytes over all ranks."""
        if self._all_reduce is None:
            return 0.0
        sent = (1 - 1 / self._ranks) / (1 - 1 / self._all_reduce.node_count)
        return self._all_reduce.latency + size * sent / self._all_reduce.rate

    def _time_step(self, network: float) -> float:
        hidden = _BACKWARD_PART * self._slowest.micro_batch_seconds if self._all_reduce and self._all_reduce.on_gpus else 0.0
        return self._time_computation(self._micro_batches) + max(0.0, network - hidden)

    def _time_computation(self, micro_batches: int) -> float:
        return micro_batches * self._slowest.micro_batch_seconds + self._slowest.step_seconds

    @property
    def _slowest(self) -> RankStepTime:
        return max((times for times, _ in self._nodes), key=lambda times: times.micro_batch_seconds)

    def _time_one_node(self, times: RankStepTime, slots: int) -> float:
        return -(-self._topology.micro_batches_per_step // slots) * times.micro_batch_seconds + times.step_seconds


def _name_own_way(config: Config) -> str:
    """Return the name of the way of training of `config`."""
    if config.topology.learners is not None:
        return _DILOCO
    if config.topology.gradient_compression is not GradientCompression.none:
        return str(config.topology.gradient_compression)
    return _ZERO if config.optimizer.zero else str(config.topology.data_parallel_type)


def parse_measurement(values: Mapping[str, Any]) -> ClusterMeasurement:
    """Return the measurement that `to_dict` has converted. Raises LookupError, TypeError or ValueError if they are malformed."""
    hosts = tuple(map(str, values["hosts"]))
    return ClusterMeasurement(
        float(values["time"]),
        hosts,
        AllReduceTime(**values["all_reduce"]) if values["all_reduce"] else None,
        {(hosts[a], hosts[b]): float(rate) for a, b, rate in values["links"]},
        _parse_step_times(values["step_times"]) if values["step_times"] else None,
    )


def _parse_step_times(values: Mapping[str, Any]) -> ModelStepTimes:
    nodes = {str(host): RankStepTime(**times) for host, times in values["nodes"].items()}
    return ModelStepTimes(str(values["digest"]), int(values["trainable_parameters"]), int(values["low_rank_values"]), nodes)
