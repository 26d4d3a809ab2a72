"""What `swarmtrain doctor` has found out about the machines of a swarm: their GPUs, and the measurements for the estimates of plans.

The records are kept in Swarm config objects, one for each kind of record. A config object cannot be changed, so a new one replaces it. If
two exist, because two commands ended at the same time, their readers merge them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.machines.generic_resources import list_resource_ids
from swarmtrain.planning.step_estimates import ClusterMeasurement, parse_measurement

LABEL_MACHINES = "swarmtrain.machines"
_NAME_PREFIX = "swarmtrain-machines"
_GPUS_KIND = "gpus"
"""The record contains, by node id: {"gpus": [UUID, …], "time": seconds since the epoch}. The newer entry of each node counts."""
_MEASUREMENTS_KIND = "measurements"
_MAX_MEASUREMENTS = 16
_MAX_MEASUREMENT_BYTES = 400_000
"""Swarm refuses config objects of more than 500 kB (1 MB since Docker 26)."""


@dataclass(frozen=True)
class _StoredRecord:
    """A config object, and the JSON value in it; None if it is not in the expected form."""

    object_id: str
    value: Any = None


def read_probed_gpus(engine: DockerEngine) -> dict[str, tuple[str, ...]]:
    """Return by node id the UUIDs of the GPUs that the last probe found; empty if the manager does not list its config objects."""
    try:
        return {node_id: tuple(entry["gpus"]) for node_id, entry in _merge_entries(_read_records(engine, _GPUS_KIND)).items()}
    except EngineError:
        return {}


def read_gpu_counts(engine: DockerEngine) -> dict[str, int]:
    """Return by node id the number of GPUs that the last probe found; empty if the manager does not list its config objects."""
    return {node_id: len(gpus) for node_id, gpus in read_probed_gpus(engine).items()}


def read_gpu_ids(engine: DockerEngine) -> dict[str, tuple[str, ...]]:
    """Return by node id the ids of the GPUs that the machine declares, in the order of their numbers, or else those of its last probe.

    Empty for a machine that declares only a number of GPUs, or none, and was not probed. Raises EngineError.
    """
    probed = read_probed_gpus(engine)
    declared = {
        node["ID"]: (node["Description"].get("Resources") or {}).get("GenericResources") or [] for node in engine.list_objects("/nodes")
    }
    return {node_id: list_resource_ids(resources) or probed.get(node_id, ()) for node_id, resources in declared.items()}


def record_gpus(engine: DockerEngine, gpus_by_node_id: Mapping[str, Sequence[str]]) -> None:
    """Store the UUIDs of the GPUs that a probe found on the given nodes. Nodes that have left the swarm are dropped.

    Raises EngineError if the manager refuses.
    """
    stored = _read_records(engine, _GPUS_KIND)
    entries = _merge_entries(stored)
    if all(node_id in entries and entries[node_id]["gpus"] == list(gpus) for node_id, gpus in gpus_by_node_id.items()):
        return
    known_ids = {node["ID"] for node in engine.list_objects("/nodes")}
    now = time.time()
    entries |= {node_id: {"gpus": list(gpus), "time": now} for node_id, gpus in gpus_by_node_id.items()}
    _replace_records(engine, _GPUS_KIND, {node_id: entry for node_id, entry in sorted(entries.items()) if node_id in known_ids}, stored)


def _merge_entries(records: Sequence[_StoredRecord]) -> dict[str, dict[str, Any]]:
    """Return the newest entry of each node. Entries that are not in the expected form are skipped."""
    merged: dict[str, dict[str, Any]] = {}
    for record in records:
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            for node_id, entry in record.value.items():
                if node_id not in merged or entry["time"] > merged[node_id]["time"]:
                    merged[node_id] = {"gpus": list(entry["gpus"]), "time": float(entry["time"])}
    return merged


def read_measurements(engine: DockerEngine) -> list[ClusterMeasurement]:
    """Return the measurements, the newest first; empty if the manager does not list its config objects."""
    measurements = []
    with contextlib.suppress(EngineError):
        for record in _read_records(engine, _MEASUREMENTS_KIND):
            for values in record.value if isinstance(record.value, list) else ():
                with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
                    measurements.append(parse_measurement(values))
    return sorted(measurements, key=lambda measurement: -measurement.time)


def record_measurement(engine: DockerEngine, measurement: ClusterMeasurement) -> None:
    """Store `measurement` with the newest of the earlier ones. Raises EngineError if the manager refuses."""
    replaced = _read_records(engine, _MEASUREMENTS_KIND)
    kept: list[dict[str, Any]] = []
    size = 0
    for each in [measurement, *read_measurements(engine)][:_MAX_MEASUREMENTS]:
        values = each.to_dict()
        size += len(json.dumps(values))
        if not kept or size <= _MAX_MEASUREMENT_BYTES:
            kept.append(values)
    _replace_records(engine, _MEASUREMENTS_KIND, kept, replaced)


def _read_records(engine: DockerEngine, kind: str) -> list[_StoredRecord]:
    """Return the records of `kind`. Raises EngineError."""
    return [_parse_record(item) for item in engine.list_objects("/configs", label=f"{LABEL_MACHINES}={kind}")]


def _replace_records(engine: DockerEngine, kind: str, value: Any, replaced: Sequence[_StoredRecord]) -> None:
    """Store `value` as the record of `kind`, and remove the records `replaced`. Raises EngineError if the manager refuses."""
    body = {
        "Name": f"{_NAME_PREFIX}-{secrets.token_hex(5)}",
        "Labels": {LABEL_MACHINES: kind},
        "Data": base64.b64encode(json.dumps(value).encode()).decode(),
    }
    engine.post("/configs/create", body)
    for record in replaced:
        with contextlib.suppress(EngineError):  # another command has replaced it
            engine.delete(f"/configs/{record.object_id}")


def _parse_record(item: dict[str, Any]) -> _StoredRecord:
    try:
        return _StoredRecord(item["ID"], json.loads(base64.b64decode(item["Spec"]["Data"])))
    except (ValueError, TypeError, KeyError):
        return _StoredRecord(item["ID"])
