"""The GPUs that the doctor's probes have found on the swarm's nodes, kept in a Swarm config object for later plans.

The object contains JSON, by node id: {"gpus": [UUID, …], "time": seconds since the epoch}. If two objects exist, the newer entry of each
node counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.machines.machine_records import StoredRecord, read_records, replace_records

_KIND = "gpus"


def read_probed_gpus(engine: DockerEngine) -> dict[str, tuple[str, ...]]:
    """Return by node id the UUIDs of the GPUs that the last probe found; empty if the manager does not list its config objects."""
    try:
        return {node_id: tuple(entry["gpus"]) for node_id, entry in _merge_entries(read_records(engine, _KIND)).items()}
    except EngineError:
        return {}


def read_gpu_counts(engine: DockerEngine) -> dict[str, int]:
    """Return by node id the number of GPUs that the last probe found; empty if the manager does not list its config objects."""
    return {node_id: len(gpus) for node_id, gpus in read_probed_gpus(engine).items()}


def record_gpus(engine: DockerEngine, gpus_by_node_id: Mapping[str, Sequence[str]]) -> None:
    """Store the UUIDs of the GPUs that a probe found on the given nodes. Nodes that have left the swarm are dropped.

    Raises EngineError if the manager refuses.
    """
    stored = read_records(engine, _KIND)
    entries = _merge_entries(stored)
    if all(node_id in entries and entries[node_id]["gpus"] == list(gpus) for node_id, gpus in gpus_by_node_id.items()):
        return
    known_ids = {node["ID"] for node in engine.list_objects("/nodes")}
    now = time.time()
    entries |= {node_id: {"gpus": list(gpus), "time": now} for node_id, gpus in gpus_by_node_id.items()}
    replace_records(engine, _KIND, {node_id: entry for node_id, entry in sorted(entries.items()) if node_id in known_ids}, stored)


def _merge_entries(records: Sequence[StoredRecord]) -> dict[str, dict[str, Any]]:
    """Return the newest entry of each node. Entries that are not in the expected form are skipped."""
    merged: dict[str, dict[str, Any]] = {}
    for record in records:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            for node_id, entry in record.value.items():
                if node_id not in merged or entry["time"] > merged[node_id]["time"]:
                    merged[node_id] = {"gpus": list(entry["gpus"]), "time": float(entry["time"])}
    return merged
