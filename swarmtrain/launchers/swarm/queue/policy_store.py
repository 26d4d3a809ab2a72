"""The policy of the queue, stored in the swarm as a config object with the text of its YAML file, comments included."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from typing import Any

from swarmtrain.config.loader import parse_section
from swarmtrain.config.schema.queue_policy import QueuePolicy
from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine

LABEL_POLICY = "swarmtrain.queue.policy"
_NAME_PREFIX = "swarmtrain-queue-policy"
DEFAULT_POLICY = QueuePolicy()


def read_policy_text(engine: DockerEngine) -> str:
    """Return the text of the stored policy; empty if none is stored. Raises EngineError."""
    newest = _find_newest(engine)
    return base64.b64decode(newest["Spec"]["Data"]).decode() if newest else ""


def read_policy(engine: DockerEngine) -> QueuePolicy:
    """Return the stored policy, or the default one. Raises EngineError; ConfigError if another version of swarmtrain has stored it."""
    text = read_policy_text(engine)
    return parse_section(text, QueuePolicy, source="the stored queue policy") if text else DEFAULT_POLICY


def find_policy_id(engine: DockerEngine) -> str:
    """Return the id of the config object with the policy; empty if none is stored. Raises EngineError."""
    newest = _find_newest(engine)
    return str(newest["ID"]) if newest else ""


def store_policy(engine: DockerEngine, text: str, *, source: str) -> QueuePolicy:
    """Check the policy in the YAML text `text`, store it instead of the earlier one, and return it. Raises ConfigError, EngineError."""
    policy = parse_section(text, QueuePolicy, source=source)
    earlier = engine.list_objects("/configs", label=LABEL_POLICY)
    content = text.encode()
    name = f"{_NAME_PREFIX}-{hashlib.sha256(content).hexdigest()[:10]}"
    if all(item["Spec"]["Name"] != name for item in earlier):
        body = {"Name": name, "Labels": {LABEL_POLICY: ""}, "Data": base64.b64encode(content).decode()}
        try:
            engine.post("/configs/create", body)
        except EngineError as error:
            if error.status != 409:  # another person stores the same policy
                raise
    for item in earlier:
        if item["Spec"]["Name"] != name:
            with contextlib.suppress(EngineError):  # another person has replaced it
                engine.delete(f"/configs/{item['ID']}")
    return policy


def _find_newest(engine: DockerEngine) -> dict[str, Any] | None:
    """Return the config object with the policy. If there are two, because two persons stored one at the same time, the later counts."""
    stored = engine.list_objects("/configs", label=LABEL_POLICY)
    return max(stored, key=lambda item: int(item["Version"]["Index"]), default=None)
