"""Plain `docker` next to swarmtrain: our commands on what docker started, changed or removed, and docker on our stack file."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swarm_helpers import DISCARD, RUN, find_docker_programs, is_run_removed, list_task_ids, print_line, run_docker

from swarmtrain import images, protocol
from swarmtrain.lab import Lab
from swarmtrain.lab.base_image import create_base_image
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.render.stack_document import render_stack, write_stack

ROOT = Path(__file__).parents[2]
STACK_IMAGE = "registry.lab:5000/swarmtrain:latest"
# Characters that Swarm, or a parser of the stack file, would substitute if they were not escaped.
SPECIAL_CHARACTERS = "$HOME ${RUN} $$ {{.Node.ID}} {{ a=b 'c' \"d\" %"


def deploy_stack(lab: Lab, plan: Plan, folder: Path, program: str) -> None:
    write_stack(render_stack(plan), folder / "generated.yml")
    run_docker(lab, "stack", "deploy", "-c", str(folder / "generated.yml"), RUN, program=program)
    SwarmLauncher(lab.get_docker_host("node0")).deploy_run(plan, DISCARD)  # which only waits, since everything is deployed


def query_run(launcher: SwarmLauncher, plan: Plan) -> dict[str, Any]:
    """Return the answers of all read-only commands about the run."""
    updates = []
    for update in launcher.watch_run(RUN):
        updates.append(type(update).__name__)
        if {"Event", "LogLine", "TaskState"} <= set(updates):
            break
    return {
        "runs": launcher.list_runs(),
        "tasks": [replace(task, reason="") for task in launcher.list_tasks(RUN)],
        "events": [event.kind for event in launcher.read_events(RUN)],
        "lines": {(line.node, line.rank, line.text) for line in launcher.stream_logs(RUN, follow=False) if line.text.startswith("step 0 ")},
        # Docker's last line may be the tail of a split long line, without the prefix that names the rank.
        "followed": next(line.rank for line in launcher.stream_logs(RUN, follow=True, tail=1) if line.rank is not None),
        "watched": set(updates),
        "deployed": (launcher.load_deployment(RUN)[0], [item.digest for item in launcher.load_deployment(RUN)[1].code]),
        "changes": [str(step) for step in launcher.plan_changes(plan)],
        "more": [str(step) for step in launcher.plan_changes(replace(plan, nodes=plan.nodes[:1]))],
    }


def test_every_command_on_what_docker_stack_deploy_started(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path
) -> None:
    """With the oldest docker client on this machine. Another test shows that all clients create the same specs."""
    plan, program = plan_run(), find_docker_programs()[-1]
    deploy_stack(lab, plan, tmp_path, program)
    theirs = query_run(launcher, plan)
    tasks = list_task_ids(launcher._engine)
    launcher.deploy_run(plan, print_line)
    assert list_task_ids(launcher._engine) == tasks
    config, cargo = launcher.load_deployment(RUN)
    launcher.deploy_run(build_plan(config, launcher.read_inventory(config.runner), cargo, run=RUN, node_count=3), print_line)
    assert list_task_ids(launcher._engine).items() >= tasks.items()
    launcher.stop_run(RUN, print_line)
    assert {task.state for task in launcher.list_tasks(RUN) if task.node != protocol.RENDEZVOUS_SERVICE} == {"stopped"}
    # Restarted by plain docker, then by us.
    run_docker(lab, "stack", "deploy", "--prune", "-c", str(tmp_path / "generated.yml"), RUN, program=program)
    launcher.deploy_run(plan, print_line)
    assert theirs["tasks"] == query_run(launcher, plan)["tasks"]
    launcher.tear_down_run(RUN, print_line)
    assert is_run_removed(lab, launcher._engine)
    launcher.deploy_run(plan, print_line)
    ours = query_run(launcher, plan)
    assert theirs == ours
    assert ours["changes"] == []
    assert ours["more"] == ["remove service demo_node1: is not in the plan"]


def wait_until_all_running(launcher: SwarmLauncher) -> None:
    """Wait until all tasks run; tasks of services that docker has removed may still be stopping."""
    end = time.monotonic() + 20
    while (states := {task.state for task in launcher.list_tasks(RUN)}) != {"running"}:
        assert states == {"running", "stopping"}
        assert time.monotonic() < end, "what was removed has not stopped"
        time.sleep(0.3)


def test_what_docker_changed_by_hand_is_shown_by_plan_and_fixed_by_deploy(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]
) -> None:
    plan = plan_run()
    launcher.deploy_run(plan, DISCARD)

    def changes() -> list[str]:
        return [str(step) for step in launcher.plan_changes(plan)]

    run_docker(lab, "service", "update", "--detach", "--force", "demo_node1")
    assert changes() == []  # a restart is not a change
    run_docker(lab, "service", "scale", "--detach", "demo_node0=0")
    run_docker(lab, "service", "update", "--detach", "--env-add", "MORE=1", "--env-rm", "SWARMTRAIN_SLOTS", "demo_node1")
    run_docker(lab, "service", "rm", "demo_rendezvous")
    assert changes() == [
        "update service demo_node0: Replicas 0 → 1",
        "update service demo_node1: Env.SWARMTRAIN_SLOTS nothing → 1, Env.MORE 1 → nothing (restarts it)",
        "create service demo_rendezvous: is new",
    ]
    launcher.deploy_run(plan, print_line)
    wait_until_all_running(launcher)
    assert changes() == []
    # Without the services, nothing references the configs and secrets.
    run_docker(lab, "service", "rm", "demo_node0", "demo_node1", "demo_rendezvous")
    assert launcher.list_terminating_runs() == [RUN]
    configs = run_docker(lab, "config", "ls", "--format", "{{.Name}}").split()
    run_docker(lab, "config", "rm", next(name for name in configs if "training_code" in name))
    run_docker(lab, "secret", "rm", *run_docker(lab, "secret", "ls", "--format", "{{.Name}}").split())
    assert [line.partition(":")[0] for line in changes()][:2] == [
        f"create config {next(name for name in configs if 'training_code' in name)}",
        f"create secret demo_TOKEN-{plan.cargo.secrets[0].digest}",
    ]
    launcher.deploy_run(plan, print_line)
    wait_until_all_running(launcher)


def read_container_environment(lab: Lab) -> dict[str, Any]:
    container = run_docker(lab, "ps", "-q", "--filter", "name=demo_node0").strip()
    script = "import json, os; print(json.dumps({**os.environ, 'mounts': open('/proc/self/mounts').read()}))"
    found: dict[str, Any] = json.loads(run_docker(lab, "exec", container, "python3", "-c", script))
    return found


def test_what_looks_like_a_variable_or_a_template_arrives_as_it_is(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path
) -> None:
    source, target = "odd{{.Node.ID}}$HOME$$", "/in/{{.Service.Name}}$HOME$$"
    (lab.shared_disk / source).mkdir()
    run_docker(lab, "node", "update", "--label-add", "odd=$HOME$$", "node0")
    labelled = {"labels": {"odd": "$HOME$$"}}
    plan = plan_run(
        nodes=1,
        env={"ODD": SPECIAL_CHARACTERS},
        script_args=(SPECIAL_CHARACTERS,),
        mounts=((f"/mnt/shared/{source}", target),),
        swarm=labelled,
    )
    launcher.deploy_run(plan, print_line)
    ours = read_container_environment(lab)
    launcher.tear_down_run(RUN, print_line)
    deploy_stack(lab, plan, tmp_path, find_docker_programs()[-1])
    theirs = read_container_environment(lab)
    for found in (ours, theirs):
        assert found["ODD"] == SPECIAL_CHARACTERS
        assert json.loads(found["SWARMTRAIN_SCRIPT_ARGS"]) == [SPECIAL_CHARACTERS]
        assert f" {target} " in found["mounts"]
    run_docker(lab, "node", "update", "--label-rm", "odd", "node0")


@pytest.mark.test_all_only("builds an image in a lab of four machines")
def test_the_commands_of_the_readme_on_four_machines(create_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed stack file, deployed by docker from a checkout, and then scaled by swarmtrain: its three nodes are not interrupted."""
    lab = create_lab("four")
    lab.bring_up(4, report_progress=DISCARD)
    for name, value in lab.build_client_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    engine = DockerEngine(timeout=600)
    images.build_image(engine.client, ROOT, STACK_IMAGE, base_image=create_base_image, report_progress=DISCARD)
    images.push_image(engine.client, STACK_IMAGE, report_progress=DISCARD)
    run_docker(lab, "stack", "deploy", "-c", "compose/generated.yml", "mine")
    tasks = wait_until_training(engine, "mine", 3)
    done = subprocess.run(
        [sys.executable, "-m", "swarmtrain", "scale", "mine", "--nodes", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "a world of 4 ranks on 4 nodes has formed" in done.stderr
    assert list_task_ids(engine).items() >= tasks.items()


def wait_until_training(engine: DockerEngine, run: str, ranks: int) -> dict[str, set[str]]:
    """Wait until a world of `ranks` has formed; return the ids of the tasks."""
    launcher, end = SwarmLauncher(engine.address), time.monotonic() + 300
    while not any(event.kind == protocol.EVENT_WORLD_FORMED and event.data["world_size"] == ranks for event in launcher.read_events(run)):
        assert time.monotonic() < end, launcher.list_tasks(run)
        time.sleep(0.5)
    return list_task_ids(engine)


def test_a_node_keeps_its_host_when_machines_change(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    """A machine that comes first by name, and one that is drained, change only the node that must move."""
    engine = launcher._engine
    run_docker(lab, "node", "update", "--availability", "drain", "node0")
    try:
        launcher.deploy_run(plan_run(), print_line)
        assert launcher.read_placement(RUN).machines == {"node0": "node1", "node1": "node2"}
        run_docker(lab, "node", "update", "--availability", "active", "node0")
        assert launcher.plan_changes(plan_scaled_run(launcher, RUN, ScaleRequest(2))) == []
        tasks = list_task_ids(engine)
        launcher.deploy_run(plan_scaled_run(launcher, RUN, ScaleRequest(replaced_hosts=("node1",))), print_line)
        assert launcher.read_placement(RUN).machines == {"node0": "node0", "node1": "node2"}
        assert list_task_ids(engine)[f"{RUN}_node1"] == tasks[f"{RUN}_node1"]
        launcher.deploy_run(plan_scaled_run(launcher, RUN, ScaleRequest(added_hosts=("node1",), removed_hosts=("node0",))), print_line)
        assert launcher.read_placement(RUN).machines == {"node0": "node1", "node1": "node2"}
        assert list_task_ids(engine)[f"{RUN}_node1"] == tasks[f"{RUN}_node1"]
    finally:
        run_docker(lab, "node", "update", "--availability", "active", "node0")
