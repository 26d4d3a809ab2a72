"""The identity of runs on a real swarm: it is kept by changes of a run, and by runs that plain docker started."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from swarm_helpers import DISCARD, RUN, list_task_ids, run_docker

from swarmtrain.lab import Lab
from swarmtrain.launchers.common.history_store import find_recorded_run
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import EVENT_COORDINATOR_STARTED
from swarmtrain.protocol.run_identity import RunIdentity, find_current_owner
from swarmtrain.render.stack_document import render_stack, write_stack
from swarmtrain.view.run_table import load_run_table


def read_coordinator_id(launcher: SwarmLauncher) -> str:
    """Return the id of the run that its coordinator was started with. The coordinator logs it some moments after its container runs."""
    deadline = time.monotonic() + 60
    while not (started := [event for event in launcher.read_events(RUN) if event.kind == EVENT_COORDINATOR_STARTED]):
        assert time.monotonic() < deadline, "the coordinator has not started"
        time.sleep(0.2)
    return str(started[-1].data["run_id"])


def test_a_run_keeps_its_identity_until_it_is_removed(
    launcher: SwarmLauncher, plan_run: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.deploy_run(plan_run(), DISCARD)
    identity = launcher.read_identity(RUN)
    assert (identity.owner, read_coordinator_id(launcher)) == (find_current_owner(), identity.id)
    assert abs(identity.created - time.time()) < 600
    monkeypatch.setenv("SWARMTRAIN_OWNER", "somebody")
    launcher.deploy_run(plan_scaled_run(launcher, RUN, ScaleRequest(3)), DISCARD)
    launcher.deploy_run(plan_run(nodes=3, script=b"other()\n"), DISCARD)
    assert launcher.read_identity(RUN) == identity
    launcher.tear_down_run(RUN, DISCARD)
    launcher.deploy_run(plan_run(), DISCARD)
    later = launcher.read_identity(RUN)
    assert later.id != identity.id
    assert (later.owner, read_coordinator_id(launcher)) == ("somebody", later.id)
    recorded_run = find_recorded_run(RUN)
    assert recorded_run
    assert recorded_run.identity == later


def test_a_run_that_plain_docker_started_has_an_id_and_is_not_labelled(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = plan_run()
    write_stack(render_stack(plan), tmp_path / "generated.yml")
    run_docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN)
    launcher.deploy_run(plan, DISCARD)  # which only waits
    identity = launcher.read_identity(RUN)
    assert (identity.owner, identity.is_own, len(identity.id)) == ("", True, 12)
    assert read_coordinator_id(launcher) == identity.id
    tasks = list_task_ids(launcher._engine)
    launcher.deploy_run(plan_scaled_run(launcher, RUN, ScaleRequest(3)), DISCARD)
    assert list_task_ids(launcher._engine).items() >= tasks.items()
    assert launcher.read_identity(RUN) == identity
    labels = run_docker(lab, "service", "inspect", "--format", "{{json .Spec.Labels}}", f"{RUN}_node2")
    assert not [label for label in RunIdentity("").labels if label in labels]


def test_the_table_of_runs_shows_owner_nodes_and_step(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", lab.get_docker_host("node0"))
    launcher.deploy_run(plan_run(), DISCARD)
    (row,) = [row for row in load_run_table().runs if row.run == RUN]
    assert (row.id, row.owner, row.running_nodes, row.nodes) == (launcher.read_identity(RUN).id, find_current_owner(), 2, 2)
