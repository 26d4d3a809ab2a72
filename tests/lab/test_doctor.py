"""doctor on a real swarm: nothing is found where nothing is wrong, and a firewall, a slow link, small packets and two disks are."""

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

from swarmtrain import process
from swarmtrain.lab import Lab, fabric
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe

ROOT = Path(__file__).parents[2]
Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def doctor(lab: Lab, image: str, engine: Engine) -> Iterator[Doctor]:
    """Return a function that runs `swarmtrain doctor --json` on the quickstart, and returns its answers; nothing of it is left."""
    environment = {**os.environ, "DOCKER_HOST": lab.docker_host("node0")}

    def run(*overrides: str, sound: bool) -> dict[str, Any]:
        values = [f"runner.docker_config.docker_container={image}", *overrides]
        argv = ["doctor", "examples/quickstart.yml", "--json", *(word for value in values for word in ("-o", value))]
        begun = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False)
        print(f"doctor took {time.monotonic() - begun:.1f} s")
        answers: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode == 0) is sound is answers["sound"], answers
        return answers

    yield run
    assert nothing_left(lab, engine)


def nothing_left(lab: Lab, engine: Engine) -> bool:
    """Say whether the probe has left nothing on the swarm and on its shared disk."""
    marks = list(lab.shared.glob(".*probe*"))
    return observe.observe(engine, "quickstart-probe").empty and observe.leaving(engine) == [] and marks == []


def found(answers: dict[str, Any]) -> dict[str, list[str]]:
    """Return what the checks found, place and message in one, by the check's name."""
    return {
        each["check"]: [f"{one['place']}: {one['message']}" for one in each["findings"]] for each in answers["checks"] if each["findings"]
    }


@contextmanager
def on(lab: Lab, node: str, command: str, undo: str) -> Iterator[None]:
    subprocess.run([*lab.enter(node), "sh", "-ec", command], check=True)
    try:
        yield
    finally:
        subprocess.run([*lab.enter(node), "sh", "-ec", undo], check=True)


@pytest.mark.test_all_only("starts a probe on three nodes; tests/doctor has each finding")
def test_a_sound_swarm(doctor: Doctor) -> None:
    answers = doctor(sound=True)
    serious = {
        check: findings for check, findings in found(answers).items() if check not in ("quorum", "cores", "room", "bandwidth", "latency")
    }
    assert serious == {}
    assert sorted((link["a"], link["b"]) for link in answers["links"]) == [("node0", "node1"), ("node0", "node2"), ("node1", "node2")]
    for link in answers["links"]:
        assert link["packet"] == 1450
        assert min(link["there"], link["back"], link["round_trip"]) > 0
    assert all(facts["interface"] == "eth0" for facts in answers["nodes"].values())
    assert all(facts["gloo"]["seconds"] > 0 for facts in answers["together"].values())


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_a_firewall_between_two_nodes(doctor: Doctor, lab: Lab) -> None:
    """The containers of the two do not reach each other; the managers see both of them ready."""
    address = next(node.address for node in lab.status() if node.node == "node2")
    rule = f"INPUT -s {address} -p udp --dport 4789 -j DROP"
    with on(lab, "node1", f"iptables -I {rule}", f"iptables -D {rule}"):
        answers = doctor(sound=False)
    assert [line.partition(": ")[0] for line in found(answers)["links"]] == ["link node1 on node1 to node2 on node2"]
    assert "together" in found(answers)


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_packets_that_get_lost(doctor: Doctor, lab: Lab) -> None:
    """A switch on the way takes smaller packets than the machines send."""
    wire = ["ip", "-n", fabric.namespace(lab.name, "fabric"), "link", "set", "node2", "mtu"]
    process.run([*wire, "1400"])
    try:
        answers = doctor(sound=False)
        mended = doctor("runner.swarm.mtu=1400", sound=True)
    finally:
        process.run([*wire, "1500"])
    assert "packets" not in found(mended)
    assert {line.partition(": ")[0] for line in found(answers)["packets"]} == {
        "link node0 on node0 to node2 on node2",
        "link node1 on node1 to node2 on node2",
    }
    hints = [one["hint"] for each in answers["checks"] if each["check"] == "packets" for one in each["findings"]]
    assert "runner.swarm.mtu=1400" in hints[0]


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_a_slow_link(doctor: Doctor, lab: Lab) -> None:
    lab.slow("node2", "20mbit", say=print)
    try:
        answers = doctor(sound=True)
    finally:
        lab.heal("node2", say=print)
    slow = found(answers)["bandwidth"]
    assert slow
    assert all("node2" in line for line in slow)


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_save_dir_on_two_disks(doctor: Doctor, lab: Lab) -> None:
    with on(lab, "node2", "mkdir -p -m 777 /mnt/other; mount --bind /mnt/other /mnt/shared", "umount /mnt/shared"):
        answers = doctor(sound=False)
    assert any("/workspace/runs is another disk here: what node0, node1 wrote" in line for line in found(answers)["shared"])


@pytest.mark.test_all_only("each waits for a probe of a broken network or disk; tests/doctor has each finding")
def test_ctrl_c_leaves_nothing_of_the_probe(lab: Lab, image: str, engine: Engine) -> None:
    environment = {**os.environ, "DOCKER_HOST": lab.docker_host("node0")}
    argv = [sys.executable, "-m", "swarmtrain", "doctor", "examples/quickstart.yml", "-o", f"runner.docker_config.docker_container={image}"]
    doctor = subprocess.Popen(argv, cwd=ROOT, env=environment)
    end = time.monotonic() + 60
    while not list(lab.shared.glob(".quickstart-probe-*")):
        assert time.monotonic() < end
        time.sleep(0.1)
    doctor.send_signal(signal.SIGINT)
    assert doctor.wait(120) == 130
    assert nothing_left(lab, engine)
