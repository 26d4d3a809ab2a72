"""The Swarm launcher on a real swarm: the stack equals that of `docker stack deploy`, is changed in place, followed, and removed.

The containers run a stub instead of the entrypoint, which starts at once: what they do does not matter here.
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
from swarm_helpers import DISCARD, NODES, RUN, find_docker_programs, is_run_removed, list_task_ids, print_line, run_docker

from swarmtrain import protocol
from swarmtrain.config import Config
from swarmtrain.config.schema.fields import validators
from swarmtrain.config.schema.runner import NcclDebug, RunnerConfig
from swarmtrain.errors import EngineError, ImageError, RunNotFound, StackError
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.history_store import list_recorded_runs
from swarmtrain.launchers.docker import DockerLauncher
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state
from swarmtrain.launchers.swarm.timeouts import SwarmTimeouts
from swarmtrain.operations.runs import remove_run
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.render.stack_document import render_stack, write_stack
from swarmtrain.view.logs import LogFilter, print_logs
from swarmtrain.view.run_state import show_history


def snapshot_stack(engine: DockerEngine) -> dict[str, Any]:
    """Return the complete Spec of every object in the stack, and its networks, with names instead of ids.

    Of a network, everything is kept that a stack file can set. Its id, creation time, VXLAN number and assigned subnet are left out,
    and of a service the labels with the run's identity, which plain docker does not set.
    """
    kinds = {kind: engine.list_objects(f"/{kind}", label=f"{protocol.LABEL_STACK}={RUN}") for kind in ("services", "configs", "secrets")}
    networks = [item for item in engine.list_objects("/networks") if item["Name"].startswith(f"{RUN}_")]
    names = {item["Id"]: item["Name"] for item in networks}
    names |= {item["ID"]: item["Spec"]["Name"] for kind in ("configs", "secrets") for item in kinds[kind]}
    for network in networks:
        del network["Created"]
        del network["Options"]["com.docker.network.driver.overlay.vxlanid_list"]
        network["IPAM"]["Config"] = len(network["IPAM"]["Config"])
    specs = {kind: sorted((item["Spec"] for item in items), key=lambda spec: str(spec["Name"])) for kind, items in kinds.items()}
    for spec in specs["services"]:
        spec["Labels"] = {label: value for label, value in spec["Labels"].items() if label not in RunIdentity("").labels}
    text = json.dumps({**specs, "networks": networks}, sort_keys=True, indent=1)
    for number, name in names.items():
        text = text.replace(number, f"id of {name}")
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_same_specs_as_docker_stack_deploy(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path) -> None:
    engine = launcher._engine
    (lab.shared_disk / "data").mkdir(exist_ok=True)
    plan = plan_run(
        mounts=(("/mnt/shared/data", "/data"), ("cache", "/cache")),
        env={"PLAIN": "1", "EMPTY": "", "ODD": "$HOME {{.Node.ID}} a=b 'c'"},
        swarm={"mtu": 1400, "internal": True},
        docker_config={
            "docker_container": plan_run().config.runner.docker_config.docker_container,
            "docker_mounts": (("/mnt/shared/data", "/data"), ("cache", "/cache"), ("scratch", "/scratch")),
            "volumes": {"scratch": {"type": "tmpfs", "device": "tmpfs", "o": "size=1m"}},
            "cache_dir": "/cache",
            "user": "1001:1001",
            "cpus": 0.5,
            "memory": 2**30,
            "shm_size": 2**20,
        },
    )
    write_stack(render_stack(plan), tmp_path / "generated.yml")
    launcher.deploy_run(plan, print_line)
    ours = snapshot_stack(engine)
    assert len(ours["services"]) == 3
    assert len(ours["configs"]) == 2
    launcher.tear_down_run(RUN, print_line)
    for program in find_docker_programs():
        run_docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN, program=program)
        assert snapshot_stack(engine) == ours, program
        assert launcher.plan_changes(plan) == [], program
        launcher.tear_down_run(RUN, DISCARD)


def test_the_host_network_and_rdma_are_the_same_by_docker_stack_deploy(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path
) -> None:
    """Compared without waiting for containers: a lab's engines may not raise the limit on locked memory."""
    plan = plan_run(nodes=1, swarm={"network": "host", "rdma": True}, nccl={"debug": NcclDebug.info})
    write_stack(render_stack(plan), tmp_path / "generated.yml")
    for program in find_docker_programs():
        run_docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN, program=program)
        assert launcher.plan_changes(plan) == [], program
        launcher.tear_down_run(RUN, DISCARD)


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_run_is_seen_changed_and_taken_down(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path) -> None:
    engine = launcher._engine
    launcher.deploy_run(plan_run(), print_line)
    first = list_task_ids(engine)
    assert {name: len(ids) for name, ids in first.items()} == {"demo_node0": 1, "demo_node1": 1, "demo_rendezvous": 1}

    # Docker's own commands show it, and a later launcher finds it.
    assert [line.split()[:2] for line in run_docker(lab, "stack", "ls").splitlines()[1:]] == [[RUN, "3"]]
    assert run_docker(lab, "stack", "services", RUN, "--format", "{{.Name}} {{.Replicas}}").split("\n")[:3] == [
        "demo_node0 1/1", "demo_node1 1/1", "demo_rendezvous 1/1",
    ]  # fmt: skip
    assert "demo_node1.1" in run_docker(lab, "stack", "ps", RUN)
    later = SwarmLauncher(lab.get_docker_host("node0"))
    assert later.list_runs() == [RUN]
    assert [(task.node, task.host, task.state) for task in later.list_tasks(RUN)] == [
        ("node0", "node0", "running"), ("node1", "node1", "running"), ("rendezvous", "node0", "running"),
    ]  # fmt: skip
    assert [event.kind for event in later.read_events(RUN)] == [protocol.EVENT_COORDINATOR_STARTED]

    # Deploying the same again changes nothing, with either client.
    later.deploy_run(plan_run(), print_line)
    write_stack(render_stack(plan_run()), tmp_path / "generated.yml")
    run_docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN)
    assert list_task_ids(engine) == first

    # Scaling does not touch the other nodes, and needs only what is stored in the swarm.
    config, cargo = later.load_deployment(RUN)
    assert cargo.code == plan_run().cargo.code
    three = build_plan(config, later.read_inventory(config.runner), cargo, run=RUN, node_count=3)
    later.deploy_run(three, print_line)
    assert list_task_ids(engine) == {**first, "demo_node2": list_task_ids(engine)["demo_node2"]}
    later.deploy_run(plan_run(), print_line)
    assert {name: ids for name, ids in list_task_ids(engine).items() if name != "removed"} == first

    # An edited script restarts the nodes but not the coordinator.
    later.deploy_run(plan_run(script=b"train_better()\n"), print_line)
    after = list_task_ids(engine)
    assert after["demo_rendezvous"] == first["demo_rendezvous"]
    assert len(after["demo_node0"] - first["demo_node0"]) == 1
    assert len(cluster_state.read_stack_state(engine, RUN).configs) == 2

    with pytest.raises(StackError, match="Swarm cannot change a network in place"):
        later.deploy_run(plan_run(swarm={"mtu": 1400}), print_line)

    # Docker's own removal, then at once ours on top of what it left, and at once a new deploy.
    subprocess.run(["docker", "-H", lab.get_docker_host("node0"), "stack", "rm", RUN], check=False, capture_output=True)
    if not cluster_state.read_stack_state(engine, RUN).is_empty:
        launcher.tear_down_run(RUN, print_line)
    launcher.deploy_run(plan_run(), print_line)
    launcher.tear_down_run(RUN, print_line)
    assert is_run_removed(lab, engine)
    with pytest.raises(RunNotFound):
        launcher.tear_down_run(RUN, print_line)


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_stopped_containers_exit_gracefully_and_come_back(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    launcher.deploy_run(plan_run(), print_line)
    launcher.stop_run(RUN, print_line)
    assert [(task.node, task.state) for task in launcher.list_tasks(RUN)] == [
        ("node0", "stopped"),
        ("node1", "stopped"),
        ("rendezvous", "running"),
    ]
    names = [
        run_docker(lab, "ps", "--format", "{{.Names}}", "--filter", f"label={protocol.LABEL_STACK}={RUN}", node=node) for node in NODES
    ]
    assert "".join(names).split(".")[0] == "demo_rendezvous"
    assert "node" not in "".join(names)
    # The coordinator keeps its state, following the run ends without an outcome, and a second stop changes nothing.
    assert [event.kind for event in launcher.read_events(RUN)] == [protocol.EVENT_COORDINATOR_STARTED]
    assert [
        update for update in launcher.watch_run(RUN) if isinstance(update, protocol.Event) and update.kind == protocol.EVENT_OUTCOME
    ] == []
    board = list_task_ids(launcher._engine)["demo_rendezvous"]
    launcher.stop_run(RUN, print_line)
    # Swarm drops the logs together with the tasks; the last lines are kept in the run directory.
    folder = list_recorded_runs(RUN)[-1].folder
    assert [(folder / f"node{number}.log").read_text().splitlines()[-1].partition(" ")[2] for number in (0, 1)] == ["[rank 0] saved"] * 2
    assert {str(step).partition(": ")[2] for step in launcher.plan_changes(plan_run())} == {"Replicas 0 → 1"}
    launcher.deploy_run(plan_run(), print_line)
    assert {task.state for task in launcher.list_tasks(RUN)} == {"running"}
    assert list_task_ids(launcher._engine)["demo_rendezvous"] == board


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_run_is_followed_to_its_outcome(launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    launcher.deploy_run(plan_run(max_restarts=77), print_line)
    updates = list(launcher.watch_run(RUN))
    lines = [update for update in updates if isinstance(update, LogLine)]
    assert {(line.node, line.rank) for line in lines} == {("node0", 0), ("node1", 0)}
    assert {len(line.text) for line in lines if line.text.startswith("step 1 of node1")} == {40_000 + len("step 1 of node1")}
    assert [line.text[:6] for line in lines if line.node == "node0"][:3] == ["step 0", "step 1", "step 2"]
    verdicts = [update for update in updates if isinstance(update, protocol.Event) and update.kind == protocol.EVENT_OUTCOME]
    assert [event.data["status"] for event in verdicts] == ["done"]
    folder = list_recorded_runs(RUN)[-1].folder
    kept = (folder / "node0.log").read_text()
    assert "[rank 0] step 2 of node0\n" in kept
    assert (folder / "events.jsonl").read_text().count("outcome") == 1
    # A finished run is not restarted.
    before = list_task_ids(launcher._engine)
    launcher.deploy_run(plan_run(max_restarts=77), print_line)
    assert list_task_ids(launcher._engine)["demo_rendezvous"] == before["demo_rendezvous"]
    assert [update for update in launcher.watch_run(RUN) if isinstance(update, protocol.Event)][-1].kind == protocol.EVENT_OUTCOME


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_failed_run_restarts_without_its_old_outcome(launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    plan = plan_run(max_restarts=78)
    launcher.deploy_run(plan, print_line)
    assert [
        update.data["reason"]
        for update in launcher.watch_run(RUN)
        if isinstance(update, protocol.Event) and update.kind == protocol.EVENT_OUTCOME
    ] == ["no luck"]
    steps = launcher.plan_changes(plan)
    assert {str(step).partition(": ")[2] for step in steps} == {"the run had failed (no luck) and is restarted"}
    launcher.deploy_run(plan, print_line)
    kinds = [event.kind for event in launcher.read_events(RUN)]
    assert kinds.count(protocol.EVENT_COORDINATOR_STARTED) == 2
    assert kinds.count(protocol.EVENT_OUTCOME) <= 1


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_following_ends_when_the_run_is_taken_down(launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    launcher.deploy_run(plan_run(), print_line)
    updates = []
    watcher = threading.Thread(target=lambda: updates.extend(launcher.watch_run(RUN)), daemon=True)
    watcher.start()
    time.sleep(1)
    launcher.deploy_run(plan_run(nodes=3), print_line)
    launcher.tear_down_run(RUN, print_line)
    watcher.join(20)
    assert not watcher.is_alive()
    assert {line.node for line in updates if isinstance(line, LogLine)} == {"node0", "node1", "node2"}
    assert {state.node for state in updates if isinstance(state, TaskState) and state.state == "removed"} >= {"node0", "node1", "node2"}


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_logs_are_one_stream_in_the_order_of_time(launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    launcher.deploy_run(plan_run(), print_line)
    end = time.monotonic() + 60
    lines: list[LogLine] = []
    while {line.node for line in lines} != {"node0", "node1"}:
        assert time.monotonic() < end, lines
        lines = list(launcher.stream_logs(RUN, follow=False))
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    assert len(list(launcher.stream_logs(RUN, follow=False, tail=1))) == 2
    assert {line.node for line in launcher.stream_logs(RUN, follow=False, node="node1")} == {"node1"}
    since = lines[len(lines) // 2].time
    assert min(line.time for line in launcher.stream_logs(RUN, follow=False, since=since)) >= since - 0.001
    followed = launcher.stream_logs(RUN, follow=True, node="node0")
    steps = [int(next(followed).text.split()[1]) for _ in range(len(lines) + 20)]
    assert steps == list(range(len(steps)))
    assert next(launcher.stream_logs(RUN, follow=True, tail=1)).rank == 0


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_what_was_followed_is_there_when_the_run_is_down(
    launcher: SwarmLauncher, plan_run: Callable[..., Plan], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", launcher._engine.address)
    launcher.deploy_run(plan_run(), print_line)
    seen = list(islice(launcher.stream_logs(RUN, follow=True), 40))
    remove_run(launcher, RUN)
    capsys.readouterr()
    print_logs(RUN, LogFilter(), follow=False)
    out, err = capsys.readouterr()
    assert err.startswith("demo is down; showing its saved output")
    last = []
    for node in ("node0", "node1"):
        kept = [line.partition(" | ")[2] for line in out.splitlines() if line.startswith(f"{node} ")]
        followed = [line.text for line in seen if line.node == node]
        assert kept[: len(followed)] == followed
        steps = [int(text.split()[1]) for text in kept if text.startswith("step ")]
        assert steps == list(range(len(steps)))
        last += kept[len(steps) :]
    # When a container ends, Docker's log stream sometimes misses its last lines.
    assert last in (["saved"], ["saved", "saved"])
    show_history(RUN, as_json=False)
    shown = capsys.readouterr().out
    assert [words in shown for words in ("its coordinator is up", "taken down from this machine")] == [True, True]


def expect_refusal(launcher: SwarmLauncher, plan: Plan, error_type: type[Exception], match: str) -> Exception:
    with pytest.raises(error_type, match=match) as raised:
        launcher.deploy_run(plan, print_line)
    return raised.value


def test_a_deploy_that_cannot_work_prints_why_and_leaves_nothing(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], base_image: str
) -> None:
    engine = launcher._engine
    error = expect_refusal(launcher, plan_run(image=f"{REGISTRY_ADDRESS}/nothing:1"), ImageError, "its registry does not have it")
    assert f"{REGISTRY_ADDRESS}/nothing:1" in str(error)
    assert is_run_removed(lab, engine)
    error = expect_refusal(launcher, plan_run(mounts=(("/nowhere", "/data"),)), StackError, "bind source path does not exist: /nowhere")
    assert "node0 on node0" in str(error)
    assert is_run_removed(lab, engine)
    # An image without swarmtrain: the reason is in the log, and is shown.
    expect_refusal(launcher, plan_run(image=base_image), StackError, "No module named")
    assert is_run_removed(lab, engine)


@pytest.mark.test_all_only("the gate has it on a swarm in memory")
def test_containers_whose_program_cannot_be_started_are_not_restarted_without_end(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deploy decides it, also if nobody follows the run. The config refuses such a variable, so its check is switched off here."""
    monkeypatch.setattr(validators, "_MAX_EXEC_STRING_BYTES", 2**20)
    plan = plan_run(env={"LONG": "x" * 140_000})
    expect_refusal(launcher, plan, StackError, "node[01] on node[01]: exec /sbin/docker-init: argument list too long")
    assert is_run_removed(lab, launcher._engine)
    docker_launcher = DockerLauncher(lab.get_docker_host("node0"))
    docker_config = Config.model_validate({"runner": {**plan.config.runner.model_dump(exclude_unset=True), "runner_type": "docker"}})
    docker_plan = build_plan(docker_config, docker_launcher.read_inventory(docker_config.runner), plan.cargo, run=RUN)
    with pytest.raises(StackError, match="node0: exec /sbin/docker-init: argument list too long"):
        docker_launcher.deploy_run(docker_plan, print_line)
    assert docker_launcher.list_runs() == []


def test_an_interrupted_first_deploy_leaves_nothing(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    def interrupt(line: str) -> None:
        if "node0 on node0: " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launcher.deploy_run(plan_run(), interrupt)
    assert is_run_removed(lab, launcher._engine)


@pytest.mark.test_all_only("the contract has this step in the life of a run")
def test_a_second_deploy_that_fails_keeps_what_runs(launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    launcher.deploy_run(plan_run(), print_line)
    first = list_task_ids(launcher._engine)
    plan = plan_run(nodes=3)
    broken = replace(plan, config=plan_run(nodes=3, mounts=(("/nowhere", "/data"),)).config)
    expect_refusal(launcher, broken, StackError, "bind source path does not exist")
    assert launcher.list_runs() == [RUN]
    launcher.deploy_run(plan_run(), print_line)
    assert list_task_ids(launcher._engine)["demo_rendezvous"] == first["demo_rendezvous"]
    assert {task.state for task in launcher.list_tasks(RUN)} == {"running"}


def test_a_node_that_nobody_can_be_is_shown_with_its_reason(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    plan = plan_run()
    plan = replace(plan, nodes=(plan.nodes[0], replace(plan.nodes[1], constraint="node.labels.colour==green")))
    said: list[str] = []
    SwarmLauncher(lab.get_docker_host("node0"), SwarmTimeouts(pending_seconds=2.0)).deploy_run(plan, said.append)
    reason = "no suitable node (scheduling constraints not satisfied on 3 nodes)"
    assert said[-1] == "no longer waiting for: node1 on node1: pending, no machine of the swarm meets its constraints"
    assert launcher.list_tasks(RUN)[1] == TaskState("node1", "node1", "pending", reason)


def test_a_stack_of_somebody_else_is_never_touched(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path
) -> None:
    image = plan_run().config.runner.docker_config.docker_container
    (tmp_path / "foreign.yml").write_text(
        f"version: '3.8'\nservices: {{web: {{image: '{image}', command: ['python3', '-c', 'input()']}}}}\n"
    )
    run_docker(lab, "stack", "deploy", "-c", str(tmp_path / "foreign.yml"), RUN)
    try:
        assert [finding.message for finding in launcher.check_plan(plan_run())] == [
            "a stack of this name already exists and is not a swarmtrain run"
        ]
        expect_refusal(launcher, plan_run(), StackError, "not a swarmtrain run")
        with pytest.raises(RunNotFound):
            launcher.tear_down_run(RUN, print_line)
        assert "demo_web" in run_docker(lab, "stack", "services", RUN)
    finally:
        from swarmtrain.launchers.swarm import teardown

        teardown.tear_down_stack(launcher._engine, RUN, print_line)


def test_a_worker_sends_to_a_manager(lab: Lab) -> None:
    with pytest.raises(EngineError, match="swarm worker") as raised:
        SwarmLauncher(lab.get_docker_host("node1")).read_inventory(RunnerConfig())
    assert "docker node promote" in str(raised.value.hint)


def test_the_inventory_is_what_the_swarm_reports(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    run_docker(lab, "node", "update", "--availability", "drain", "--label-add", "colour=blue", "node2")
    try:
        machines = launcher.read_inventory(RunnerConfig()).machines
        assert [(machine.host, machine.is_manager, machine.unavailable_reason) for machine in machines] == [
            ("node0", True, ""), ("node1", False, ""), ("node2", False, "drained"),
        ]  # fmt: skip
        assert machines[2].labels == {"colour": "blue"}
        assert launcher.read_inventory(RunnerConfig()).origin == f"the swarm of 3 nodes at {lab.get_docker_host('node0')}"
        run_docker(lab, "node", "update", "--availability", "drain", "node0")
        found = [(finding.place, finding.hint) for finding in launcher.check_plan(replace(plan_run(nodes=1), run="other"))]
        assert ("rendezvous", "docker node update --availability active node0") in found
    finally:
        run_docker(lab, "node", "update", "--availability", "active", "node0")
        run_docker(lab, "node", "update", "--availability", "active", "--label-rm", "colour", "node2")
