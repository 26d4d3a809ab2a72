"""Resolve runner.swarm.gpu, if it is not set, from the GPUs that the machines of an inventory declare or had when they were last probed.

Pure. The decision depends on all machines that the run may use, also on those that are down, so that a redeploy does not change it.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.planning.inventory import Machine


def resolve_gpu_mode(config: Config, machines: Sequence[Machine], node_count: int) -> tuple[GpuMode, str]:
    """Return the GPU mode of `config`, and the reason if the config does not set it.

    `machines`: those that the config allows, of which the run uses `node_count`; if it lists its hosts, all of them must have GPUs.
    """
    runner = config.runner
    if runner.swarm.gpu is not None:
        return runner.swarm.gpu, ""
    if runner.swarm.gpu_ids or any(host.gpus for host in runner.host_entries):
        return GpuMode.visible, "the config lists GPUs"
    if runner.capabilities.has_equal_nodes:
        return (GpuMode.visible, "Slurm allocates GPUs") if runner.slurm.requested_gpus_per_node else (GpuMode.none, "")
    kind = runner.swarm.generic_resource
    required = len(machines) if runner.hosts else node_count
    if machines and runner.capabilities.has_managers and sum(bool(machine.resources.get(kind)) for machine in machines) >= required:
        return GpuMode.reserve, f"the hosts declare {kind}"
    with_gpus = [machine for machine in machines if machine.count_gpus(kind)]
    if machines and len(with_gpus) >= required:
        return GpuMode.visible, "the hosts have GPUs"
    return GpuMode.none, _explain_missing_gpus(config, machines, with_gpus)


def _explain_missing_gpus(config: Config, machines: Sequence[Machine], with_gpus: Sequence[Machine]) -> str:
    """Return why a run with `machines` uses no GPUs; empty for a launcher whose ranks see the GPUs of their machine in any case."""
    capabilities = config.runner.capabilities
    if capabilities.sees_all_gpus or not capabilities.runs_in_containers:
        return ""
    if not capabilities.has_managers:
        return "to use GPUs, set runner.swarm.gpu: visible"
    others = [machine for machine in machines if machine not in with_gpus]
    unprobed = [machine.host for machine in others if machine.gpu_count is None]
    if with_gpus:
        return f"{_format_hosts(with_gpus)} {'has' if len(with_gpus) == 1 else 'have'} GPUs, but not {_format_hosts(others)}"
    if unprobed:
        return "no host is known to have GPUs; swarmtrain doctor CONFIG looks for them"
    return "the hosts have no GPUs"


def _format_hosts(machines: Sequence[Machine]) -> str:
    names = [machine.host for machine in machines]
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} others"
