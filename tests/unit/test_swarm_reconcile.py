"""The desired state compared with the stored one, as the printed list of steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Network
from typing import Any

import pytest

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import StackError
from swarmtrain.images.pinning import PinnedImage
from swarmtrain.launchers.swarm.cluster_state import Service, StackState, build_natural_sort_key
from swarmtrain.launchers.swarm.reconcile import EndedRun, ReconcileStep, reconcile
from swarmtrain.launchers.swarm.service_specs import StackSpecs, build_stack_specs
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.plan import build_plan
from swarmtrain.render.stack_document import render_stack

IMAGE = "registry.lab:5000/swarmtrain:1"
MACHINES = Inventory("four machines", tuple(Machine(f"gpu-{index}", id=f"id{index}") for index in range(4)))


def build_desired_specs(nodes: int = 2, script: bytes = b"train()", digest: str = "a", **runner: Any) -> StackSpecs:
    settings = {"nodes": nodes, "min_nodes": 1, "max_nodes": 4, "docker_config": {"docker_container": IMAGE}, **runner}
    config = Config.model_validate({"runner": settings})
    plan = build_plan(config, MACHINES, Cargo((RunFile.from_content("training_code.py", script),)), run="run")
    return build_stack_specs(render_stack(plan), {IMAGE: PinnedImage(f"{IMAGE}@sha256:{digest}", (("amd64", "linux"),))})


def build_stored_state(desired: StackSpecs) -> StackState:
    """Return the state that a swarm stores for `desired`: ids instead of names, and values that the engine fills in by itself."""
    network_ids = {f"id of {name}": name for name in desired.networks}
    services = {}
    for name, spec in desired.services.items():
        stored_spec = copy.deepcopy(spec)
        task = stored_spec["TaskTemplate"]
        task.update(ForceUpdate=2, Runtime="container")
        task["RestartPolicy"]["MaxAttempts"] = 0
        task["ContainerSpec"]["Isolation"] = "default"
        for network in task["Networks"]:
            network["Target"] = f"id of {network['Target']}"
        for config in task["ContainerSpec"].get("Configs", []):
            config["ConfigID"] = f"id of {config['ConfigName']}"
        services[name] = Service(f"id of {name}", 7, stored_spec)
    networks = {
        name: {**spec, "Id": f"id of {name}", "Options": {**spec["Options"], "com.docker.network.driver.overlay.vxlanid_list": "4097"}}
        for name, spec in desired.networks.items()
    }
    return StackState("run", services, networks, {name: f"id of {name}" for name in desired.configs}, {}, network_ids)


def build_empty_state() -> StackState:
    return StackState("run", {}, {}, {}, {}, {})


def format_steps(steps: Sequence[ReconcileStep]) -> list[str]:
    return [str(step) for step in steps]


def test_a_first_deploy_makes_everything_what_services_need_first() -> None:
    steps = format_steps(reconcile(build_desired_specs(), build_empty_state()))
    config, code = (name for name in build_desired_specs().configs)
    assert steps == [
        f"create config {config}: is new",
        f"create config {code}: is new",
        "create network run_training: is new",
        "create service run_node0: is new",
        "create service run_node1: is new",
        "create service run_rendezvous: is new",
    ]


def test_what_is_equal_already_needs_no_step() -> None:
    assert reconcile(build_desired_specs(), build_stored_state(build_desired_specs())) == []


def test_a_subnet_that_another_network_has_is_refused_before_anything_is_created() -> None:
    desired = build_desired_specs(swarm={"subnet": "10.20.0.0/24"})
    existing = replace(build_empty_state(), swarm_subnets={"ingress": ("10.0.0.0/24",), "other_training": ("10.20.0.0/16",)})
    with pytest.raises(StackError, match=r"subnet 10\.20\.0\.0/24 overlaps with 10\.20\.0\.0/16, .* network other_training") as raised:
        reconcile(desired, existing)
    assert raised.value.place == "network run_training"
    assert raised.value.hint is not None
    suggested = IPv4Network(raised.value.hint.removeprefix("set runner.swarm.subnet: "))
    assert suggested.prefixlen == 24
    assert not suggested.overlaps(IPv4Network("10.20.0.0/16"))
    assert reconcile(desired, replace(existing, swarm_subnets={"other_training": ("10.21.0.0/16",)}))


def test_a_run_keeps_its_own_subnet() -> None:
    desired = build_desired_specs(swarm={"subnet": "10.20.0.0/24"})
    existing = replace(build_stored_state(desired), swarm_subnets={"run_training": ("10.20.0.0/24",)})
    assert reconcile(desired, existing) == []
    with pytest.raises(StackError, match=r"Subnet \['10\.20\.0\.0/24'\], expected \['10\.21\.0\.0/24'\]"):
        reconcile(build_desired_specs(swarm={"subnet": "10.21.0.0/24"}), existing)


def test_scaling_up_only_adds() -> None:
    assert format_steps(reconcile(build_desired_specs(nodes=4), build_stored_state(build_desired_specs(nodes=3)))) == [
        "create service run_node3: is new"
    ]


def test_scaling_down_only_removes() -> None:
    assert format_steps(reconcile(build_desired_specs(nodes=3), build_stored_state(build_desired_specs(nodes=4)))) == [
        "remove service run_node3: is not in the plan"
    ]


def test_beyond_max_nodes_every_node_restarts_and_the_cause_is_named() -> None:
    steps = reconcile(build_desired_specs(nodes=2, max_nodes=3), build_stored_state(build_desired_specs(nodes=2)))
    node0 = next(step for step in steps if step.name == "run_node0")
    assert node0.restarts
    assert "Env.SWARMTRAIN_MAX_NODES 4 → 3" in str(node0)
    assert str(node0).endswith("(restarts it)")


def test_edited_code_is_a_new_config_and_the_old_one_goes_last() -> None:
    steps = format_steps(reconcile(build_desired_specs(script=b"train_better()"), build_stored_state(build_desired_specs())))
    old = next(name for name in build_desired_specs().configs if "training_code" in name)
    new = next(name for name in build_desired_specs(script=b"train_better()").configs if "training_code" in name)
    assert steps[0] == f"create config {new}: is new"
    assert steps[1].startswith("update service run_node0: Configs ")
    assert old in steps[1]
    assert new in steps[1]
    assert steps[2].startswith("update service run_node1: Configs ")
    assert steps[3:] == [f"remove config {old}: is no longer used"]


def test_a_moved_tag_restarts_everything() -> None:
    steps = reconcile(build_desired_specs(digest="b"), build_stored_state(build_desired_specs(digest="a")))
    assert [(step.name, step.restarts) for step in steps] == [("run_node0", True), ("run_node1", True), ("run_rendezvous", True)]


def test_a_forced_restart_by_hand_is_not_undone_by_the_next_change() -> None:
    step = reconcile(build_desired_specs(digest="b"), build_stored_state(build_desired_specs()))[0]
    assert step.spec is not None
    assert step.spec["TaskTemplate"]["ForceUpdate"] == 2


def test_a_stopped_run_is_restarted() -> None:
    existing = build_stored_state(build_desired_specs())
    for service in existing.services.values():
        service.spec["Mode"] = {"Replicated": {"Replicas": 0}}
    assert format_steps(reconcile(build_desired_specs(), existing)) == [
        "update service run_node0: Replicas 0 → 1",
        "update service run_node1: Replicas 0 → 1",
        "update service run_rendezvous: Replicas 0 → 1",
    ]


def test_a_failed_run_is_restarted_as_a_whole() -> None:
    steps = reconcile(build_desired_specs(), build_stored_state(build_desired_specs()), EndedRun(failed=True, why="out of memory"))
    cause = "the run had failed (out of memory) and is restarted"
    assert format_steps(steps) == [f"update service run_{name}: {cause}" for name in ("node0", "node1", "rendezvous")]
    assert [step.spec["TaskTemplate"]["ForceUpdate"] for step in steps if step.spec] == [3, 3, 3]


def test_a_finished_run_is_left_alone_until_something_changes() -> None:
    ended = EndedRun(failed=False, why="all steps done")
    assert reconcile(build_desired_specs(), build_stored_state(build_desired_specs()), ended) == []
    steps = format_steps(reconcile(build_desired_specs(nodes=3), build_stored_state(build_desired_specs()), ended))
    assert steps[-1] == "update service run_rendezvous: the run had ended (all steps done) and is restarted"
    assert "create service run_node2: is new" in steps


def test_a_network_is_never_changed_in_place() -> None:
    with pytest.raises(StackError, match=r"com\.docker\.network\.driver\.mtu nothing, expected 9000") as raised:
        reconcile(build_desired_specs(swarm={"mtu": 9000}), build_stored_state(build_desired_specs()))
    assert raised.value.place == "network run_training"
    assert "swarmtrain down run" in str(raised.value.hint)


def test_a_missing_external_network_is_named() -> None:
    with pytest.raises(StackError, match="site") as raised:
        reconcile(build_desired_specs(swarm={"network": "site"}), build_empty_state())
    assert raised.value.hint == "docker network create --driver overlay site"


def test_names_sort_as_people_count() -> None:
    assert sorted(["node10", "node2", "a", "node1"], key=build_natural_sort_key) == ["a", "node1", "node2", "node10"]
