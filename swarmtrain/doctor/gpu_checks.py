"""Checks that the ranks of each node see their GPUs, and use all of them; a finding names the engine or config settings that fix it."""

from __future__ import annotations

from collections.abc import Iterator

from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.doctor.probe_results import CHECKS, NodeFacts, ProbeResults
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.swarm.machines.generic_resources import format_gpu_settings
from swarmtrain.planning.node_selection import PlannedNode, format_count

# Minimum driver by CUDA's major version: since CUDA 11, the minimum driver is the same for all minor versions.
# NVIDIA, "CUDA Compatibility".
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
_RUNTIME_FIX = "nvidia-ctk runtime configure --runtime=docker --set-as-default; systemctl restart docker"


@CHECKS("devices", "the ranks on each node see the GPUs that are reserved for them")
def _check_visible_gpus(results: ProbeResults) -> Iterator[Finding]:
    if results.plan.gpu_mode is GpuMode.none:
        return
    for node in results.plan.nodes:
        if facts := results.nodes.get(node.name):
            yield from _check_visible_gpus_of_node(results, node.name, node.slots, facts)


@CHECKS("unused", "every GPU of the nodes is used by a rank, or can be reserved by other runs")
def _check_unused_gpus(results: ProbeResults) -> Iterator[Finding]:
    if results.plan.gpu_mode is GpuMode.reserve:
        return
    for node in results.plan.nodes:
        used_count = 0 if results.plan.gpu_mode is GpuMode.none else node.slots
        if (count := len(list_probed_gpus(results, node) or ())) <= used_count:
            continue
        if used_count:
            message = f"has {_format_gpu_count(count)}, but {format_count(used_count, 'rank')}"
            hint = f"-o runner.default_gpu_count={count}, or '{node.host} slots={count}' in runner.hosts"
        else:
            message = f"has {_format_gpu_count(count)}, but the run uses none (gpu: none)"
            hint = "-o runner.swarm.gpu=visible; without runner.swarm.gpu, the next plan uses the GPUs that this probe has found"
        yield Finding(results.describe_node(node.name), message, hint, fatal=False, why="GPUs without a rank are idle")


def list_probed_gpus(results: ProbeResults, node: PlannedNode) -> list[str] | None:
    """Return the UUIDs of all GPUs of the node's machine; None if the probe has not found out, because it saw a selection of them."""
    facts = results.nodes.get(node.name)
    if facts is None or node.gpus or results.plan.gpu_mode is GpuMode.reserve:
        return None
    return facts["machine_gpus"] or [gpu["uuid"] for gpu in facts["gpus"]]


@CHECKS("gpu-health", "no GPU reports a fault")
def _check_gpu_health(results: ProbeResults) -> Iterator[Finding]:
    faults = [(node.name, fault) for node in results.plan.nodes for fault in results.nodes.get(node.name, {}).get("gpu_faults", ())]
    faulty_nodes = {name for name, fault in faults if fault["is_hardware"]}
    can_quarantine = len(results.plan.nodes) - len(faulty_nodes) >= results.plan.min_nodes
    for name, fault in faults:
        is_hardware = bool(fault["is_hardware"])
        why = "a run quarantines a node whose GPU is faulty" if is_hardware else "the GPU works, but may be slower, or fail soon"
        yield Finding(results.describe_node(name), fault["message"], fault["hint"], fatal=is_hardware and not can_quarantine, why=why)


@CHECKS("driver", "GPU drivers support torch's CUDA version, and are the same on all nodes")
def _check_drivers(results: ProbeResults) -> Iterator[Finding]:
    drivers = {name: facts["gpus"][0]["driver"] for name, facts in results.nodes.items() if facts["gpus"]}
    for name, driver in drivers.items():
        cuda = str(results.collective_results.get(name, {}).get("cuda") or "")
        needed = _OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
        if int(driver.partition(".")[0]) < needed:
            message = f"driver {driver} is too old for CUDA {cuda}, which torch is built for"
            hint = f"install driver {needed} or newer on that node, or install a torch build for an older CUDA version in the image"
            yield Finding(results.describe_node(name), message, hint, why="torch does not find a GPU with this driver")
    if len(set(drivers.values())) > 1:
        versions_text = ", ".join(f"{name} {driver}" for name, driver in drivers.items())
        hint = "install the same version on all machines"
        yield Finding(
            "nodes", f"GPU drivers differ: {versions_text}", hint, fatal=False, why="kernels and NCCL may behave differently on them"
        )


def _check_visible_gpus_of_node(results: ProbeResults, node_name: str, slots: int, facts: NodeFacts) -> Iterator[Finding]:
    resource_kind = results.plan.config.runner.swarm.generic_resource
    visible_gpus, machine_gpus = [gpu["uuid"] for gpu in facts["gpus"]], facts["machine_gpus"]
    assigned_gpus, fix = facts["assigned_gpus"], format_gpu_settings(resource_kind, machine_gpus or visible_gpus)
    unknown_gpus = [
        gpu
        for gpu in assigned_gpus
        if (machine_gpus or visible_gpus) and not any(uuid.startswith(gpu) for uuid in machine_gpus or visible_gpus)
    ]
    devices = results.collective_results.get(node_name, {}).get("devices", slots)
    if unknown_gpus:
        message = f"Swarm assigned it {', '.join(unknown_gpus)}, but its GPUs are {', '.join(machine_gpus or visible_gpus)}"
        yield Finding(
            results.describe_node(node_name),
            message,
            fix,
            why="its engine's settings list GPUs that it does not have, so ranks do not find any",
        )
    elif machine_gpus and not visible_gpus:
        message = f"has {_format_gpu_count(len(machine_gpus))}, but its containers see none"
        hint = fix if results.plan.gpu_mode is GpuMode.reserve else _RUNTIME_FIX
        yield Finding(
            results.describe_node(node_name),
            message,
            hint,
            why="containers see GPUs through the nvidia runtime, which is not the engine's default runtime",
        )
    elif devices < slots:
        message = f"torch sees {_format_gpu_count(devices)} of {len(visible_gpus)}, for {slots} ranks"
        yield Finding(results.describe_node(node_name), message, _RUNTIME_FIX, why="ranks without a dedicated GPU fail, or share one")
    elif assigned_gpus and len(visible_gpus) > len(assigned_gpus):
        message = f"Swarm assigned it {_format_gpu_count(len(assigned_gpus))}, but the container sees {len(visible_gpus)}"
        why = "only CUDA_VISIBLE_DEVICES restricts ranks to their GPUs; a process that ignores it uses other runs' GPUs"
        yield Finding(results.describe_node(node_name), message, fix, fatal=False, why=why)


def _format_gpu_count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"
