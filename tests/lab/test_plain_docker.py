"""Plain `docker` beside us: our commands on what it has started, changed or removed, and what it makes of our file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stand_in import RUN, SILENT, command_lines, docker, nothing_left, say, task_ids

from swarmtrain import wire
from swarmtrain.lab import Lab
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.plan import Plan, make_plan
from swarmtrain.render.compose import stack, write

# What Swarm, or whoever reads the stack file, would replace if it were not kept from it.
ODD = "$HOME ${RUN} $$ {{.Node.ID}} {{ a=b 'c' \"d\" %"


def stack_deploy(lab: Lab, plan: Plan, folder: Path, program: str) -> None:
    write(stack(plan), folder / "generated.yml")
    docker(lab, "stack", "deploy", "-c", str(folder / "generated.yml"), RUN, program=program)
    SwarmLauncher(lab.docker_host("node0")).up(plan, SILENT)  # which has nothing to do but to wait


def answers(launcher: SwarmLauncher, plan: Plan) -> dict[str, Any]:
    """Return what every command that reads says of the run."""
    followed = []
    for update in launcher.watch(RUN):
        followed.append(type(update).__name__)
        if {"Event", "LogLine", "TaskState"} <= set(followed):
            break
    return {
        "runs": launcher.runs(),
        "tasks": [replace(task, reason="") for task in launcher.tasks(RUN)],
        "events": [event.kind for event in launcher.events(RUN)],
        "lines": {(line.node, line.rank, line.text) for line in launcher.logs(RUN, follow=False) if line.text.startswith("step 0 ")},
        # Docker's own last line may be the end of a long one, which lacks the beginning that names the rank.
        "followed": next(line.rank for line in launcher.logs(RUN, follow=True, tail=1) if line.rank is not None),
        "watched": set(followed),
        "deployed": (launcher.deployed(RUN)[0], [item.digest for item in launcher.deployed(RUN)[1].code]),
        "changes": [str(step) for step in launcher.changes(plan)],
        "more": [str(step) for step in launcher.changes(replace(plan, nodes=plan.nodes[:1]))],
    }


def test_every_command_on_what_docker_stack_deploy_started(
    lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan], tmp_path: Path
) -> None:
    """By the oldest docker that there is; that all make the same specs, another test shows."""
    plan, program = planned(), command_lines()[-1]
    stack_deploy(lab, plan, tmp_path, program)
    theirs = answers(launcher, plan)
    tasks = task_ids(launcher._engine)
    launcher.up(plan, say)
    assert task_ids(launcher._engine) == tasks
    config, cargo = launcher.deployed(RUN)
    launcher.up(make_plan(config, launcher.inventory(), cargo, run=RUN, nodes=3), say)
    assert task_ids(launcher._engine).items() >= tasks.items()
    launcher.stop(RUN, say)
    assert {task.state for task in launcher.tasks(RUN) if task.node != wire.RENDEZVOUS} == {"stopped"}
    # Started again by the other, then by us.
    docker(lab, "stack", "deploy", "--prune", "-c", str(tmp_path / "generated.yml"), RUN, program=program)
    launcher.up(plan, say)
    assert theirs["tasks"] == answers(launcher, plan)["tasks"]
    launcher.down(RUN, say)
    assert nothing_left(lab, launcher._engine)
    launcher.up(plan, say)
    ours = answers(launcher, plan)
    assert theirs == ours
    assert ours["changes"] == []
    assert ours["more"] == ["remove service demo_node1: is not in the plan"]


def all_run(launcher: SwarmLauncher) -> None:
    """All tasks run, as soon as those of services that Docker removed have stopped."""
    end = time.monotonic() + 20
    while (states := {task.state for task in launcher.tasks(RUN)}) != {"running"}:
        assert states == {"running", "stopping"}
        assert time.monotonic() < end, "what was removed has not stopped"
        time.sleep(0.3)


def test_what_docker_changed_by_hand_is_shown_by_plan_and_mended_by_deploy(
    lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan]
) -> None:
    plan = planned()
    launcher.up(plan, SILENT)

    def changes() -> list[str]:
        return [str(step) for step in launcher.changes(plan)]

    docker(lab, "service", "update", "--detach", "--force", "demo_node1")
    assert changes() == []  # a restart is no difference
    docker(lab, "service", "scale", "--detach", "demo_node0=0")
    docker(lab, "service", "update", "--detach", "--env-add", "MORE=1", "--env-rm", "SWARMTRAIN_SLOTS", "demo_node1")
    docker(lab, "service", "rm", "demo_rendezvous")
    assert changes() == [
        "update service demo_node0: Replicas 0 → 1",
        "update service demo_node1: Env.SWARMTRAIN_SLOTS nothing → 1, Env.MORE 1 → nothing (restarts it)",
        "create service demo_rendezvous: is not there",
    ]
    launcher.up(plan, say)
    all_run(launcher)
    assert changes() == []
    # With the services gone, nothing keeps the rest.
    docker(lab, "service", "rm", "demo_node0", "demo_node1", "demo_rendezvous")
    assert launcher.leaving() == [RUN]
    configs = docker(lab, "config", "ls", "--format", "{{.Name}}").split()
    docker(lab, "config", "rm", next(name for name in configs if "training_code" in name))
    docker(lab, "secret", "rm", *docker(lab, "secret", "ls", "--format", "{{.Name}}").split())
    assert [line.partition(":")[0] for line in changes()][:2] == [
        f"create config {next(name for name in configs if 'training_code' in name)}",
        f"create secret demo_TOKEN-{plan.cargo.secrets[0].digest}",
    ]
    launcher.up(plan, say)
    all_run(launcher)


def in_the_container(lab: Lab) -> dict[str, Any]:
    container = docker(lab, "ps", "-q", "--filter", "name=demo_node0").strip()
    look = "import json, os; print(json.dumps({**os.environ, 'mounts': open('/proc/self/mounts').read()}))"
    found: dict[str, Any] = json.loads(docker(lab, "exec", container, "python3", "-c", look))
    return found


def test_what_looks_like_a_variable_or_a_template_arrives_as_it_is(
    lab: Lab, launcher: SwarmLauncher, planned: Callable[..., Plan], tmp_path: Path
) -> None:
    source, target = "odd{{.Node.ID}}$HOME$$", "/in/{{.Service.Name}}$HOME$$"
    (lab.shared / source).mkdir()
    docker(lab, "node", "update", "--label-add", "odd=$HOME$$", "node0")
    labelled = {"labels": {"odd": "$HOME$$"}}
    plan = planned(nodes=1, env={"ODD": ODD}, script_args=(ODD,), mounts=((f"/mnt/shared/{source}", target),), swarm=labelled)
    launcher.up(plan, say)
    ours = in_the_container(lab)
    launcher.down(RUN, say)
    stack_deploy(lab, plan, tmp_path, command_lines()[-1])
    theirs = in_the_container(lab)
    for found in (ours, theirs):
        assert found["ODD"] == ODD
        assert json.loads(found["SWARMTRAIN_SCRIPT_ARGS"]) == [ODD]
        assert f" {target} " in found["mounts"]
    docker(lab, "node", "update", "--label-rm", "odd", "node0")
