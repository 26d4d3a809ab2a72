"""Whether each node shows its ranks the GPUs that they were promised, and what to write into its settings if it does not."""

from __future__ import annotations

from collections.abc import Iterator

from swarmtrain.config.runner import GpuMode
from swarmtrain.doctor.cluster import CHECKS as CLUSTER
from swarmtrain.doctor.cluster import Cluster, host
from swarmtrain.doctor.probed import CHECKS, Facts, Probed
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.swarm.resources import amount, names, settings

# By the major version of CUDA; from 11 on each works with all drivers of its first one's age. NVIDIA, "CUDA Compatibility".
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}
_RUNTIME = "nvidia-ctk runtime configure --runtime=docker --set-as-default; systemctl restart docker"


@CLUSTER("counts", "GPUs that Swarm gives out are known by their UUIDs")
def _counts(seen: Cluster) -> Iterator[Finding]:
    if seen.plan is None or seen.plan.config.runner.swarm.gpu is not GpuMode.reserve:
        return
    kind = seen.plan.config.runner.swarm.generic_resource
    for node, planned in seen.used:
        declared = (node["Description"].get("Resources") or {}).get("GenericResources") or []
        count = amount(declared, kind)
        if count and not names(declared, kind):
            message = f"declares {count} {kind}, and not which: {planned.slots} of them are reserved, and all are seen"
            why = "Swarm then counts them and tells nobody which are whose: runs that share the machine all use the first"
            yield Finding(f"node {host(node)}", message, settings(kind), fatal=planned.slots < count, why=why)


@CHECKS("devices", "each node shows its ranks the GPUs that they were promised")
def _devices(seen: Probed) -> Iterator[Finding]:
    if seen.plan.config.runner.swarm.gpu is GpuMode.none:
        return
    for node in seen.plan.nodes:
        if facts := seen.nodes.get(node.name):
            yield from _found(seen, node.name, node.slots, facts)


@CHECKS("driver", "GPU drivers are new enough for torch's CUDA, and alike")
def _drivers(seen: Probed) -> Iterator[Finding]:
    drivers = {name: facts["gpus"][0]["driver"] for name, facts in seen.nodes.items() if facts["gpus"]}
    for name, driver in drivers.items():
        cuda = str(seen.together.get(name, {}).get("cuda") or "")
        needed = _OLDEST_DRIVER.get(cuda.partition(".")[0], 0)
        if int(driver.partition(".")[0]) < needed:
            message = f"driver {driver} is too old for CUDA {cuda}, which torch is built for"
            hint = f"install driver {needed} or newer there, or build the image with a torch for an older CUDA"
            yield Finding(seen.place(name), message, hint, why="torch finds no GPU with it")
    if len(set(drivers.values())) > 1:
        told = ", ".join(f"{name} {driver}" for name, driver in drivers.items())
        hint = "install one version on all machines"
        yield Finding("nodes", f"GPU drivers differ: {told}", hint, fatal=False, why="kernels and NCCL may behave differently on them")


def _found(seen: Probed, name: str, slots: int, facts: Facts) -> Iterator[Finding]:
    swarm = seen.plan.config.runner.swarm
    shown, machine = [gpu["uuid"] for gpu in facts["gpus"]], facts["machine_gpus"]
    given, mend = facts["given_gpus"], settings(swarm.generic_resource, machine or shown)
    strange = [gpu for gpu in given if (machine or shown) and not any(uuid.startswith(gpu) for uuid in machine or shown)]
    devices = seen.together.get(name, {}).get("devices", slots)
    if strange:
        message = f"Swarm gave it {', '.join(strange)}, and its GPUs are {', '.join(machine or shown)}"
        yield Finding(seen.place(name), message, mend, why="its engine's settings name GPUs that it does not have, so ranks find none")
    elif machine and not shown:
        message = f"has {_count(len(machine))}, and its containers see none"
        hint = mend if swarm.gpu is GpuMode.reserve else _RUNTIME
        yield Finding(seen.place(name), message, hint, why="GPUs are shown by the nvidia runtime, which is not the engine's default")
    elif devices < slots:
        message = f"torch sees {_count(devices)} of {len(shown)}, for {slots} ranks"
        yield Finding(seen.place(name), message, _RUNTIME, why="ranks without a GPU of their own fail, or share one")
    elif given and len(shown) > len(given):
        message = f"Swarm gave it {_count(len(given))}, and the container sees {len(shown)}"
        why = "ranks are kept to theirs by CUDA_VISIBLE_DEVICES; whatever does not heed that uses other runs' GPUs"
        yield Finding(seen.place(name), message, mend, fatal=False, why=why)


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"
