"""The part of a node's service spec that depends on its machine: a queued node gets it when it is admitted."""

from __future__ import annotations

from typing import Any

from swarmtrain.protocol import ENV_GPUS, ENV_PREFIX, LABEL_HOST, LABEL_SLOTS
from swarmtrain.render.process_environment import VISIBLE_DEVICES_VARIABLE

ApiSpec = dict[str, Any]
_VARIABLES = (f"{ENV_PREFIX}SLOTS", f"{ENV_PREFIX}INTERFACE", ENV_GPUS, VISIBLE_DEVICES_VARIABLE)
_LABELS = (LABEL_HOST, LABEL_SLOTS)


def copy_machine_settings(spec: ApiSpec, source: ApiSpec) -> ApiSpec:
    """Return `spec` with the settings that depend on the machine from `source`: placement, resources, slots, GPUs and interface."""
    task, source_task = spec["TaskTemplate"], source["TaskTemplate"]
    container, source_container = task["ContainerSpec"], source_task["ContainerSpec"]
    variables = [item for item in container.get("Env") or [] if item.partition("=")[0] not in _VARIABLES]
    variables += [item for item in source_container.get("Env") or [] if item.partition("=")[0] in _VARIABLES]
    labels = {name: value for name, value in spec["Labels"].items() if name not in _LABELS}
    labels |= {name: value for name, value in source["Labels"].items() if name in _LABELS}
    placement = {**(task.get("Placement") or {}), "Constraints": (source_task.get("Placement") or {}).get("Constraints") or []}
    resources = {"Resources": source_task["Resources"]} if source_task.get("Resources") else {}
    kept = {name: value for name, value in task.items() if name != "Resources"}
    new_task = {**kept, **resources, "ContainerSpec": {**container, "Env": sorted(variables)}, "Placement": placement}
    return {**spec, "Labels": labels, "TaskTemplate": new_task}
