"""A swarm in memory, with the requests that the launcher, the scheduler and the lock send to a manager. Tasks change only in `advance`."""

from __future__ import annotations

import base64
import copy
import itertools
import json
from collections.abc import Mapping
from typing import Any

from queue_cases import GPU

from swarmtrain.errors import EngineError
from swarmtrain.launchers.swarm.cluster_state import FINAL_STATES

ApiObject = dict[str, Any]
_KINDS = ("services", "configs", "secrets", "networks")


class Killed(BaseException):
    """Raised instead of sending a request: the process that wanted to send it was killed."""


class FakeSwarm:
    """The managers and nodes of a swarm. Implements the methods of DockerEngine that the queue uses."""

    address = "fake"
    endpoint = "fake"

    def __init__(self, machines: int, gpus: int = 2, cores: int = 8) -> None:
        self._index = itertools.count(1)
        self.objects: dict[str, dict[str, ApiObject]] = {kind: {} for kind in _KINDS}
        self.tasks: list[ApiObject] = []
        self.nodes = [_build_node(number, gpus, cores) for number in range(machines)]
        self.stop_advances = 2
        """Number of calls of `advance` for which a container that was asked to stop still runs: it saves."""
        self.writes_until_kill: int | None = None
        """Number of requests that change services, after which the process that sends the next one is killed."""

    def get(self, api_path: str, _params: Mapping[str, str] | None = None) -> Any:
        _, kind, key = api_path.split("/")
        item = self.objects[kind].get(key) or next((item for item in self.objects[kind].values() if _get_name(item) == key), None)
        if item is None:
            raise EngineError(f"no such object: {api_path}", status=404)
        return copy.deepcopy(item)

    def list_objects(self, api_path: str, **filters: str) -> list[ApiObject]:
        kind = api_path.removeprefix("/")
        items = self.nodes if kind == "nodes" else self.tasks if kind == "tasks" else list(self.objects[kind].values())
        return copy.deepcopy([item for item in items if _matches(kind, item, filters)])

    def post(self, api_path: str, body: Mapping[str, Any], params: Mapping[str, str] | None = None, *, image: str | None = None) -> Any:
        _, kind, *rest = api_path.split("/")
        if kind == "services":
            self._count_write()
        if rest == ["create"]:
            return self._create(kind, copy.deepcopy(dict(body)))
        item = self.objects[kind].get(rest[0])
        if item is None:
            raise EngineError(f"no such object: {api_path}", status=404)
        if int((params or {})["version"]) != item["Version"]["Index"]:
            raise EngineError("rpc error: update out of sequence", status=500)
        item["Spec"] = {**(item["Spec"] if kind == "configs" else {}), **copy.deepcopy(dict(body))}
        item["Version"] = {"Index": next(self._index)}
        item["PreviousSpec"] = {}
        return {}

    def delete(self, api_path: str) -> bool:
        _, kind, key = api_path.split("/")
        found = next((item_id for item_id, item in self.objects[kind].items() if key in (item_id, _get_name(item))), None)
        if found is not None:
            del self.objects[kind][found]
        return found is not None

    def inspect_distribution(self, image: str) -> Any:
        return {"Descriptor": {"digest": f"sha256:{'0' * 64}"}, "Platforms": [{"architecture": "amd64", "os": "linux"}]}

    def _create(self, kind: str, body: ApiObject) -> ApiObject:
        name = body["Name"]
        if any(_get_name(item) == name for item in self.objects[kind].values()):
            raise EngineError(f"{name} already exists", status=409)
        index = next(self._index)
        item_id = f"{kind}{index}"
        item: ApiObject = {"ID": item_id, "Version": {"Index": index}, "CreatedAt": _format_time(index), "UpdatedAt": _format_time(index)}
        item |= (
            {"Id": item_id, "Name": name, "Labels": body.get("Labels"), "Scope": "swarm", **body} if kind == "networks" else {"Spec": body}
        )
        self.objects[kind][item_id] = item
        return {"ID": item_id}

    def _count_write(self) -> None:
        if self.writes_until_kill is not None:
            if self.writes_until_kill == 0:
                self.writes_until_kill = None
                raise Killed
            self.writes_until_kill -= 1

    def advance(self) -> None:
        """Let Swarm start the tasks of services with a replica where that is possible, and stop those of the others."""
        for service in self.objects["services"].values():
            spec, count = service["Spec"], service["Spec"]["TaskTemplate"].get("ForceUpdate", 0)
            own = [task for task in self.tasks if task["ServiceID"] == service["ID"]]
            wanted = spec["Mode"]["Replicated"]["Replicas"]
            node = self._find_node(spec)
            for task in own:
                is_current = wanted and task["Spec"].get("ForceUpdate", 0) == count and task["NodeID"] == (node or {}).get("ID")
                if not is_current and task["Status"]["State"] not in FINAL_STATES:
                    self._stop_task(task)
            is_current = any(
                task["Spec"].get("ForceUpdate", 0) == count and task["DesiredState"] == "running"
                for task in own
                if task["Status"]["State"] not in FINAL_STATES
            )
            is_ended = any(task["Spec"].get("ForceUpdate", 0) == count for task in own if task["Status"]["State"] == "complete")
            if wanted and node and not is_current and not is_ended:
                self.tasks.append(self._build_task(service, node))
        services = self.objects["services"]
        for task in self.tasks:
            if task["ServiceID"] not in services and task["Status"]["State"] not in FINAL_STATES:
                self._stop_task(task)
        self.tasks = [task for task in self.tasks if task["ServiceID"] in services or task["Status"]["State"] not in FINAL_STATES]
        for service_id in services:  # Swarm keeps five tasks of a service
            old = [task for task in self.tasks if task["ServiceID"] == service_id][:-5]
            self.tasks = [task for task in self.tasks if task not in old]

    def _stop_task(self, task: ApiObject) -> None:
        """Let a container stop after some calls. Nobody knows what happens on a machine that is down."""
        task["DesiredState"] = "shutdown"
        if any(node["ID"] == task["NodeID"] and node["Status"]["State"] == "down" for node in self.nodes):
            return
        task["StopCalls"] = task.get("StopCalls", 0) + 1
        if task["StopCalls"] > self.stop_advances:
            task["Status"] = {"State": "shutdown"}

    def complete_run(self, run: str) -> None:
        """Let all running tasks of `run` end with exit code 0."""
        for task in self.tasks:
            if self.objects["services"][task["ServiceID"]]["Spec"]["Name"].startswith(f"{run}_") and task["Status"]["State"] == "running":
                task["Status"], task["DesiredState"] = {"State": "complete", "ContainerStatus": {"ExitCode": 0}}, "shutdown"

    def count_running_nodes(self) -> dict[str, list[str]]:
        """Return the machines of the running nodes of each run."""
        found: dict[str, list[str]] = {}
        for task in self.tasks:
            service = self.objects["services"].get(task["ServiceID"])
            if service and task["Status"]["State"] == "running" and service["Spec"]["Labels"].get("swarmtrain.role") == "node":
                found.setdefault(service["Spec"]["Labels"]["com.docker.stack.namespace"], []).append(task["NodeID"])
        return {run: sorted(machines) for run, machines in found.items()}

    def _find_node(self, spec: ApiObject) -> ApiObject | None:
        constraints = spec["TaskTemplate"].get("Placement", {}).get("Constraints") or []
        for node in self.nodes:
            facts = {f"node.hostname=={node['Description']['Hostname']}", f"node.id=={node['ID']}", "node.role==manager"}
            if set(constraints) <= facts and node["Spec"]["Availability"] == "active" and node["Status"]["State"] == "ready":
                return node
        return None

    def _build_task(self, service: ApiObject, node: ApiObject) -> ApiObject:
        index = next(self._index)
        return {
            "ID": f"task{index}",
            "ServiceID": service["ID"],
            "ServiceName": service["Spec"]["Name"],
            "NodeID": node["ID"],
            "CreatedAt": _format_time(index),
            "Spec": copy.deepcopy(service["Spec"]["TaskTemplate"]),
            "Status": {"State": "running", "ContainerStatus": {"ContainerID": f"container{index}"}},
            "DesiredState": "running",
        }


def _build_node(number: int, gpus: int, cores: int) -> ApiObject:
    resources = [{"NamedResourceSpec": {"Kind": GPU, "Value": f"GPU-{number}-{gpu}"}} for gpu in range(gpus)]
    return {
        "ID": f"{number:025d}",
        "Description": {
            "Hostname": f"gpu-{number}",
            "Resources": {"NanoCPUs": cores * 10**9, "GenericResources": resources},
            "Engine": {"EngineVersion": "28.5.0"},
        },
        "Spec": {"Role": "manager", "Availability": "active", "Labels": {}},
        "Status": {"State": "ready", "Addr": f"10.0.0.{number + 1}"},
        "ManagerStatus": {"Addr": f"10.0.0.{number + 1}:2377"},
    }


def _get_name(item: ApiObject) -> str:
    return str(item["Spec"]["Name"] if "Spec" in item else item["Name"])


def _matches(kind: str, item: ApiObject, filters: Mapping[str, str]) -> bool:
    spec = item.get("Spec", item)
    labels = (spec.get("ContainerSpec") or {}).get("Labels") if kind == "tasks" else spec.get("Labels")
    for key, wanted in filters.items():
        name, _, value = wanted.partition("=")
        if key == "label" and not (name in (labels or {}) and (not value or (labels or {})[name] == value)):
            return False
        if key == "name" and wanted not in _get_name(item):
            return False
        if key == "service" and item["ServiceName"] != wanted:
            return False
    return True


def _format_time(index: int) -> str:
    return f"2026-01-01T00:{index // 60 % 60:02d}:{index % 60:02d}.{index:09d}Z"


def encode_policy(policy: Mapping[str, Any]) -> str:
    """Return a policy as the data of a config object."""
    return base64.b64encode(json.dumps(policy).encode()).decode()
