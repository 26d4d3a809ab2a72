"""Hand-made swarms, in the JSON of the engine's API, and plans for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.images import PinnedImage
from swarmtrain.launchers.swarm.checks.cluster_checks import ApiObject, ClusterSnapshot
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.plan import Plan, build_plan

AMD64 = (("amd64", "linux"),)
GIB = 2**30


def build_node(number: int, *, manager: bool = False, leader: bool = False, **changes: Any) -> ApiObject:
    """Return an item of /nodes. `changes` use the API's names, except Engine and ManagerAddr."""
    address = changes.get("Addr", f"10.0.0.{number + 1}")
    item: ApiObject = {
        "ID": f"id{number}",
        "Version": {"Index": 20},
        "CreatedAt": "2026-11-21T10:00:00.123456789Z",
        "UpdatedAt": "2026-11-21T10:00:05.123456789Z",
        "Spec": {"Labels": {}, "Role": "manager" if manager else "worker", "Availability": changes.get("Availability", "active")},
        "Description": {
            "Hostname": changes.get("Hostname", f"gpu-{number}"),
            "Platform": {"Architecture": changes.get("Architecture", "x86_64"), "OS": "linux"},
            "Resources": {"NanoCPUs": 8 * 10**9, "MemoryBytes": 64 * GIB, **changes.get("Resources", {})},
            "Engine": {"EngineVersion": changes.get("Engine", "26.1.5"), "Plugins": [{"Type": "Network", "Name": "overlay"}]},
        },
        "Status": {"State": changes.get("State", "ready"), "Addr": address},
    }
    if manager:
        item["ManagerStatus"] = {
            "Reachability": changes.get("Reachability", "reachable"),
            "Addr": changes.get("ManagerAddr", f"10.0.0.{number + 1}:2377"),
        }
    if leader:
        item["ManagerStatus"]["Leader"] = True
    return item


def build_service(run: str, name: str, *, role: str | None = "node") -> ApiObject:
    """Return an item of /services. Without a role it does not belong to a run."""
    run_labels = {"swarmtrain.run": run, "swarmtrain.role": role} if role else {}
    return {
        "ID": f"id of {run}_{name}",
        "Version": {"Index": 30},
        "Spec": {
            "Name": f"{run}_{name}",
            "Labels": {"com.docker.stack.namespace": run, "com.docker.stack.image": "registry.lab:5000/swarmtrain:1", **run_labels},
            "TaskTemplate": {"ContainerSpec": {"Image": "registry.lab:5000/swarmtrain:1"}},
            "Mode": {"Replicated": {"Replicas": 1}},
        },
    }


def build_task(
    run: str, name: str, node_id: str, *, gpus: int = 0, assigned_gpus: list[ApiObject] | None = None, state: str = "running"
) -> ApiObject:
    """Return an item of /tasks that reserves `gpus` GPUs and was assigned `assigned_gpus`."""
    item: ApiObject = {
        "ID": f"task of {run}_{name}",
        "Version": {"Index": 31},
        "CreatedAt": "2026-11-21T10:01:00.123456789Z",
        "Spec": {
            "ContainerSpec": {"Image": "registry.lab:5000/swarmtrain:1", "Labels": {"com.docker.stack.namespace": run} if run else {}},
            "Resources": {"Reservations": {"GenericResources": build_discrete_resources(gpus)} if gpus else {}},
        },
        "ServiceID": f"id of {run}_{name}",
        "Slot": 1,
        "NodeID": node_id,
        "Status": {"Timestamp": "2026-11-21T10:01:03.123456789Z", "State": state, "Message": "started", "ContainerStatus": {"PID": 7}},
        "DesiredState": "running" if state == "running" else "shutdown",
    }
    return item if assigned_gpus is None else {**item, "GenericResources": assigned_gpus}


def build_discrete_resources(count: int, kind: str = "NVIDIA-GPU") -> list[ApiObject]:
    return [{"DiscreteResourceSpec": {"Kind": kind, "Value": count}}]


def build_named_resources(*names: str, kind: str = "NVIDIA-GPU") -> list[ApiObject]:
    return [{"NamedResourceSpec": {"Kind": kind, "Value": name}} for name in names]


def plan_hosts(*hosts: str, gpu: GpuMode = GpuMode.none, **docker: Any) -> Plan:
    """Return a plan for these hosts of the swarm, by default gpu-1 and gpu-2."""
    image = {"docker_container": "registry.lab:5000/swarmtrain:1"}
    runner = {"hosts": hosts or ("gpu-1", "gpu-2"), "docker_config": {**image, **docker}, "swarm": {"gpu": gpu}}
    config = Config.model_validate({"runner": runner})
    return build_plan(config, Inventory("the swarm", tuple(Machine(f"gpu-{i}", id=f"id{i}") for i in range(4))), Cargo(()), run="mine")


def build_swarm(*workers: ApiObject, **fields: Any) -> ClusterSnapshot:
    """Return a swarm of the manager gpu-0 and `workers`, by default gpu-1 and gpu-2."""
    nodes = (build_node(0, manager=True, leader=True), *(workers or (build_node(1), build_node(2))))
    return ClusterSnapshot(nodes=nodes, image=PinnedImage("registry.lab:5000/swarmtrain:1@sha256:abc", AMD64), **fields)


def build_managers(*changes: Mapping[str, Any]) -> tuple[ApiObject, ...]:
    """Return gpu-1, gpu-2, … as managers that are not the leader, one for each of `changes`."""
    return tuple(build_node(number, manager=True, **each) for number, each in enumerate(changes, start=1))
