"""The coordinator's name does not resolve in a container, while its address works, as in Docker 29.0 to 29.6 (moby#53141)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_helpers import NODES, build_test_image
from test_training import (
    FEW_STEPS,
    ROOT,
    assert_nothing_recomputed,
    build_options,
    find_container,
    is_past_the_middle,
    launcher,
    read_losses,
    start_swarmtrain,
    wait_for_events,
    wait_for_run,
)

from swarmtrain import protocol
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state

__all__ = ["launcher"]  # a fixture

# Nothing listens there: a name fails to resolve at once.
NO_RESOLVER, DOCKER_RESOLVER = "127.0.0.1", "127.0.0.11"
# Python runs it at its start: on nodes with a flag on the shared disk, no name resolves from the beginning.
SITE_CUSTOMIZE = f"""
import os, pathlib
if pathlib.Path("/workspace/runs", "no-names-on-" + os.environ.get("SWARMTRAIN_NODE", "")).exists():
    pathlib.Path("/etc/resolv.conf").write_text("nameserver {NO_RESOLVER}\\n")
"""


def set_resolver(lab: Lab, node: str, resolver: str) -> None:
    """Change the resolver in the run's container on `node`, and assert the effect."""
    container, docker = find_container(lab, node)
    argv = [*docker, "exec", "--user", "0", container, "sh", "-c"]
    subprocess.run([*argv, f"echo nameserver {resolver} >/etc/resolv.conf"], check=True)
    look_up, end = [*argv, "python3 -c 'import socket; socket.gethostbyname(\"rendezvous\")'"], time.monotonic() + 60
    # While the coordinator is being replaced, its name does not resolve either.
    while (subprocess.run(look_up, check=False, capture_output=True).returncode == 0) is not (resolver == DOCKER_RESOLVER):
        assert time.monotonic() < end, f"{node} with the resolver {resolver}"
        time.sleep(0.5)


@pytest.mark.test_all_only("trains and waits for a report of a node; tests/unit has the parts")
def test_a_run_whose_names_stop_resolving_trains_to_its_end(lab: Lab, launcher: SwarmLauncher, image: str) -> None:
    options = build_options(image, "unresolved", "runner.min_nodes=3", "runner.max_nodes=3")
    deploy = start_swarmtrain("deploy", "examples/quickstart.yml", "--name", "unresolved", *options)
    wait_for_run(launcher, "unresolved")
    wait_for_events(launcher, "unresolved", is_past_the_middle)
    for node in NODES:
        set_resolver(lab, node, NO_RESOLVER)
    broken_at = time.time()
    assert deploy.wait(300) == 0
    events = launcher.read_events("unresolved")
    assert [event.kind for event in events].count(protocol.EVENT_WORLD_FORMED) == 1
    late_kinds = {event.kind for event in events if event.time > broken_at}
    assert late_kinds >= {protocol.EVENT_CHECKPOINT, protocol.EVENT_OUTCOME}
    assert sorted(read_losses(lab, "unresolved")) == list(range(1, FEW_STEPS + 1))


@pytest.fixture(scope="module")
def breakable_image(engine: DockerEngine, image: str) -> str:
    """The image, with containers in which names do not resolve if the node has a flag on the shared disk."""
    dockerfile = f"FROM {image}\nCOPY sitecustomize.py /breakable/\nENV PYTHONPATH=/breakable\n"
    return build_test_image(engine, f"{REGISTRY_ADDRESS}/breakable:test", {"Dockerfile": dockerfile, "sitecustomize.py": SITE_CUSTOMIZE})


@pytest.fixture
def flag(lab: Lab) -> Iterator[Path]:
    """The path of the flag of node2."""
    path = lab.shared_disk / "no-names-on-node2"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.test_all_only("trains and waits for a report of a node; tests/unit has the parts")
def test_the_launcher_replaces_a_coordinator_that_a_restarted_node_cannot_find(
    lab: Lab, launcher: SwarmLauncher, breakable_image: str, flag: Path, tmp_path: Path
) -> None:
    options = build_options(breakable_image, "unfound", "runner.min_nodes=3", "runner.max_nodes=3", "runner.docker_config.user='0:0'")
    argv = [sys.executable, "-m", "swarmtrain", "deploy", "examples/quickstart.yml", "--name", "unfound", *options]
    with (tmp_path / "output").open("wb") as output:
        deploy = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=output)
    wait_for_run(launcher, "unfound")
    wait_for_events(launcher, "unfound", is_past_the_middle)
    flag.touch()
    container, docker = find_container(lab, "node2")
    subprocess.run([*docker, "kill", "--signal", "KILL", container], check=True)

    end = time.monotonic() + 180
    while "docker service update --force unfound_rendezvous" not in (tmp_path / "output").read_text():
        assert time.monotonic() < end, (tmp_path / "output").read_text()
        assert deploy.poll() is None
        time.sleep(1)
    flag.unlink()
    set_resolver(lab, "node2", DOCKER_RESOLVER)
    assert deploy.wait(300) == 0, (tmp_path / "output").read_text()
    text = (tmp_path / "output").read_text()
    assert "node2 cannot resolve the name of the coordinator, which runs: it is replaced" in text
    assert text.count("it is replaced") == 1
    coordinator = cluster_state.find_coordinator(cluster_state.list_services(launcher._engine, "unfound"), "unfound")
    assert coordinator is not None
    assert coordinator.spec["TaskTemplate"]["ForceUpdate"] == 1
    assert_nothing_recomputed(lab, "unfound")
    assert sorted(read_losses(lab, "unfound")) == list(range(1, FEW_STEPS + 1))
