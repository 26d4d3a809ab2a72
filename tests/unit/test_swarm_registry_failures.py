"""A registry that does not start is removed, and the error says why it did not start, also if the removal fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from swarmtrain.errors import EngineError, ImageError
from swarmtrain.images.registry_access import RegistryAccess
from swarmtrain.images.swarm_registry import SERVICE_NAME, start_registry

NODE = {"ID": "id0", "Description": {"Hostname": "node0"}, "Status": {"Addr": "10.0.0.1"}}


class RejectingEngine:
    """A manager whose node rejects the task of the registry's service. Implements `ManagerEngine`."""

    address = "fake"

    def __init__(self, *, allows_deletes: bool) -> None:
        self.services: list[dict[str, Any]] = []
        self._allows_deletes = allows_deletes

    def get(self, _api_path: str, _params: Mapping[str, str] | None = None) -> Any:
        return {"Swarm": {"NodeID": "id0"}}

    def list_objects(self, api_path: str, **_filters: str) -> list[dict[str, Any]]:
        rejected = {"State": "rejected", "Err": "No such image: registry:2.8.3"}
        tasks = [{"ServiceID": service["ID"], "CreatedAt": "", "Status": rejected} for service in self.services]
        return {"/nodes": [NODE], "/services": self.services, "/tasks": tasks}[api_path]

    def post(self, _api_path: str, body: Mapping[str, Any], _params: Mapping[str, str] | None = None, *, image: str | None = None) -> Any:
        del image
        self.services = [{"ID": "service0", "Spec": body}]
        return {"ID": "service0"}

    def delete(self, _api_path: str) -> bool:
        if not self._allows_deletes:
            raise EngineError("the swarm does not have a leader", status=503)
        self.services = []
        return True

    def inspect_distribution(self, image: str) -> Any:
        raise EngineError(f"{image}: not found", status=404)


@pytest.mark.parametrize("allows_deletes", [True, False])
def test_the_error_is_that_of_the_registry(allows_deletes: bool) -> None:
    engine, progress = RejectingEngine(allows_deletes=allows_deletes), list[str]()
    with pytest.raises(ImageError, match="does not start on node0: No such image"):
        start_registry(engine, access=RegistryAccess(), report_progress=progress.append)
    assert [service["Spec"]["Name"] for service in engine.services] == ([] if allows_deletes else [SERVICE_NAME])
    report = "not removed: the swarm does not have a leader; run swarmtrain image registry down"
    assert (progress[-1] == report) == (not allows_deletes)
