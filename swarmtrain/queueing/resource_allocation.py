"""What a node of a run needs on a machine, from the config of the run and the resources of the machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarmtrain.config.schema.runner import GpuMode, RunnerConfig
from swarmtrain.launchers.common.engine_values import parse_environment
from swarmtrain.launchers.swarm.machines.generic_resources import count_resources_by_kind, get_assigned_resources
from swarmtrain.planning.inventory import Machine
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.queueing.decisions.queue_model import CORES, GPU_ID_PREFIX, UNKNOWN_GPUS, Allocation
from swarmtrain.render.process_environment import HIDDEN_GPUS_ENV, VISIBLE_DEVICES_VARIABLE

ApiObject = dict[str, Any]
_DEFAULT_KIND = "NVIDIA-GPU"
# Part of a machine's unknown number of GPUs for which one selected GPU counts: runs with other GPUs fit, a run with all GPUs does not.
_PART_OF_UNKNOWN = 1 / 1024


def build_capacity(machine: Machine) -> dict[str, float]:
    """Return the resources of `machine`: its cores, and the GPUs that it declares, or else those of its last probe."""
    capacity = {kind: float(amount) for kind, amount in machine.resources.items()}
    if not capacity and machine.gpu_count:
        capacity[_DEFAULT_KIND] = float(machine.gpu_count)
    return {**capacity, CORES: machine.cores}


def compute_allocation(runner: RunnerConfig, node: PlannedNode, machine: Machine) -> Allocation:
    """Return what `node` needs on `machine`.

    GPUs: as many as it reserves, or those that it sees. Cores: docker_config.cpus; without that, a node on GPUs gets the same part of the
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
    amounts = {**gpus, CORES: cores} if cores else gpus
    if not runner.share:
        return Allocation(amounts)
    reserved = gpus if mode is GpuMode.reserve else {}
    return Allocation(reserved, {name: amount for name, amount in amounts.items() if name not in reserved})


def compute_running_allocation(task: ApiObject, machine: Machine) -> Allocation:
    """Return what the container of a node uses on `machine`, by the spec of its task: the config of its run may have changed, or be gone.

    `task`: as the engine's API describes it. What the container shares counts fully.
    """
    capacity = build_capacity(machine)
    gpus = {kind: float(count) for kind, count in count_resources_by_kind(get_assigned_resources(task)).items()}
    variables = parse_environment((task["Spec"].get("ContainerSpec") or {}).get("Env"))
    visible = variables.get(VISIBLE_DEVICES_VARIABLE, "all")
    if not gpus and visible != HIDDEN_GPUS_ENV[VISIBLE_DEVICES_VARIABLE]:
        kind = next((name for name in capacity if name != CORES), _DEFAULT_KIND)
        gpus = _compute_visible_gpus(() if visible == "all" else visible.split(","), kind, capacity.get(kind, 0.0))
    limits = (task["Spec"].get("Resources") or {}).get("Limits") or {}
    cores = limits.get("NanoCPUs", 0) / 1e9 or capacity[CORES] * _compute_gpu_fraction(gpus, capacity)
    return Allocation({**gpus, CORES: cores} if cores else gpus)


def _compute_gpus(runner: RunnerConfig, node: PlannedNode, capacity: dict[str, float]) -> dict[str, float]:
    kind = runner.swarm.generic_resource
    if runner.swarm.gpu is GpuMode.reserve:
        return {kind: float(node.slots)}
    known = capacity.get(kind) or capacity.get(_DEFAULT_KIND, 0.0)
    known_kind = kind if capacity.get(kind) else _DEFAULT_KIND
    return _compute_visible_gpus(node.gpus, known_kind, known)


def _compute_visible_gpus(gpus: Sequence[str], kind: str, known: float) -> dict[str, float]:
    """Return the amounts for a node that sees `gpus`, by number or UUID; none: all. `known`: number of the machine's GPUs, 0 if unknown."""
    if not gpus:
        return {kind: known} if known else {UNKNOWN_GPUS: 1.0}
    by_id = {f"{GPU_ID_PREFIX}{gpu}": 1.0 for gpu in gpus}
    return {**by_id, kind: min(known, float(len(gpus)))} if known else {**by_id, UNKNOWN_GPUS: _PART_OF_UNKNOWN}


def _compute_gpu_fraction(gpus: dict[str, float], capacity: dict[str, float]) -> float:
    """Return which part of the machine's GPUs `gpus` are; 1 if the number of its GPUs is unknown."""
    fractions = [amount / capacity[kind] for kind, amount in gpus.items() if capacity.get(kind)]
    return min(1.0, max(fractions, default=1.0))
