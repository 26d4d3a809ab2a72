"""What `swarmtrain doctor` has measured on the swarm's nodes, kept in a Swarm config object for the estimates of later plans."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.machines.machine_records import read_records, replace_records
from swarmtrain.planning.step_estimates import ClusterMeasurement, parse_measurement

_KIND = "measurements"
_MAX_COUNT = 16
_MAX_BYTES = 400_000
"""Swarm refuses config objects of more than 500 kB (1 MB since Docker 26)."""


def read_measurements(engine: DockerEngine) -> list[ClusterMeasurement]:
    """Return the measurements, the newest first; empty if the manager does not list its config objects."""
    measurements = []
    with contextlib.suppress(EngineError):
        for record in read_records(engine, _KIND):
            for values in record.value if isinstance(record.value, list) else ():
                with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
                    measurements.append(parse_measurement(values))
    return sorted(measurements, key=lambda measurement: -measurement.time)


def record_measurement(engine: DockerEngine, measurement: ClusterMeasurement) -> None:
    """Store `measurement` with the newest of the earlier ones. Raises EngineError if the manager refuses."""
    replaced = read_records(engine, _KIND)
    kept: list[dict[str, Any]] = []
    size = 0
    for each in [measurement, *read_measurements(engine)][:_MAX_COUNT]:
        values = each.to_dict()
        size += len(json.dumps(values))
        if not kept or size <= _MAX_BYTES:
            kept.append(values)
    replace_records(engine, _KIND, kept, replaced)
