"""Known bugs of engine versions are warnings of a plan that they affect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.launchers.swarm.plan_checks import ENGINE_BUGS, _check_engine_versions
from swarmtrain.planning.inventory import Machine, build_offline_inventory
from swarmtrain.planning.plan import Plan, build_plan


def build_swarm_plan(**swarm: Any) -> Plan:
    runner = {"hosts": ["a"], "swarm": swarm, "master_addr": "10.0.0.1" if swarm.get("network") == "host" else None}
    config = Config.from_json(json.dumps({"runner": runner}))
    return build_plan(config, build_offline_inventory(config.runner.host_entries), Cargo(()), run="demo")


def list_effects(*versions: str, **swarm: Any) -> list[str]:
    machines = [Machine(host=f"gpu-{number}", engine=version) for number, version in enumerate(versions)]
    findings = _check_engine_versions(build_swarm_plan(**swarm), machines)
    assert not [finding for finding in findings if finding.fatal or not finding.hint]
    return [f"{finding.place}: {finding.message}" for finding in findings]


@pytest.mark.parametrize(
    ("version", "swarm", "effects"),
    [
        ("20.10.24", {}, []),
        ("20.10.24+dfsg1", {"gpu": "reserve"}, ["rejects tasks that reserve GPUs"]),
        ("25.0.2", {"gpu": "reserve"}, ["rejects tasks that reserve GPUs"]),
        ("25.0.3", {"gpu": "reserve"}, []),
        ("25.0.13", {}, ["may not connect containers on different machines"]),
        ("26.1.5", {"gpu": "reserve", "encrypted": True}, []),
        ("27.0.3", {}, ["may give the networks of two runs the same subnet"]),
        ("27.0.3", {"network": "mine"}, []),
        ("27.1.0", {}, []),
        ("28.2.2", {}, ["may not find services by their names"]),
        ("28.2.2", {"network": "host"}, []),
        ("28.5.2", {}, []),
        ("29.0.0", {}, ["may not resolve names after docker swarm init", "may not resolve the names of a node's services"]),
        ("29.1.0", {}, ["may not resolve the names of a node's services", "may not resolve the names of services"]),
        (
            "29.2.0",
            {"encrypted": True},
            ["may not resolve the names of a node's services", "may not connect containers through an encrypted"],
        ),
        ("29.6.2", {"network": "host"}, ["rejects images that it already has"]),
        ("29.7.0", {}, []),
        ("29.7.0", {"encrypted": True}, ["may not connect containers through an encrypted"]),
        ("", {"gpu": "reserve"}, []),
    ],
)
def test_a_version_with_a_known_bug_is_a_warning(version: str, swarm: dict[str, Any], effects: list[str]) -> None:
    found = list_effects(version, **swarm)
    assert len(found) == len(effects)
    assert all(line.startswith(f"node gpu-0: engine {version} {effect}") for line, effect in zip(found, effects, strict=True))


def test_machines_with_the_same_version_share_a_warning() -> None:
    assert list_effects("28.2.0", "28.3.0", "28.2.0", "28.2.1") == [
        "nodes gpu-0, gpu-2: engine 28.2.0 may not find services by their names",
        "node gpu-3: engine 28.2.1 may not find services by their names",
    ]


def test_the_table_is_sorted_by_version() -> None:
    assert all(bug.first <= bug.last for bug in ENGINE_BUGS)
    assert [bug.first for bug in ENGINE_BUGS] == sorted(bug.first for bug in ENGINE_BUGS)
