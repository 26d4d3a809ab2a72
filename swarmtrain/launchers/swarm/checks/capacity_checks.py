"""Checks on a ClusterSnapshot that the machines of the plan have enough resources, declare them, and that no other run uses them."""

from __future__ import annotations

from collections.abc import Iterator

from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.swarm.checks.cluster_checks import CHECKS, ApiObject, ClusterSnapshot, get_host_name
from swarmtrain.launchers.swarm.cluster_state import FINAL_STATES, build_natural_sort_key
from swarmtrain.launchers.swarm.machines.generic_resources import count_resources, format_gpu_settings, list_resource_ids
from swarmtrain.launchers.swarm.resources.resource_accounting import compute_resource_supplies
from swarmtrain.protocol import LABEL_ROLE, LABEL_RUN, LABEL_STACK, ROLE_NODE


@CHECKS("memory", "every node in the plan has enough memory for its container's limit")
def _check_memory(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if snapshot.plan is None:
        return
    docker = snapshot.plan.config.runner.docker_config
    for node, _ in snapshot.planned_nodes:
        available = _get_resource_amount(node, "MemoryBytes")
        for key, requested, why in (
            (
                "memory",
                docker.memory,
                "a limit above the machine's memory has no effect: when memory runs out, the OOM killer kills a process",
            ),
            ("shm_size", docker.shm_size, "it is the size of /dev/shm, a tmpfs: filling it uses up the machine's memory"),
        ):
            if available and requested and requested > available:
                message = (
                    f"has {_format_gibibytes(available)} of memory, less than runner.docker_config.{key}, {_format_gibibytes(requested)}"
                )
                hint = f"-o runner.docker_config.{key}={available // 2**20}m or less, or list machines with more memory in runner.hosts"
                yield Finding(f"node {get_host_name(node)}", message, hint, why=why, host=get_host_name(node))


@CHECKS("cores", "every node in the plan has enough cores for its container's limit, and one for each rank without a GPU")
def _check_cores(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if snapshot.plan is None:
        return
    runner = snapshot.plan.config.runner
    for node, planned in snapshot.planned_nodes:
        cores = _get_resource_amount(node, "NanoCPUs") // 10**9
        if cores and runner.docker_config.cpus and runner.docker_config.cpus > cores:
            message = f"has {_format_cores(cores)}, less than runner.docker_config.cpus, {runner.docker_config.cpus:g}"
            hint = f"-o runner.docker_config.cpus={cores}, or list machines with more cores in runner.hosts"
            yield Finding(
                f"node {get_host_name(node)}",
                message,
                hint,
                why="the engine rejects a container whose CPU limit exceeds the machine's cores",
                host=get_host_name(node),
            )
        runs_on_cores = snapshot.plan.gpu_mode is GpuMode.none or not count_resources(
            _get_generic_resources(node), runner.swarm.generic_resource
        )
        if cores and runs_on_cores and planned.slots > cores:
            hint = f"-o runner.default_gpu_count={cores}, or '{get_host_name(node)} slots={cores}' in runner.hosts"
            why = "ranks that share a core are slower than fewer ranks with one core each"
            yield Finding(
                f"node {get_host_name(node)}", f"{planned.slots} ranks will share {_format_cores(cores)}", hint, fatal=False, why=why
            )


@CHECKS("resources", "no other run has reserved the GPUs that the plan needs")
def _check_free_gpus(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if snapshot.plan is None or snapshot.plan.gpu_mode is not GpuMode.reserve:
        return
    resource_kind = snapshot.plan.config.runner.swarm.generic_resource
    supplies_by_node = compute_resource_supplies(
        snapshot.nodes, snapshot.services, snapshot.tasks, resource_kind, excluded_stack=snapshot.plan.run
    )
    for node, planned in snapshot.planned_nodes:
        supply = supplies_by_node[node["ID"]]
        # A node that declares fewer resources than requested is reported by the launcher's own check.
        if supply.free_count < planned.slots <= supply.declared:
            reserved = ", ".join(f"{count} reserved by {_describe_stack(snapshot, stack)}" for stack, count in supply.reserved.items())
            message = f"{supply.free_count} of {supply.declared} {resource_kind} free, and the run needs {planned.slots}: {reserved}"
            hint = ", or ".join(
                ["swarmtrain deploy --wait", *(_suggest_command_to_free_resources(snapshot, stack) for stack in supply.reserved)]
            )
            why = "a run is deployed only when all resources that its nodes reserve are free, so that two runs never deadlock"
            yield Finding(f"node {get_host_name(node)}", message, hint, fatal=False, why=why)


def needs_reserved_gpus(snapshot: ClusterSnapshot) -> bool:
    """Return whether the plan needs GPUs that another run, or a running deployment of the same run, has reserved."""
    if snapshot.plan is None or snapshot.plan.gpu_mode is not GpuMode.reserve:
        return False
    resource_kind = snapshot.plan.config.runner.swarm.generic_resource
    supplies_by_node = compute_resource_supplies(snapshot.nodes, snapshot.services, snapshot.tasks, resource_kind)
    return any(supplies_by_node[node["ID"]].free_count < planned.slots for node, planned in snapshot.planned_nodes)


@CHECKS("other-runs", "no other run trains on the plan's machines")
def _check_other_runs(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    hosts_by_id = {node["ID"]: get_host_name(node) for node, _ in snapshot.planned_nodes}
    node_services = {service["ID"] for service in snapshot.services if (service["Spec"].get("Labels") or {}).get(LABEL_ROLE) == ROLE_NODE}
    shared: dict[str, set[str]] = {}
    for task in _iterate_other_tasks(snapshot):
        if task["NodeID"] in hosts_by_id and task.get("ServiceID") in node_services:
            shared.setdefault(_get_stack_name(task), set()).add(hosts_by_id[task["NodeID"]])
    for run, hosts in sorted(shared.items()):
        message = f"trains on {', '.join(sorted(hosts, key=build_natural_sort_key))} too"
        hint = f"swarmtrain stop {run}, or use other machines in runner.hosts"
        why = "runs on the same machine share its cores and network, and slow each other down"
        yield Finding(f"run {run}", message, hint, fatal=False, why=why)


@CHECKS("counts", "GPUs that Swarm assigns are declared by their UUIDs")
def _check_gpu_uuids(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if snapshot.plan is None or snapshot.plan.gpu_mode is not GpuMode.reserve:
        return
    resource_kind = snapshot.plan.config.runner.swarm.generic_resource
    for node, planned in snapshot.planned_nodes:
        declared = _get_generic_resources(node)
        count = count_resources(declared, resource_kind)
        if count and not list_resource_ids(declared, resource_kind):
            message = f"declares {count} {resource_kind} without their UUIDs: {planned.slots} of them are reserved, but all are visible"
            why = "Swarm then only counts the GPUs and assigns none: all runs on the same machine use the first ones"
            yield Finding(f"node {get_host_name(node)}", message, format_gpu_settings(resource_kind), fatal=planned.slots < count, why=why)


def _iterate_other_tasks(snapshot: ClusterSnapshot) -> Iterator[ApiObject]:
    """Yield the active tasks on the nodes, except those of the plan's own run."""
    for task in snapshot.tasks:
        is_own = snapshot.plan is not None and _get_stack_name(task) == snapshot.plan.run
        if task.get("NodeID") and task["Status"]["State"] not in FINAL_STATES and not is_own:
            yield task


def _get_stack_name(task: ApiObject) -> str:
    return str(((task["Spec"].get("ContainerSpec") or {}).get("Labels") or {}).get(LABEL_STACK, ""))


def _is_run_stack(snapshot: ClusterSnapshot, stack: str) -> bool:
    labels = [service["Spec"].get("Labels") or {} for service in snapshot.services]
    return stack in snapshot.terminating_runs or any(
        LABEL_RUN in service_labels and service_labels.get(LABEL_STACK) == stack for service_labels in labels
    )


def _describe_stack(snapshot: ClusterSnapshot, stack: str) -> str:
    return f"{'run' if _is_run_stack(snapshot, stack) else 'stack'} {stack}" if stack else "a service outside any stack"


def _suggest_command_to_free_resources(snapshot: ClusterSnapshot, stack: str) -> str:
    """Return the command that releases the resources of the stack `stack`, or that shows the owner of the stack."""
    if _is_run_stack(snapshot, stack):
        return f"swarmtrain {'down' if stack in snapshot.terminating_runs else 'stop'} {stack}"
    return f"docker stack services {stack} shows the owner" if stack else "docker service ls shows the owner"


def _get_resource_amount(node: ApiObject, key: str) -> int:
    return int((node["Description"].get("Resources") or {}).get(key, 0))


def _get_generic_resources(node: ApiObject) -> list[ApiObject]:
    generic_resources: list[ApiObject] = (node["Description"].get("Resources") or {}).get("GenericResources") or []
    return generic_resources


def _format_gibibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _format_cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"
