"""What is wanted against what is there, as the list of steps that is printed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from swarmtrain.config import Config
from swarmtrain.errors import StackError
from swarmtrain.images.pin import Pinned
from swarmtrain.launchers.swarm.observe import Observed, Service, natural
from swarmtrain.launchers.swarm.reconcile import Ended, Step, reconcile
from swarmtrain.launchers.swarm.specs import Specs, specs
from swarmtrain.plan import Cargo, CodeFile, Inventory, Machine, make_plan
from swarmtrain.render.compose import stack

IMAGE = "registry.lab:5000/swarmtrain:1"
MACHINES = Inventory("four machines", tuple(Machine(f"gpu-{index}", id=f"id{index}") for index in range(4)))


def wanted(nodes: int = 2, script: bytes = b"train()", digest: str = "a", **runner: Any) -> Specs:
    settings = {"nodes": nodes, "min_nodes": 1, "max_nodes": 4, "docker_config": {"docker_container": IMAGE}, **runner}
    config = Config.model_validate({"runner": settings})
    plan = make_plan(config, MACHINES, Cargo((CodeFile.of("training_code.py", script),)), run="run")
    return specs(stack(plan), {IMAGE: Pinned(f"{IMAGE}@sha256:{digest}", (("amd64", "linux"),))})


def stored(found: Specs) -> Observed:
    """Return what a swarm keeps of these specs: ids for names, and what the engine fills in by itself."""
    network_ids = {f"id of {name}": name for name in found.networks}
    services = {}
    for name, spec in found.services.items():
        kept = copy.deepcopy(spec)
        task = kept["TaskTemplate"]
        task.update(ForceUpdate=2, Runtime="container")
        task["RestartPolicy"]["MaxAttempts"] = 0
        task["ContainerSpec"]["Isolation"] = "default"
        for network in task["Networks"]:
            network["Target"] = f"id of {network['Target']}"
        for config in task["ContainerSpec"].get("Configs", []):
            config["ConfigID"] = f"id of {config['ConfigName']}"
        services[name] = Service(f"id of {name}", 7, kept)
    networks = {
        name: {**spec, "Id": f"id of {name}", "Options": {**spec["Options"], "com.docker.network.driver.overlay.vxlanid_list": "4097"}}
        for name, spec in found.networks.items()
    }
    return Observed("run", services, networks, {name: f"id of {name}" for name in found.configs}, {}, network_ids)


def nothing() -> Observed:
    return Observed("run", {}, {}, {}, {}, {})


def printed(steps: Sequence[Step]) -> list[str]:
    return [str(step) for step in steps]


def test_a_first_deploy_makes_everything_what_services_need_first() -> None:
    steps = printed(reconcile(wanted(), nothing()))
    config, code = (name for name in wanted().configs)
    assert steps == [
        f"create config {config}: is not there",
        f"create config {code}: is not there",
        "create network run_training: is not there",
        "create service run_node0: is not there",
        "create service run_node1: is not there",
        "create service run_rendezvous: is not there",
    ]


def test_what_is_equal_already_needs_no_step() -> None:
    assert reconcile(wanted(), stored(wanted())) == []


def test_scaling_up_only_adds() -> None:
    assert printed(reconcile(wanted(nodes=4), stored(wanted(nodes=3)))) == ["create service run_node3: is not there"]


def test_scaling_down_only_removes() -> None:
    assert printed(reconcile(wanted(nodes=3), stored(wanted(nodes=4)))) == ["remove service run_node3: is not in the plan"]


def test_beyond_max_nodes_every_node_restarts_and_the_cause_is_named() -> None:
    steps = reconcile(wanted(nodes=2, max_nodes=3), stored(wanted(nodes=2)))
    node0 = next(step for step in steps if step.name == "run_node0")
    assert node0.restarts
    assert "Env.SWARMTRAIN_MAX_NODES 4 → 3" in str(node0)
    assert str(node0).endswith("(restarts it)")


def test_edited_code_is_a_new_config_and_the_old_one_goes_last() -> None:
    steps = printed(reconcile(wanted(script=b"train_better()"), stored(wanted())))
    old = next(name for name in wanted().configs if "training_code" in name)
    new = next(name for name in wanted(script=b"train_better()").configs if "training_code" in name)
    assert steps[0] == f"create config {new}: is not there"
    assert steps[1].startswith("update service run_node0: Configs ")
    assert old in steps[1]
    assert new in steps[1]
    assert steps[2].startswith("update service run_node1: Configs ")
    assert steps[3:] == [f"remove config {old}: nothing uses it any more"]


def test_a_moved_tag_restarts_everything() -> None:
    steps = reconcile(wanted(digest="b"), stored(wanted(digest="a")))
    assert [(step.name, step.restarts) for step in steps] == [("run_node0", True), ("run_node1", True), ("run_rendezvous", True)]


def test_a_forced_restart_by_hand_is_not_undone_by_the_next_change() -> None:
    step = reconcile(wanted(digest="b"), stored(wanted()))[0]
    assert step.spec is not None
    assert step.spec["TaskTemplate"]["ForceUpdate"] == 2


def test_a_stopped_run_is_started_again() -> None:
    there = stored(wanted())
    for service in there.services.values():
        service.spec["Mode"] = {"Replicated": {"Replicas": 0}}
    assert printed(reconcile(wanted(), there)) == [
        "update service run_node0: Replicas 0 → 1",
        "update service run_node1: Replicas 0 → 1",
        "update service run_rendezvous: Replicas 0 → 1",
    ]


def test_a_failed_run_is_started_again_as_a_whole() -> None:
    steps = reconcile(wanted(), stored(wanted()), Ended(failed=True, why="out of memory"))
    cause = "the run had failed (out of memory) and starts again"
    assert printed(steps) == [f"update service run_{name}: {cause}" for name in ("node0", "node1", "rendezvous")]
    assert [step.spec["TaskTemplate"]["ForceUpdate"] for step in steps if step.spec] == [3, 3, 3]


def test_a_finished_run_is_left_alone_until_something_changes() -> None:
    ended = Ended(failed=False, why="all steps done")
    assert reconcile(wanted(), stored(wanted()), ended) == []
    steps = printed(reconcile(wanted(nodes=3), stored(wanted()), ended))
    assert steps[-1] == "update service run_rendezvous: the run had ended (all steps done) and starts again"
    assert "create service run_node2: is not there" in steps


def test_a_network_is_never_changed_in_place() -> None:
    with pytest.raises(StackError, match=r"com\.docker\.network\.driver\.mtu nothing, wanted 9000") as raised:
        reconcile(wanted(swarm={"mtu": 9000}), stored(wanted()))
    assert raised.value.place == "network run_training"
    assert "swarmtrain down run" in str(raised.value.hint)


def test_a_missing_external_network_is_named() -> None:
    with pytest.raises(StackError, match="site") as raised:
        reconcile(wanted(swarm={"network": "site"}), nothing())
    assert raised.value.hint == "docker network create --driver overlay site"


def test_names_sort_as_people_count() -> None:
    assert sorted(["node10", "node2", "a", "node1"], key=natural) == ["a", "node1", "node2", "node10"]
