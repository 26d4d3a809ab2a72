"""What has changed since a checkpoint was written, which a run that resumes from it logs: config, arguments and script."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarmtrain.config import Config
from swarmtrain.config.learning_rate_schedule import describe_learning_rate_change
from swarmtrain.trainer.checkpoint.compatibility import diff_configs
from swarmtrain.trainer.checkpoint.manifest import Manifest


def describe_changes_since_checkpoint(manifest: Manifest, config: Config) -> Iterator[str]:
    """Yield a description of each change in config, arguments and script since the checkpoint of `manifest` was written.

    A change of the schedule that changes the learning rate of the next step is described too. Of the environment variables in runner.env
    only the names are given, since their values may be confidential.
    """
    configs = manifest.config, config.model_dump(mode="json")
    saved_env, current_env = ((each.get("runner") or {}).get("env") or {} for each in configs)
    saved, current = ({**each, "runner": {**(each.get("runner") or {}), "env": {}}} for each in configs)
    yield from diff_configs(saved, current, "config")
    yield from (
        f"config.runner.env.{name} has changed" for name in sorted(saved_env.keys() & current_env) if saved_env[name] != current_env[name]
    )
    try:
        if line := describe_learning_rate_change(Config.from_json(json.dumps(manifest.config)), config, manifest.step + 1):
            yield line
    except ValidationError:
        pass  # of a version whose config had other keys: the lines above name what both have
    saved_script, current_script = manifest.state.get("script", {}), describe_script()
    if saved_script.get("arguments", current_script["arguments"]) != current_script["arguments"]:
        saved_arguments, current_arguments = (" ".join(script["arguments"]) for script in (saved_script, current_script))
        yield f"arguments are {saved_arguments} in the checkpoint and {current_arguments} in this run"
    if saved_script.get("sha256", current_script["sha256"]) != current_script["sha256"]:
        yield f"{current_script['name']} has changed since the checkpoint"


def describe_script() -> dict[str, Any]:
    """Return name, arguments and digest of the running script, for checkpoints."""
    path = Path(getattr(sys.modules["__main__"], "__file__", "") or "")
    content = path.read_bytes() if path.is_file() else b""
    return {"name": path.name, "arguments": sys.argv[1:], "sha256": hashlib.sha256(content).hexdigest()}
