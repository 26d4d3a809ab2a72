"""What a node of a run claims on a machine, from the config of the run and the resources of the machine. Pure."""

from __future__ import annotations

from swarmtrain.config.schema.runner import GpuMode, RunnerConfig
from swarmtrain.inventory import Machine
from swarmtrain.launchers.swarm.queueing.queue_model import CORES, GPU_ID_PREFIX, UNKNOWN_GPUS, Claims
from swarmtrain.node_selection import PlannedNode

_DEFAULT_KIND = "NVIDIA-GPU"
# Part of the unknown number of GPUs of a machine that one selected GPU claims: runs with different GPUs fit, a run with all GPUs does not.
_PART_OF_UNKNOWN = 1 / 1024


def build_capacity(machine: Machine) -> dict[str, float]:
    """Return the resources of `machine`: its cores, and the GPUs that it declares, or else those of its last probe."""
    capacity = {kind: float(amount) for kind, amount in machine.resources.items()}
    if not capacity and machine.gpu_count:
        capacity[_DEFAULT_KIND] = float(machine.gpu_count)
    return {**capacity, CORES: machine.cores}


def compute_claims(runner: RunnerConfig, node: PlannedNode, machine: Machine) -> Claims:
    """Return what `node` claims on `machine`.

    GPUs: as many as it reserves, or those that it sees. Cores: docker_config.cpus; without that, a node on GPUs claims the same part of the
    cores as of the GPUs, and a node without GPUs all cores. With `share`, everything but reserved GPUs is shared with other such runs.
    """
    capacity = build_capacity(machine)
    mode = runner.swarm.gpu or GpuMode.none
    gpus = {} if mode is GpuMode.none else _compute_gpus(runner, node, capacity)
    cores = capacity[CORES]
    if runner.docker_config.cpus is not None:
        cores = min(cores, runner.docker_config.cpus)
    elif gpus:
        cores *= _compute_gpu_fraction(gpus, capacity)
    claims = {**gpus, CORES: cores} if cores else gpus
    if not runner.share:
        return Claims(claims)
    reserved = gpus if mode is GpuMode.reserve else {}
    return Claims(reserved, {name: amount for name, amount in claims.items() if name not in reserved})


def _compute_gpus(runner: RunnerConfig, node: PlannedNode, capacity: dict[str, float]) -> dict[str, float]:
    kind = runner.swarm.generic_resource
    if runner.swarm.gpu is GpuMode.reserve:
        return {kind: float(node.slots)}
    known = capacity.get(kind) or capacity.get(_DEFAULT_KIND, 0.0)
    known_kind = kind if capacity.get(kind) else _DEFAULT_KIND
    if node.gpus:
        by_id = {f"{GPU_ID_PREFIX}{gpu}": 1.0 for gpu in node.gpus}
        return {**by_id, known_kind: min(known, float(len(node.gpus)))} if known else {**by_id, UNKNOWN_GPUS: _PART_OF_UNKNOWN}
    return {known_kind: known} if known else {UNKNOWN_GPUS: 1.0}


def _compute_gpu_fraction(gpus: dict[str, float], capacity: dict[str, float]) -> float:
    """Return which part of the machine's GPUs `gpus` are; 1 if the number of its GPUs is unknown."""
    fractions = [amount / capacity[kind] for kind, amount in gpus.items() if capacity.get(kind)]
    return min(1.0, max(fractions, default=1.0))
