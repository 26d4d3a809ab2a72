"""Differences between a plan and the running run: each config key, file and node that a deploy would change, and the consequence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.launchers.base import TaskState
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import RENDEZVOUS_SERVICE
from swarmtrain.view.formatting import format_count

# Config settings of a network that Swarm cannot change in place.
_NETWORK_KEYS = ("runner.swarm.mtu", "runner.swarm.subnet", "runner.swarm.encrypted", "runner.swarm.internal")
_MAX_VALUE_LENGTH = 60


def list_differences(
    plan: Plan,
    deployed_config: Config,
    deployed_cargo: Cargo,
    tasks: Sequence[TaskState],
    restarted_service_count: int,
    *,
    has_checkpoint: bool,
) -> list[str]:
    """Return the differences between `plan` and the run deployed with `deployed_config` and `deployed_cargo`, one per line.

    `restarted_service_count` is the number of services that a change of the config or of a file restarts; 0 if no service is running.
    `has_checkpoint`: whether the run has reported that it saved or loaded a checkpoint.
    """
    start_point = _describe_start_point(plan.config.trainer.save_dir, deployed_config.trainer.save_dir, has_checkpoint=has_checkpoint)
    services = format_count(restarted_service_count, "service")
    restart_note = f", restarts {services} {start_point}" if restarted_service_count else ""
    network_note = _describe_network_recreation(plan)
    changed = [
        f"{key}: {_abbreviate_value(old)} → {_abbreviate_value(new)}{network_note if key in _NETWORK_KEYS else restart_note}"
        for key, old, new in iterate_changed_keys(deployed_config, plan.config)
    ]
    return [
        *changed,
        *(f"{line}{restart_note}" for line in _iterate_changed_files(plan.cargo, deployed_cargo)),
        *_iterate_changed_nodes(plan, tasks),
    ]


def _describe_start_point(save_dir: Path | None, deployed_save_dir: Path | None, *, has_checkpoint: bool) -> str:
    if save_dir is None:
        return "from the beginning: trainer.save_dir is null"
    if save_dir != deployed_save_dir:
        return f"from the newest checkpoint in {save_dir}, if there is one"
    return "from the last checkpoint" if has_checkpoint else "although it has not reported a checkpoint yet"


def _describe_network_recreation(plan: Plan) -> str:
    return f", needs a new network: swarmtrain down {plan.run}, then deploy again"


def iterate_changed_keys(old_config: Config, new_config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield each config key whose value differs, with both values. Where a run is, is not compared: its hosts and current node count."""
    old_values, new_values = (
        _flatten_to_dotted_keys(config.to_node_config().model_dump(mode="json")) for config in (old_config, new_config)
    )
    for key in [*new_values, *(key for key in old_values if key not in new_values)]:
        is_filled = {} in (old_values.get(key), new_values.get(key)) and any(
            name.startswith(f"{key}.") for name in (*old_values, *new_values)
        )
        if new_values.get(key) != old_values.get(key) and not is_filled:  # the entries of a mapping that was empty are listed
            yield key, old_values.get(key), new_values.get(key)


def _flatten_to_dotted_keys(nested_mapping: Mapping[str, Any], key_prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by their dotted keys; a list counts as a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in nested_mapping.items():
        leaves |= (
            _flatten_to_dotted_keys(value, f"{key_prefix}{key}.") if isinstance(value, dict) and value else {f"{key_prefix}{key}": value}
        )
    return leaves


def _iterate_changed_files(new_cargo: Cargo, deployed_cargo: Cargo) -> Iterator[str]:
    for label, new_files, old_files in (("", new_cargo.code, deployed_cargo.code), ("secret ", new_cargo.secrets, deployed_cargo.secrets)):
        old_digests, new_digests = _map_digests_by_file_name(old_files), _map_digests_by_file_name(new_files)
        for name in sorted({*old_digests, *new_digests}):
            if old_digests.get(name) != new_digests.get(name):
                yield f"{label}{name}: {'new' if name not in old_digests else 'removed' if name not in new_digests else 'changed'}"


def _map_digests_by_file_name(files: Sequence[RunFile]) -> dict[str, str]:
    return {item.name: item.digest for item in files}


def _iterate_changed_nodes(plan: Plan, tasks: Sequence[TaskState]) -> Iterator[str]:
    current_hosts = {task.node: task.host for task in tasks if task.node != RENDEZVOUS_SERVICE}
    for node in plan.nodes:
        if node.name not in current_hosts:
            yield f"{node.name}: added on {node.host}"
        elif current_hosts[node.name] not in ("", node.host):
            yield f"{node.name}: moves from {current_hosts[node.name]} to {node.host}"
    for name in sorted(current_hosts.keys() - {node.name for node in plan.nodes}):
        yield f"{name}: removed from {current_hosts[name]}"


def _abbreviate_value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 1]}…"
