"""Plan → document for one engine that is in no swarm: what `docker compose` takes, and what the Docker launcher starts.

It is the stack document with what only a swarm knows said in an engine's own words: a bridge for the overlay, `restart`,
`cpus`, `mem_limit` and `gpus` for what `deploy` says.
"""

from __future__ import annotations

import json
from typing import Any

from swarmtrain.config.runner import GpuMode
from swarmtrain.plan import CodeFile, Plan, PlannedNode
from swarmtrain.render import compose
from swarmtrain.render.compose import NETWORK, Stack
from swarmtrain.render.mounts import templated
from swarmtrain.wire import LABEL_CONTAINER, LABEL_NODE, LABEL_RUN, LABEL_SECRETS


def containers(plan: Plan) -> Stack:
    """Return the document of `plan`, a container for each node and one for the rendezvous. Raises StackError for a file that is empty."""
    whole = compose.stack(plan)
    nodes = {node.name: node for node in plan.nodes}
    secrets = json.dumps({item.name: item.digest for item in plan.cargo.secrets}, sort_keys=True)
    services = {name: _service(plan, name, service, nodes.get(name), secrets) for name, service in whole.document["services"].items()}
    network: dict[str, Any] = {"name": f"{plan.run}_{NETWORK}", "driver": "bridge", "labels": {LABEL_RUN: plan.run}}
    if plan.config.runner.swarm.internal:
        network["internal"] = True
    kept = {key: value for key, value in whole.document.items() if key not in ("version", "services", "networks")}
    document = {"name": plan.run, **kept, "services": services, "networks": {NETWORK: network}}
    return Stack(plan.run, document, whole.files, "docker compose -f {file} up")


def _service(plan: Plan, name: str, service: dict[str, Any], node: PlannedNode | None, secrets: str) -> dict[str, Any]:
    deploy = service["deploy"]
    found = {key: value for key, value in service.items() if key != "deploy"}
    found |= {
        "container_name": f"{plan.run}-{name}",
        "environment": {variable: templated(value) for variable, value in service["environment"].items()},
        # 0 is final; whatever else happens, the node comes back, also after the engine itself. The budget is kept by the notice board.
        "restart": "on-failure",
    }
    if "volumes" in service:
        found["volumes"] = [{key: _plain(value) for key, value in mount.items()} for mount in service["volumes"]]
    limits = deploy.get("resources", {}).get("limits", {})
    found |= {ours: limits[theirs] for ours, theirs in (("cpus", "cpus"), ("mem_limit", "memory")) if theirs in limits}
    if node and (gpus := _gpus(plan, node)):
        found["gpus"] = gpus
        if gpus != "all" and "NVIDIA_VISIBLE_DEVICES" not in plan.config.runner.env:
            found["environment"]["NVIDIA_VISIBLE_DEVICES"] = ",".join(gpus[0]["device_ids"])
    labels = {**deploy["labels"], LABEL_NODE: name, **({LABEL_SECRETS: secrets} if node else {})}
    digest = CodeFile.of(name, json.dumps(found, sort_keys=True).encode()).digest
    return {**found, "labels": {**labels, LABEL_CONTAINER: digest}}


def _gpus(plan: Plan, node: PlannedNode) -> Any:
    """Return the GPUs of a node: those it names, its share where several nodes are on the one machine, else all."""
    if plan.config.runner.swarm.gpu is GpuMode.none:
        return ""
    chosen = list(node.gpus)
    if not chosen and (plan.max_nodes > 1 or plan.config.runner.swarm.gpu is GpuMode.reserve):
        first = sum(other.slots for other in plan.nodes[: plan.nodes.index(node)])
        chosen = [str(number) for number in range(first, first + node.slots)]
    return [{"driver": "nvidia", "device_ids": chosen}] if chosen else "all"


def _plain(value: Any) -> Any:
    return templated(value) if isinstance(value, str) else value
