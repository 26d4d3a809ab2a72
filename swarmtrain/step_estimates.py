"""Estimate the time per step of a run by each way of training that its config allows, from what `swarmtrain doctor` has measured.

Pure. All times are in seconds. The estimate of a step is

    the micro batches of the busiest rank × the time of one + the rest of a step + the network's time that is not hidden

where the network's time of an all-reduce follows from an all-reduce that doctor has measured on the same nodes: latency + bytes / rate. A
ring of N ranks on n nodes sends 2 (N - 1) / N of its bytes over each node's link. A GPU hides communication behind the backward pass of
the last micro batch; between CPUs, communication takes the cores that compute.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.schema.fields.gradient_compression import GradientCompression
from swarmtrain.config.schema.topology import DataParallelType
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.plan import Plan

_ZERO, _BF16, _POWERSGD = "zero", str(GradientCompression.bf16), str(GradientCompression.powersgd)
_DDP = {"topology.data_parallel_type": "ddp", "optimizer.zero": "false", "topology.gradient_compression": "none"}
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "ddp": _DDP,
    _ZERO: {**_DDP, "optimizer.zero": "true"},
    "fsdp": {**_DDP, "topology.data_parallel_type": "fsdp"},
    _BF16: {**_DDP, "topology.gradient_compression": _BF16},
    _POWERSGD: {**_DDP, "topology.gradient_compression": _POWERSGD},
}
"""The config values that select each way of training."""
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
    settings: Mapping[str, str]

    @property
    def is_exact(self) -> bool:
        """Whether the sums of gradients over replicas are those of the config without compression."""
        return self.name not in (_BF16, _POWERSGD)


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
    def recommended(self) -> StepEstimate | None:
        """The fastest way, if it is clearly faster than the config's own."""
        if not self.rows:
            return None
        best = min(self.rows, key=lambda row: row.seconds)
        return best if best.seconds <= _WORTHWHILE_GAIN * self.rows[0].seconds else None


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
    if plan.config.topology.learners is not None:
        return "learners (DiLoCo) are not estimated"
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
        compression = self._topology.gradient_compression
        self._own = _ZERO if plan.config.optimizer.zero else str(self._topology.data_parallel_type)
        self._own = self._own if compression is GradientCompression.none else str(compression)

    @property
    def exact_sum_seconds(self) -> float:
        """Seconds of the network that sums in float64 take in addition to those in float32."""
        is_exact = self._precision is Precision.float32 and self._gradient_bytes == 8
        return self._time_all_reduce(8 * self._parameters) - self._time_all_reduce(4 * self._parameters) if is_exact else 0.0

    def estimate_all(self) -> Iterator[StepEstimate]:
        """Yield the estimate of the config's own way of training, then of each other one."""
        names = [self._own, *(name for name in _SETTINGS if name != self._own)]
        for name in names:
            network = self._time_network(name)
            yield StepEstimate(name, self._time_step(network), network, {} if name == self._own else self._list_changes(_SETTINGS[name]))
        if len(self._nodes) > 1:
            yield StepEstimate(
                "one node", min(self._time_one_node(times, slots) for times, slots in self._nodes), 0.0, {"runner.nodes": "1"}
            )

    def _list_changes(self, settings: Mapping[str, str]) -> Mapping[str, str]:
        """Return those of `settings` that the config does not have."""
        values = json.loads(self._config.to_json())
        current = {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in settings}
        return {key: value for key, value in settings.items() if str(current[key]).lower() != value}

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
        slowest = max((times for times, _ in self._nodes), key=lambda times: times.micro_batch_seconds)
        hidden = _BACKWARD_PART * slowest.micro_batch_seconds if self._all_reduce and self._all_reduce.on_gpus else 0.0
        return self._micro_batches * slowest.micro_batch_seconds + slowest.step_seconds + max(0.0, network - hidden)

    def _time_one_node(self, times: RankStepTime, slots: int) -> float:
        return -(-self._topology.micro_batches_per_step // slots) * times.micro_batch_seconds + times.step_seconds


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
