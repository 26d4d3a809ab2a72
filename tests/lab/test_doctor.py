"""doctor on a real swarm: no finding on a healthy swarm; it finds a firewall, a slow link, a small MTU and two different disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from swarm_helpers import run_docker

from swarmtrain import process
from swarmtrain.lab import Lab, network
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state

ROOT = Path(__file__).parents[2]
RunDoctor = Callable[..., dict[str, Any]]


@pytest.fixture
def run_doctor(lab: Lab, image: str, engine: DockerEngine) -> Iterator[RunDoctor]:
    """Return a function that runs `swarmtrain doctor --json` on the quickstart and returns its output. It must leave nothing."""
    environment = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0")}

    def run(*overrides: str, expect_healthy: bool) -> dict[str, Any]:
        values = [f"runner.docker_config.docker_container={image}", *overrides]
        argv = ["doctor", "examples/quickstart.yml", "--json", *(word for value in values for word in ("-o", value))]
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False)
        print(f"doctor took {time.monotonic() - start:.1f} s")
        answers: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode == 0) is expect_healthy is answers["ok"], answers
        return answers

    yield run
    assert is_probe_removed(lab, engine)


def is_probe_removed(lab: Lab, engine: DockerEngine) -> bool:
    """Return whether the probe has left nothing in the swarm and on its shared disk."""
    marks = list(lab.shared_disk.glob(".*probe*"))
    return (
        cluster_state.read_stack_state(engine, "quickstart-probe").is_empty
        and cluster_state.list_terminating_runs(engine) == []
        and marks == []
    )


def map_findings(answers: dict[str, Any]) -> dict[str, list[str]]:
    """Return the findings of each check, by the check's name, as "place: message"."""
    return {
        each["check"]: [f"{one['place']}: {one['message']}" for one in each["findings"]] for each in answers["checks"] if each["findings"]
    }


@contextmanager
def changed_node(lab: Lab, node: str, command: str, undo: str) -> Iterator[None]:
    subprocess.run([*lab.build_enter_command(node), "sh", "-ec", command], check=True)
    try:
        yield
    finally:
        subprocess.run([*lab.build_enter_command(node), "sh", "-ec", undo], check=True)


@pytest.mark.test_all_only("starts a probe on three nodes; tests/doctor has each finding")
def test_a_sound_swarm(run_doctor: RunDoctor) -> None:
    answers = run_doctor(expect_healthy=True)
    serious = {
        check: findings
        for check, findings in map_findings(answers).items()
        if check not in ("quorum", "cores", "disk-space", "bandwidth", "latency")
    }
    assert serious == {}
    assert sorted((link["a"], link["b"]) for link in answers["links"]) == [("node0", "node1"), ("node0", "node2"), ("node1", "node2")]
    for link in answers["links"]:
        assert link["largest_packet"] == 1450
        assert min(link["forward_bandwidth"], link["backward_bandwidth"], link["round_trip"]) > 0
    assert all(facts["interface"] == "eth0" for facts in answers["nodes"].values())
    assert all(facts["gloo"]["seconds"] > 0 for facts in answers["collective"].values())


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_a_firewall_between_two_nodes(run_doctor: RunDoctor, lab: Lab) -> None:
    """The containers of the two nodes cannot reach each other, while the managers see both nodes ready."""
    address = next(node.address for node in lab.get_status() if node.node == "node2")
    rule = f"INPUT -s {address} -p udp --dport 4789 -j DROP"
    with changed_node(lab, "node1", f"iptables -I {rule}", f"iptables -D {rule}"):
        answers = run_doctor(expect_healthy=False)
    assert [line.partition(": ")[0] for line in map_findings(answers)["links"]] == ["link node1 on node1 to node2 on node2"]
    assert "all-reduce" in map_findings(answers)


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_packets_that_get_lost(run_doctor: RunDoctor, lab: Lab) -> None:
    """A link on the way has a smaller MTU than the machines' interfaces."""
    wire = ["ip", "-n", network.get_namespace_name(lab.name, "bridge"), "link", "set", "node2", "mtu"]
    process.run_command([*wire, "1400"])
    try:
        answers = run_doctor(expect_healthy=False)
        mended = run_doctor("runner.swarm.mtu=1400", expect_healthy=True)
    finally:
        process.run_command([*wire, "1500"])
    assert "packets" not in map_findings(mended)
    assert {line.partition(": ")[0] for line in map_findings(answers)["packets"]} == {
        "link node0 on node0 to node2 on node2",
        "link node1 on node1 to node2 on node2",
    }
    hints = [one["hint"] for each in answers["checks"] if each["check"] == "packets" for one in each["findings"]]
    assert "runner.swarm.mtu=1400" in hints[0]


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_a_slow_link(run_doctor: RunDoctor, lab: Lab) -> None:
    lab.limit_node_bandwidth("node2", "20mbit", report_progress=print)
    try:
        answers = run_doctor(expect_healthy=True)
    finally:
        lab.reconnect_node("node2", report_progress=print)
    slow = map_findings(answers)["bandwidth"]
    assert slow
    assert all("node2" in line for line in slow)


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_save_dir_on_two_disks(run_doctor: RunDoctor, lab: Lab) -> None:
    with changed_node(lab, "node2", "mkdir -p -m 777 /mnt/other; mount --bind /mnt/other /mnt/shared", "umount /mnt/shared"):
        answers = run_doctor(expect_healthy=False)
    assert any(
        "/workspace/runs is a different disk on this node: what node0, node1 wrote" in line for line in map_findings(answers)["shared"]
    )


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_ctrl_c_leaves_nothing_of_the_probe(lab: Lab, image: str, engine: DockerEngine) -> None:
    environment = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0")}
    argv = [sys.executable, "-m", "swarmtrain", "doctor", "examples/quickstart.yml", "-o", f"runner.docker_config.docker_container={image}"]
    doctor = subprocess.Popen(argv, cwd=ROOT, env=environment)
    end = time.monotonic() + 60
    while not list(lab.shared_disk.glob(".quickstart-probe-*")):
        assert time.monotonic() < end
        time.sleep(0.1)
    doctor.send_signal(signal.SIGINT)
    assert doctor.wait(120) == 130
    assert is_probe_removed(lab, engine)


@pytest.mark.test_all_only("starts a probe; tests/doctor has each finding")
def test_a_node_that_is_down_is_a_finding_and_the_rest_is_probed(run_doctor: RunDoctor, lab: Lab) -> None:
    run_docker(lab, "node", "update", "--availability", "drain", "node2")
    try:
        enough = run_doctor("runner.nodes=3", "runner.min_nodes=2", expect_healthy=True)
        too_few = run_doctor("runner.nodes=3", "runner.min_nodes=3", expect_healthy=False)
    finally:
        run_docker(lab, "node", "update", "--availability", "active", "node2")
    for answers in (enough, too_few):
        assert map_findings(answers)["nodes"] == ["node node2: is drained"]
        assert sorted(answers["nodes"]) == ["node0", "node1"]
        assert [(link["a"], link["b"]) for link in answers["links"]] == [("node0", "node1")]


@pytest.mark.test_all_only("starts a probe; tests/doctor has each finding")
def test_a_node_without_a_mounted_folder_is_a_finding_and_the_rest_is_probed(run_doctor: RunDoctor, lab: Lab) -> None:
    folders = [lab.get_node_disk(node) / "doctor-only" for node in ("node0", "node1")]
    for folder in folders:
        folder.mkdir()
    try:
        mount = "runner.docker_config.docker_mounts=[[/mnt/shared, /workspace/runs], [/mnt/own/doctor-only, /data]]"
        answers = run_doctor("runner.nodes=3", "runner.min_nodes=2", mount, expect_healthy=True)
    finally:
        for folder in folders:
            folder.rmdir()
    [finding] = map_findings(answers)["start"]
    assert finding.startswith("node node2: ")
    assert "bind source path does not exist: /mnt/own/doctor-only" in finding
    assert sorted(answers["nodes"]) == ["node0", "node1"]
