"""What a deploy would change in a run that is up: each key of the config, each file and node, and what the change takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swarmtrain.config import Config
from swarmtrain.launchers.base import TaskState
from swarmtrain.plan import Cargo, CodeFile, Plan
from swarmtrain.view.times import counted
from swarmtrain.wire import RENDEZVOUS

# What Swarm cannot change in a network that is there.
_OF_THE_NETWORK = ("runner.swarm.mtu", "runner.swarm.encrypted", "runner.swarm.internal")
_SHOWN = 60


def differences(plan: Plan, config: Config, cargo: Cargo, tasks: Sequence[TaskState], restarting: int) -> list[str]:
    """Return, a line each, how `plan` differs from the run that was brought up with `config` and `cargo`.

    `restarting` is how many services a change of the config or of a file restarts; 0 if none runs.
    """
    takes = _restart(plan, restarting)
    changed = [
        f"{key}: {_shown(old)} → {_shown(new)}{_anew(plan) if key in _OF_THE_NETWORK else takes}" for key, old, new in _keys(plan, config)
    ]
    return [*changed, *(f"{line}{takes}" for line in _files(plan.cargo, cargo)), *_nodes(plan, tasks)]


def _restart(plan: Plan, count: int) -> str:
    if not count:
        return ""
    begin = "from the beginning: trainer.save_dir is null" if plan.config.trainer.save_dir is None else "from the last checkpoint"
    return f", restarts {counted(count, 'service')} {begin}"


def _anew(plan: Plan) -> str:
    return f", needs the network made anew: swarmtrain down {plan.run}, then deploy again"


def _keys(plan: Plan, config: Config) -> Iterator[tuple[str, Any, Any]]:
    new, old = _flat(plan.config.resolved().model_dump(mode="json")), _flat(config.resolved().model_dump(mode="json"))
    for key in [*new, *(key for key in old if key not in new)]:
        if new.get(key) != old.get(key):
            yield key, old.get(key), new.get(key)


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the leaves by their dotted keys; a list is a leaf."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) and value else {f"{path}{key}": value}
    return found


def _files(new: Cargo, old: Cargo) -> Iterator[str]:
    for kind, wanted, there in (("", new.code, old.code), ("secret ", new.secrets, old.secrets)):
        had, has = _digests(there), _digests(wanted)
        for name in sorted({*had, *has}):
            if had.get(name) != has.get(name):
                yield f"{kind}{name}: {'new' if name not in had else 'gone' if name not in has else 'edited'}"


def _digests(files: Sequence[CodeFile]) -> dict[str, str]:
    return {item.name: item.digest for item in files}


def _nodes(plan: Plan, tasks: Sequence[TaskState]) -> Iterator[str]:
    there = {task.node: task.host for task in tasks if task.node != RENDEZVOUS}
    for node in plan.nodes:
        if node.name not in there:
            yield f"{node.name}: comes, on {node.host}"
        elif there[node.name] not in ("", node.host):
            yield f"{node.name}: moves from {there[node.name]} to {node.host}"
    for name in sorted(there.keys() - {node.name for node in plan.nodes}):
        yield f"{name}: leaves {there[name]}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
