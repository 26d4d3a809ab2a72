"""Convert a plan to a Compose file for one Docker Engine outside a swarm: the input of `docker compose` and of the Docker launcher.

It is the stack document with Swarm's settings replaced by those of a single engine: a bridge network instead of the overlay, and `restart`,
`cpus`, `mem_limit` and `gpus` instead of `deploy`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swarmtrain.cargo import RunFile
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import ENV_RUN_ID, LABEL_CODE, LABEL_CONTAINER, LABEL_NODE, LABEL_RUN, LABEL_SECRETS
from swarmtrain.render import stack_document
from swarmtrain.render.mounts import unescape_go_template
from swarmtrain.render.stack_document import NETWORK_NAME, Stack


def render_compose(plan: Plan) -> Stack:
    """Return the Compose file of `plan`: a container for each node, and one for the rendezvous."""
    stack = stack_document.render_stack(plan, is_for_swarm=False)
    nodes = {node.name: node for node in plan.nodes}
    file_labels = {
        LABEL_CODE: json.dumps([item.name for item in plan.cargo.code]),
        LABEL_SECRETS: json.dumps({item.name: item.digest for item in plan.cargo.node_secrets}, sort_keys=True),
    }
    channel_digests = {item.name: item.digest for item in plan.cargo.channel_secrets}
    channel_labels = {LABEL_SECRETS: json.dumps(channel_digests, sort_keys=True)} if channel_digests else {}
    services = {
        name: _convert_service_to_compose(plan, name, service, nodes.get(name), file_labels if name in nodes else channel_labels)
        for name, service in stack.document["services"].items()
    }
    network: dict[str, Any] = {"name": f"{plan.run}_{NETWORK_NAME}", "driver": "bridge", "labels": {LABEL_RUN: plan.run}}
    if plan.config.runner.swarm.internal:
        network["internal"] = True
    other_sections = {key: value for key, value in stack.document.items() if key not in ("version", "services", "networks")}
    document = {"name": plan.run, **other_sections, "services": services, "networks": {NETWORK_NAME: network}}
    return Stack(plan.run, document, stack.files, command_template="docker compose -f {file} up", command_note="")


def _convert_service_to_compose(
    plan: Plan, service_name: str, service: dict[str, Any], node: PlannedNode | None, file_labels: Mapping[str, str]
) -> dict[str, Any]:
    deploy = service["deploy"]
    converted = {key: value for key, value in service.items() if key != "deploy"}
    converted |= {
        "container_name": f"{plan.run}-{service_name}",
        "environment": {variable: unescape_go_template(value) for variable, value in service["environment"].items()}
        | {stack_document.RUN_VARIABLE: plan.run, **({} if node else {ENV_RUN_ID: ""})},
        # A container is restarted after every exit code except 0, and when the engine restarts. The coordinator enforces the restart
        # budget.
        "restart": "on-failure",
    }
    if "volumes" in service:
        converted["volumes"] = [{key: _unescape_go_template_value(value) for key, value in mount.items()} for mount in service["volumes"]]
    limits = deploy.get("resources", {}).get("limits", {})
    converted |= {
        compose_key: limits[deploy_key] for compose_key, deploy_key in (("cpus", "cpus"), ("mem_limit", "memory")) if deploy_key in limits
    }
    if node and (gpus := _select_gpus(plan, node)):
        converted["gpus"] = gpus
        if gpus != "all" and "NVIDIA_VISIBLE_DEVICES" not in plan.config.runner.env:
            converted["environment"]["NVIDIA_VISIBLE_DEVICES"] = ",".join(gpus[0]["device_ids"])
    labels = {**deploy["labels"], LABEL_NODE: service_name, **file_labels}
    digest = RunFile.from_content(service_name, json.dumps(converted, sort_keys=True).encode()).digest
    return {**converted, "labels": {**labels, LABEL_CONTAINER: digest}}


def _select_gpus(plan: Plan, node: PlannedNode) -> Any:
    """Return the value of the Compose key `gpus` for `node`; empty if the run uses no GPUs.

    It selects the GPUs that the config lists for the node; if there are none, as many GPUs as slots if GPUs are reserved or several nodes
    use the machine; else all GPUs.
    """
    if plan.gpu_mode is GpuMode.none:
        return ""
    device_ids = list(node.gpus)
    if not device_ids and (plan.max_nodes > 1 or plan.gpu_mode is GpuMode.reserve):
        first_device = sum(earlier_node.slots for earlier_node in plan.nodes[: plan.nodes.index(node)])
        device_ids = [str(number) for number in range(first_device, first_device + node.slots)]
    return [{"driver": "nvidia", "device_ids": device_ids}] if device_ids else "all"


def _unescape_go_template_value(value: Any) -> Any:
    return unescape_go_template(value) if isinstance(value, str) else value
