"""Hand-made swarms, in the JSON of the engine's API, and plans for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.doctor.cluster import Cluster, Raw
from swarmtrain.images import Pinned
from swarmtrain.plan import Cargo, Inventory, Machine, Plan, make_plan

AMD64 = (("amd64", "linux"),)
GIB = 2**30


def node(number: int, *, manager: bool = False, leader: bool = False, **changes: Any) -> Raw:
    """Return an item of /nodes; `changes` have the API's names, but for Engine and ManagerAddr."""
    address = changes.get("Addr", f"10.0.0.{number + 1}")
    made: Raw = {
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
        made["ManagerStatus"] = {
            "Reachability": changes.get("Reachability", "reachable"),
            "Addr": changes.get("ManagerAddr", f"10.0.0.{number + 1}:2377"),
        }
    if leader:
        made["ManagerStatus"]["Leader"] = True
    return made


def service(run: str, name: str, *, role: str | None = "node") -> Raw:
    """Return an item of /services; without a role it is no run's."""
    ours = {"swarmtrain.run": run, "swarmtrain.role": role} if role else {}
    return {
        "ID": f"id of {run}_{name}",
        "Version": {"Index": 30},
        "Spec": {
            "Name": f"{run}_{name}",
            "Labels": {"com.docker.stack.namespace": run, "com.docker.stack.image": "registry.lab:5000/swarmtrain:1", **ours},
            "TaskTemplate": {"ContainerSpec": {"Image": "registry.lab:5000/swarmtrain:1"}},
            "Mode": {"Replicated": {"Replicas": 1}},
        },
    }


def task(run: str, name: str, where: str, *, gpus: int = 0, given: list[Raw] | None = None, state: str = "running") -> Raw:
    """Return an item of /tasks: it reserves `gpus`, and was given those in `given`."""
    made: Raw = {
        "ID": f"task of {run}_{name}",
        "Version": {"Index": 31},
        "CreatedAt": "2026-11-21T10:01:00.123456789Z",
        "Spec": {
            "ContainerSpec": {"Image": "registry.lab:5000/swarmtrain:1", "Labels": {"com.docker.stack.namespace": run} if run else {}},
            "Resources": {"Reservations": {"GenericResources": discrete(gpus)} if gpus else {}},
        },
        "ServiceID": f"id of {run}_{name}",
        "Slot": 1,
        "NodeID": where,
        "Status": {"Timestamp": "2026-11-21T10:01:03.123456789Z", "State": state, "Message": "started", "ContainerStatus": {"PID": 7}},
        "DesiredState": "running" if state == "running" else "shutdown",
    }
    return made if given is None else {**made, "GenericResources": given}


def discrete(count: int, kind: str = "NVIDIA-GPU") -> list[Raw]:
    return [{"DiscreteResourceSpec": {"Kind": kind, "Value": count}}]


def named(*names: str, kind: str = "NVIDIA-GPU") -> list[Raw]:
    return [{"NamedResourceSpec": {"Kind": kind, "Value": name}} for name in names]


def plan(*hosts: str, gpu: GpuMode = GpuMode.none, **docker: Any) -> Plan:
    """Return a plan for these hosts of the swarm; without any, for gpu-1 and gpu-2."""
    image = {"docker_container": "registry.lab:5000/swarmtrain:1"}
    runner = {"hosts": hosts or ("gpu-1", "gpu-2"), "docker_config": {**image, **docker}, "swarm": {"gpu": gpu}}
    config = Config.model_validate({"runner": runner})
    return make_plan(config, Inventory("the swarm", tuple(Machine(f"gpu-{i}", id=f"id{i}") for i in range(4))), Cargo(()), run="mine")


def swarm(*others: Raw, **rest: Any) -> Cluster:
    """Return a swarm of gpu-0, which is its manager, and `others`: workers gpu-1 and gpu-2 unless given."""
    nodes = (node(0, manager=True, leader=True), *(others or (node(1), node(2))))
    return Cluster(nodes=nodes, image=Pinned("registry.lab:5000/swarmtrain:1@sha256:abc", AMD64), **rest)


def managers(*changes: Mapping[str, Any]) -> tuple[Raw, ...]:
    """Return gpu-1 and so on as managers that do not lead."""
    return tuple(node(number, manager=True, **each) for number, each in enumerate(changes, start=1))
