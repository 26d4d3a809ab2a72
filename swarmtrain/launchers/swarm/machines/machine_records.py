"""Records about the machines of a swarm, kept in Swarm config objects for later plans: one object for each kind of record.

A config object cannot be changed, so a new one replaces it. If two exist, because two commands ended at the same time, their readers merge
them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine

LABEL_MACHINES = "swarmtrain.machines"
_NAME_PREFIX = "swarmtrain-machines"


@dataclass(frozen=True)
class StoredRecord:
    """A config object, and the JSON value in it; None if it is not in the expected form."""

    object_id: str
    value: Any = None


def read_records(engine: DockerEngine, kind: str) -> list[StoredRecord]:
    """Return the records of `kind`. Raises EngineError."""
    return [_parse_record(item) for item in engine.list_objects("/configs", label=f"{LABEL_MACHINES}={kind}")]


def replace_records(engine: DockerEngine, kind: str, value: Any, replaced: Sequence[StoredRecord]) -> None:
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


def _parse_record(item: dict[str, Any]) -> StoredRecord:
    try:
        return StoredRecord(item["ID"], json.loads(base64.b64decode(item["Spec"]["Data"])))
    except (ValueError, TypeError, KeyError):
        return StoredRecord(item["ID"])
