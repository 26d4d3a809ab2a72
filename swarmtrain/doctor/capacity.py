"""Whether the plan's machines hold what is to run there, and who else runs there: more checks on the value Cluster."""

from __future__ import annotations

from collections.abc import Iterator

from swarmtrain.config.runner import GpuMode
from swarmtrain.doctor.cluster import CHECKS, Cluster, Raw, host
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.swarm.claims import supplies
from swarmtrain.launchers.swarm.observe import FINAL, natural
from swarmtrain.launchers.swarm.resources import amount
from swarmtrain.wire import LABEL_ROLE, LABEL_RUN, LABEL_STACK, ROLE_NODE


@CHECKS("memory", "every node of the plan has the memory that its container may use")
def _memory(seen: Cluster) -> Iterator[Finding]:
    if seen.plan is None:
        return
    docker = seen.plan.config.runner.docker_config
    for node, _ in seen.used:
        there = _capacity(node, "MemoryBytes")
        for key, wanted, why in (
            ("memory", docker.memory, "a limit above what the machine has is none: the kernel kills what it likes when memory runs out"),
            ("shm_size", docker.shm_size, "it is the size of /dev/shm, which lies in memory: filling it takes all there is"),
        ):
            if there and wanted and wanted > there:
                message = f"has {_gibibytes(there)} of memory, less than runner.docker_config.{key}, {_gibibytes(wanted)}"
                hint = f"-o runner.docker_config.{key}={there // 2**20}m or less, or machines with more memory in runner.hosts"
                yield Finding(f"node {host(node)}", message, hint, why=why)


@CHECKS("cores", "every node of the plan has the cores that its container may use, and one for each rank without a GPU")
def _cores(seen: Cluster) -> Iterator[Finding]:
    if seen.plan is None:
        return
    runner = seen.plan.config.runner
    for node, planned in seen.used:
        cores = _capacity(node, "NanoCPUs") // 10**9
        if cores and runner.docker_config.cpus and runner.docker_config.cpus > cores:
            message = f"has {_cores_of(cores)}, less than runner.docker_config.cpus, {runner.docker_config.cpus:g}"
            hint = f"-o runner.docker_config.cpus={cores}, or machines with more cores in runner.hosts"
            yield Finding(f"node {host(node)}", message, hint, why="the engine refuses a container that may use more cores than there are")
        on_cores = runner.swarm.gpu is GpuMode.none or not amount(_generic(node), runner.swarm.generic_resource)
        if cores and on_cores and planned.slots > cores:
            hint = f"-o runner.default_gpu_count={cores}, or '{host(node)} slots={cores}' in runner.hosts"
            why = "ranks that take turns on a core are slower than fewer ranks with a core each"
            yield Finding(f"node {host(node)}", f"{planned.slots} ranks will share {_cores_of(cores)}", hint, fatal=False, why=why)


@CHECKS("resources", "no other run holds the GPUs that the plan wants")
def _resources(seen: Cluster) -> Iterator[Finding]:
    if seen.plan is None or seen.plan.config.runner.swarm.gpu is not GpuMode.reserve:
        return
    kind = seen.plan.config.runner.swarm.generic_resource
    there = supplies(seen.nodes, seen.services, seen.tasks, kind, but=seen.plan.run)
    for node, planned in seen.used:
        declared, held, free = there[node["ID"]].declared, there[node["ID"]].claimed, there[node["ID"]].free
        # Fewer declared than wanted is what the launcher's own check tells.
        if free < planned.slots <= declared:
            holders = ", ".join(f"{_called(seen, stack)} holds {count}" for stack, count in held.items())
            waits = f"the run waits until {' or '.join(_called(seen, stack) for stack in held)} lets go"
            message = f"has {declared} {kind}, {free} of them free, and {planned.slots} wanted: {holders}; {waits}"
            hint = ", or ".join(_ending(seen, stack) for stack in held)
            why = "a run is deployed when all that its nodes reserve is free, so that no two runs wait for each other"
            yield Finding(f"node {host(node)}", message, hint, fatal=False, why=why)


def must_wait(seen: Cluster) -> bool:
    """Say whether a run that reserves what the plan does would have to wait: for another one, or for the plan's own that is up."""
    if seen.plan is None or seen.plan.config.runner.swarm.gpu is not GpuMode.reserve:
        return False
    kind = seen.plan.config.runner.swarm.generic_resource
    there = supplies(seen.nodes, seen.services, seen.tasks, kind)
    return any(there[node["ID"]].free < planned.slots for node, planned in seen.used)


@CHECKS("crowd", "no other run trains on the plan's machines")
def _crowd(seen: Cluster) -> Iterator[Finding]:
    used = {node["ID"]: host(node) for node, _ in seen.used}
    nodes = {service["ID"] for service in seen.services if (service["Spec"].get("Labels") or {}).get(LABEL_ROLE) == ROLE_NODE}
    shared: dict[str, set[str]] = {}
    for task in _alive(seen):
        if task["NodeID"] in used and task.get("ServiceID") in nodes:
            shared.setdefault(_stack(task), set()).add(used[task["NodeID"]])
    for run, hosts in sorted(shared.items()):
        message = f"trains on {', '.join(sorted(hosts, key=natural))} too"
        hint = f"swarmtrain stop {run}, or other machines in runner.hosts"
        why = "runs on one machine share its cores and its network, so that each slows the other down"
        yield Finding(f"run {run}", message, hint, fatal=False, why=why)


def _alive(seen: Cluster) -> Iterator[Raw]:
    """Yield the tasks of all but the plan's own run that are on a node and not over."""
    for task in seen.tasks:
        own = seen.plan is not None and _stack(task) == seen.plan.run
        if task.get("NodeID") and task["Status"]["State"] not in FINAL and not own:
            yield task


def _stack(task: Raw) -> str:
    return str(((task["Spec"].get("ContainerSpec") or {}).get("Labels") or {}).get(LABEL_STACK, ""))


def _is_run(seen: Cluster, stack: str) -> bool:
    labels = [service["Spec"].get("Labels") or {} for service in seen.services]
    return stack in seen.leaving or any(LABEL_RUN in each and each.get(LABEL_STACK) == stack for each in labels)


def _called(seen: Cluster, stack: str) -> str:
    return f"{'run' if _is_run(seen, stack) else 'stack'} {stack}" if stack else "a service of no stack"


def _ending(seen: Cluster, stack: str) -> str:
    """Return the command that ends what `stack` holds, or that shows whose it is."""
    if _is_run(seen, stack):
        return f"swarmtrain {'down' if stack in seen.leaving else 'stop'} {stack}"
    return f"docker stack services {stack} shows whose it is" if stack else "docker service ls shows whose it is"


def _capacity(node: Raw, key: str) -> int:
    return int((node["Description"].get("Resources") or {}).get(key, 0))


def _generic(node: Raw) -> list[Raw]:
    found: list[Raw] = (node["Description"].get("Resources") or {}).get("GenericResources") or []
    return found


def _gibibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _cores_of(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"
