"""The Swarm launcher on a real swarm: the same stack as `docker stack deploy` makes, changed in place, followed, and gone when it is down.

The containers run a stand-in for the entrypoint that starts in no time: what they do does not matter here.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from stand_in import NODES, RUN, SILENT, command_lines, docker, nothing_left, say, task_ids

from swarmtrain import wire
from swarmtrain.config.runner import NcclDebug
from swarmtrain.errors import EngineError, ImageError, RunNotFound, StackError
from swarmtrain.lab import REGISTRY, Lab
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.kept import directory
from swarmtrain.launchers.swarm import SwarmLauncher, observe
from swarmtrain.launchers.swarm.patience import Patience
from swarmtrain.plan import Plan, make_plan
from swarmtrain.render.compose import stack, write
from swarmtrain.view.logs import Choice, show_logs
from swarmtrain.view.look import show_history
from swarmtrain.view.runs import take_down


def snapshot(engine: Engine) -> dict[str, Any]:
    """Return the whole Spec of everything in the stack, and the whole networks, names in the place of ids.

    Of a network only what no one can ask for is left out: its id, birthday, VXLAN number and the subnet it was dealt.
    """
    kinds = {kind: engine.listing(f"/{kind}", label=f"{wire.LABEL_STACK}={RUN}") for kind in ("services", "configs", "secrets")}
    networks = [item for item in engine.listing("/networks") if item["Name"].startswith(f"{RUN}_")]
    names = {item["Id"]: item["Name"] for item in networks}
    names |= {item["ID"]: item["Spec"]["Name"] for kind in ("configs", "secrets") for item in kinds[kind]}
    for network in networks:
        del network["Created"]
        del network["Options"]["com.docker.network.driver.overlay.vxlanid_list"]
        network["IPAM"]["Config"] = len(network["IPAM"]["Config"])
    specs = {kind: sorted((item["Spec"] for item in items), key=lambda spec: str(spec["Name"])) for kind, items in kinds.items()}
    text = json.dumps({**specs, "networks": networks}, sort_keys=True, indent=1)
    for number, name in names.items():
        text = text.replace(number, f"id of {name}")
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_same_specs_as_docker_stack_deploy(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan], tmp_path: Path) -> None:
    engine = launcher._engine
    (lab.shared / "data").mkdir(exist_ok=True)
    plan = planned(
        mounts=(("/mnt/shared/data", "/data"), ("cache", "/cache")),
        env={"PLAIN": "1", "EMPTY": "", "ODD": "$HOME {{.Node.ID}} a=b 'c'"},
        swarm={"mtu": 1400, "internal": True},
        docker_config={
            "docker_container": planned().config.runner.docker_config.docker_container,
            "docker_mounts": (("/mnt/shared/data", "/data"), ("cache", "/cache"), ("scratch", "/scratch")),
            "volumes": {"scratch": {"type": "tmpfs", "device": "tmpfs", "o": "size=1m"}},
            "cache_dir": "/cache",
            "user": "1001:1001",
            "cpus": 0.5,
            "memory": 2**30,
            "shm_size": 2**20,
        },
    )
    write(stack(plan), tmp_path / "generated.yml")
    launcher.up(plan, say)
    ours = snapshot(engine)
    assert len(ours["services"]) == 3
    assert len(ours["configs"]) == 2
    launcher.down(RUN, say)
    for program in command_lines():
        docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN, program=program)
        assert snapshot(engine) == ours, program
        assert launcher.changes(plan) == [], program
        launcher.down(RUN, SILENT)


def test_the_host_network_and_rdma_are_the_same_by_docker_stack_deploy(
    lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan], tmp_path: Path
) -> None:
    """Compared without waiting for containers: a lab's engines may not raise the limit on locked memory."""
    plan = planned(nodes=1, swarm={"network": "host", "rdma": True}, nccl={"debug": NcclDebug.info})
    write(stack(plan), tmp_path / "generated.yml")
    for program in command_lines():
        docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN, program=program)
        assert launcher.changes(plan) == [], program
        launcher.down(RUN, SILENT)


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_run_is_seen_changed_and_taken_down(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan], tmp_path: Path) -> None:
    engine = launcher._engine
    launcher.up(planned(), say)
    first = task_ids(engine)
    assert {name: len(ids) for name, ids in first.items()} == {"demo_node0": 1, "demo_node1": 1, "demo_rendezvous": 1}

    # Docker's own commands see it, and whoever comes later finds it.
    assert [line.split()[:2] for line in docker(lab, "stack", "ls").splitlines()[1:]] == [[RUN, "3"]]
    assert docker(lab, "stack", "services", RUN, "--format", "{{.Name}} {{.Replicas}}").split("\n")[:3] == [
        "demo_node0 1/1", "demo_node1 1/1", "demo_rendezvous 1/1",
    ]  # fmt: skip
    assert "demo_node1.1" in docker(lab, "stack", "ps", RUN)
    later = SwarmLauncher(lab.docker_host("node0"))
    assert later.runs() == [RUN]
    assert [(task.node, task.host, task.state) for task in later.tasks(RUN)] == [
        ("node0", "node0", "running"), ("node1", "node1", "running"), ("rendezvous", "node0", "running"),
    ]  # fmt: skip
    assert [event.kind for event in later.events(RUN)] == [wire.BOARD_UP]

    # The same again changes nothing, by whomever.
    later.up(planned(), say)
    write(stack(planned()), tmp_path / "generated.yml")
    docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN)
    assert task_ids(engine) == first

    # Scaling leaves the others alone, and works from what the swarm knows.
    config, cargo = later.deployed(RUN)
    assert cargo.code == planned().cargo.code
    three = make_plan(config, later.inventory(), cargo, run=RUN, nodes=3)
    later.up(three, say)
    assert task_ids(engine) == {**first, "demo_node2": task_ids(engine)["demo_node2"]}
    later.up(planned(), say)
    assert {name: ids for name, ids in task_ids(engine).items() if name != "removed"} == first

    # An edited script restarts the nodes and not the board.
    later.up(planned(script=b"train_better()\n"), say)
    after = task_ids(engine)
    assert after["demo_rendezvous"] == first["demo_rendezvous"]
    assert len(after["demo_node0"] - first["demo_node0"]) == 1
    assert len(observe.observe(engine, RUN).configs) == 2

    with pytest.raises(StackError, match="Swarm cannot change a network in place"):
        later.up(planned(swarm={"mtu": 1400}), say)

    # Docker's own removal, and at once ours on top of what it left, and at once a new one.
    subprocess.run(["docker", "-H", lab.docker_host("node0"), "stack", "rm", RUN], check=False, capture_output=True)
    if not observe.observe(engine, RUN).empty:
        launcher.down(RUN, say)
    launcher.up(planned(), say)
    launcher.down(RUN, say)
    assert nothing_left(lab, engine)
    with pytest.raises(RunNotFound):
        launcher.down(RUN, say)


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_stopped_containers_leave_and_come_back(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    launcher.up(planned(), say)
    launcher.stop(RUN, say)
    assert [(task.node, task.state) for task in launcher.tasks(RUN)] == [
        ("node0", "stopped"),
        ("node1", "stopped"),
        ("rendezvous", "running"),
    ]
    names = [docker(lab, "ps", "--format", "{{.Names}}", "--filter", f"label={wire.LABEL_STACK}={RUN}", node=node) for node in NODES]
    assert "".join(names).split(".")[0] == "demo_rendezvous"
    assert "node" not in "".join(names)
    # What the board knows is known still, whoever follows is told that it is over, and stopping again changes nothing.
    assert [event.kind for event in launcher.events(RUN)] == [wire.BOARD_UP]
    assert [update for update in launcher.watch(RUN) if isinstance(update, wire.Event) and update.kind == wire.VERDICT] == []
    board = task_ids(launcher._engine)["demo_rendezvous"]
    launcher.stop(RUN, say)
    # Swarm has forgotten the logs with the tasks; what was said last is kept here.
    assert [(directory(RUN) / f"node{number}.log").read_text().splitlines()[-1].partition(" ")[2] for number in (0, 1)] == [
        "[rank 0] saved"
    ] * 2
    assert {str(step).partition(": ")[2] for step in launcher.changes(planned())} == {"Replicas 0 → 1"}
    launcher.up(planned(), say)
    assert {task.state for task in launcher.tasks(RUN)} == {"running"}
    assert task_ids(launcher._engine)["demo_rendezvous"] == board


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_run_is_followed_to_its_verdict(launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    launcher.up(planned(max_restarts=77), say)
    updates = list(launcher.watch(RUN))
    lines = [update for update in updates if isinstance(update, LogLine)]
    assert {(line.node, line.rank) for line in lines} == {("node0", 0), ("node1", 0)}
    assert {len(line.text) for line in lines if line.text.startswith("step 1 of node1")} == {40_000 + len("step 1 of node1")}
    assert [line.text[:6] for line in lines if line.node == "node0"][:3] == ["step 0", "step 1", "step 2"]
    verdicts = [update for update in updates if isinstance(update, wire.Event) and update.kind == wire.VERDICT]
    assert [event.data["status"] for event in verdicts] == ["done"]
    kept = (directory(RUN) / "node0.log").read_text()
    assert "[rank 0] step 2 of node0\n" in kept
    assert (directory(RUN) / "events.jsonl").read_text().count("verdict") == 1
    # A finished run is left in peace.
    before = task_ids(launcher._engine)
    launcher.up(planned(max_restarts=77), say)
    assert task_ids(launcher._engine)["demo_rendezvous"] == before["demo_rendezvous"]
    assert [update for update in launcher.watch(RUN) if isinstance(update, wire.Event)][-1].kind == wire.VERDICT


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_failed_run_starts_again_without_its_old_verdict(launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    plan = planned(max_restarts=78)
    launcher.up(plan, say)
    assert [update.data["why"] for update in launcher.watch(RUN) if isinstance(update, wire.Event) and update.kind == wire.VERDICT] == [
        "no luck"
    ]
    steps = launcher.changes(plan)
    assert {str(step).partition(": ")[2] for step in steps} == {"the run had failed (no luck) and starts again"}
    launcher.up(plan, say)
    kinds = [event.kind for event in launcher.events(RUN)]
    assert kinds.count(wire.BOARD_UP) == 2
    assert kinds.count(wire.VERDICT) <= 1


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_following_ends_when_the_run_is_taken_down(launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    launcher.up(planned(), say)
    updates = []
    watcher = threading.Thread(target=lambda: updates.extend(launcher.watch(RUN)), daemon=True)
    watcher.start()
    time.sleep(1)
    launcher.up(planned(nodes=3), say)
    launcher.down(RUN, say)
    watcher.join(20)
    assert not watcher.is_alive()
    assert {line.node for line in updates if isinstance(line, LogLine)} == {"node0", "node1", "node2"}
    assert {state.node for state in updates if isinstance(state, TaskState) and state.state == "removed"} >= {"node0", "node1", "node2"}


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_logs_are_one_stream_in_the_order_of_time(launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    launcher.up(planned(), say)
    end = time.monotonic() + 60
    lines: list[LogLine] = []
    while {line.node for line in lines} != {"node0", "node1"}:
        assert time.monotonic() < end, lines
        lines = list(launcher.logs(RUN, follow=False))
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    assert len(list(launcher.logs(RUN, follow=False, tail=1))) == 2
    assert {line.node for line in launcher.logs(RUN, follow=False, node="node1")} == {"node1"}
    since = lines[len(lines) // 2].time
    assert min(line.time for line in launcher.logs(RUN, follow=False, since=since)) >= since - 0.001
    followed = launcher.logs(RUN, follow=True, node="node0")
    steps = [int(next(followed).text.split()[1]) for _ in range(len(lines) + 20)]
    assert steps == list(range(len(steps)))
    assert next(launcher.logs(RUN, follow=True, tail=1)).rank == 0


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_what_was_followed_is_there_when_the_run_is_down(
    launcher: SwarmLauncher, planned: Callable[..., Plan], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", launcher._engine.address)
    launcher.up(planned(), say)
    seen = list(islice(launcher.logs(RUN, follow=True), 40))
    take_down(launcher, RUN)
    capsys.readouterr()
    show_logs(RUN, Choice(), follow=False)
    out, err = capsys.readouterr()
    assert err.startswith("demo is down; this is what was kept")
    last = []
    for node in ("node0", "node1"):
        kept = [line.partition(" | ")[2] for line in out.splitlines() if line.startswith(f"{node} ")]
        followed = [line.text for line in seen if line.node == node]
        assert kept[: len(followed)] == followed
        steps = [int(text.split()[1]) for text in kept if text.startswith("step ")]
        assert steps == list(range(len(steps)))
        last += kept[len(steps) :]
    # Of a container that ends, Docker's follow now and then stays silent about the last that it said.
    assert last in (["saved"], ["saved", "saved"])
    show_history(RUN, as_json=False)
    shown = capsys.readouterr().out
    assert [words in shown for words in ("its notice board is up", "taken down from here")] == [True, True]


def refused(launcher: SwarmLauncher, plan: Plan, kind: type[Exception], match: str) -> Exception:
    with pytest.raises(kind, match=match) as raised:
        launcher.up(plan, say)
    return raised.value


def test_a_deploy_that_cannot_work_says_why_and_leaves_nothing(
    lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan], base: str
) -> None:
    engine = launcher._engine
    error = refused(launcher, planned(image=f"{REGISTRY}/nothing:1"), ImageError, "its registry does not have it")
    assert f"{REGISTRY}/nothing:1" in str(error)
    assert nothing_left(lab, engine)
    error = refused(launcher, planned(mounts=(("/nowhere", "/data"),)), StackError, "bind source path does not exist: /nowhere")
    assert "node0 on node0" in str(error)
    assert nothing_left(lab, engine)
    # An image without swarmtrain: the reason stands in the log, and is shown.
    refused(launcher, planned(image=base), StackError, "No module named")
    assert nothing_left(lab, engine)


def test_an_interrupted_first_deploy_leaves_nothing(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    def interrupt(line: str) -> None:
        if "node0 on node0: " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launcher.up(planned(), interrupt)
    assert nothing_left(lab, launcher._engine)


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_second_deploy_that_fails_keeps_what_runs(launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    launcher.up(planned(), say)
    first = task_ids(launcher._engine)
    plan = planned(nodes=3)
    broken = replace(plan, config=planned(nodes=3, mounts=(("/nowhere", "/data"),)).config)
    refused(launcher, broken, StackError, "bind source path does not exist")
    assert launcher.runs() == [RUN]
    launcher.up(planned(), say)
    assert task_ids(launcher._engine)["demo_rendezvous"] == first["demo_rendezvous"]
    assert {task.state for task in launcher.tasks(RUN)} == {"running"}


def test_a_node_that_nobody_can_be_is_shown_with_swarms_reason(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    plan = planned()
    plan = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], constraint="node.labels.colour==green")))
    said: list[str] = []
    SwarmLauncher(lab.docker_host("node0"), Patience(pending=2.0)).up(plan, said.append)
    reason = "no suitable node (scheduling constraints not satisfied on 3 nodes)"
    assert said[-1] == f"left waiting: node1 on node1: pending, {reason}"
    assert launcher.tasks(RUN)[1] == TaskState("node1", "node1", "pending", reason)


def test_a_stack_of_somebody_else_is_never_touched(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan], tmp_path: Path) -> None:
    image = planned().config.runner.docker_config.docker_container
    (tmp_path / "foreign.yml").write_text(
        f"version: '3.8'\nservices: {{web: {{image: '{image}', command: ['python3', '-c', 'input()']}}}}\n"
    )
    docker(lab, "stack", "deploy", "-c", str(tmp_path / "foreign.yml"), RUN)
    try:
        assert [finding.message for finding in launcher.check(planned())] == ["a stack of this name exists that is no run of swarmtrain"]
        refused(launcher, planned(), StackError, "no run of swarmtrain")
        with pytest.raises(RunNotFound):
            launcher.down(RUN, say)
        assert "demo_web" in docker(lab, "stack", "services", RUN)
    finally:
        from swarmtrain.launchers.swarm import removal

        removal.take_down(launcher._engine, RUN, say)


def test_a_worker_sends_to_a_manager(lab: Lab) -> None:
    with pytest.raises(EngineError, match="worker of its swarm") as raised:
        SwarmLauncher(lab.docker_host("node1")).inventory()
    assert "docker node promote" in str(raised.value.hint)


def test_the_inventory_is_what_the_swarm_says(lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan]) -> None:
    docker(lab, "node", "update", "--availability", "drain", "--label-add", "colour=blue", "node2")
    try:
        machines = launcher.inventory().machines
        assert [(machine.host, machine.manager, machine.unavailable) for machine in machines] == [
            ("node0", True, ""), ("node1", False, ""), ("node2", False, "drained"),
        ]  # fmt: skip
        assert machines[2].labels == {"colour": "blue"}
        assert launcher.inventory().origin == f"the swarm of 3 nodes at {lab.docker_host('node0')}"
        docker(lab, "node", "update", "--availability", "drain", "node0")
        found = [(finding.place, finding.hint) for finding in launcher.check(replace(planned(nodes=1), run="other"))]
        assert ("rendezvous", "docker node update --availability active node0") in found
    finally:
        docker(lab, "node", "update", "--availability", "active", "node0")
        docker(lab, "node", "update", "--availability", "active", "--label-rm", "colour", "node2")
