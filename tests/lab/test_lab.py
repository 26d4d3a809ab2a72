"""The lab does to its machines what it says: real engines, killed, cut off, slowed down, and gone without a trace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import PARTS, ROOT, say
from stand_in import docker

from swarmtrain.errors import LabError
from swarmtrain.lab import Lab, fabric
from swarmtrain.lab.state import base_directory
from swarmtrain.launchers.engine import Engine

PORT = 7000
SERVE = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    while True:
        peer, _ = server.accept()
        while peer.recv(1 << 20):
            pass
        peer.sendall(b"got it")
        peer.close()
"""
# Sends a number of bytes and prints the seconds until all have arrived.
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3) as peer:
    peer.settimeout(30)
    started = time.monotonic()
    peer.sendall(bytes(int(sys.argv[3])))
    peer.shutdown(socket.SHUT_WR)
    if peer.recv(100) != b"got it":
        sys.exit("no answer")
    print(time.monotonic() - started)
"""
# Connects, says so, and then tells how the connection ends within some seconds: silence, an end, or a reset.
LISTEN = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3) as peer:
    print("connected", flush=True)
    peer.settimeout(float(sys.argv[3]))
    try:
        print("data" if peer.recv(1) else "end")
    except TimeoutError:
        print("silence")
    except OSError as error:
        print("reset", error)
"""


@pytest.fixture
def served(lab: Lab) -> Iterator[Callable[[str], None]]:
    """Start a TCP server beside a node's engine."""
    servers: list[subprocess.Popen[str]] = []

    def serve(node: str) -> None:
        servers.append(started(lab, node, SERVE, PORT))
        assert servers[-1].stdout is not None
        assert servers[-1].stdout.readline() == "listening\n"

    yield serve
    for server in servers:
        os.killpg(server.pid, signal.SIGKILL)  # nsenter, and what it started
        server.wait()


def started(lab: Lab, node: str, script: str, *arguments: object) -> subprocess.Popen[str]:
    argv = [*lab.enter(node), sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)


def seconds_to_send(lab: Lab, source: str, target: str, size: int) -> float:
    """Return how long `size` bytes take from one node to another. Raises CalledProcessError if they do not arrive."""
    argv = [*lab.enter(source), sys.executable, "-c", SEND, target, str(PORT), str(size)]
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def registry_hardware_address(lab: Lab) -> str:
    """Return the MAC address of the bridge, at which the registry listens."""
    argv = ["ip", "-n", fabric.namespace(lab.name, "fabric"), "-j", "link", "show", "type", "bridge"]
    return str(json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)[0]["address"])


def node_states(engine: Engine) -> dict[str, str]:
    return {node["Description"]["Hostname"]: node["Status"]["State"] for node in engine.get("/nodes")}


def wait_for(what: str, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def machine_pid(name: str, node: str) -> int:
    return int((base_directory() / name / node / "pid").read_text().split()[0])


def with_children(pid: int) -> set[tuple[int, str]]:
    """Return a process and all below it, each as pid and start time."""
    found = {(pid, start_time(pid))}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found |= with_children(int(child))
    return found


def start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def alive(process: tuple[int, str]) -> bool:
    """Whether it still runs; one that waits only for its parent to fetch its exit code does not."""
    try:
        state = Path(f"/proc/{process[0]}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and start_time(process[0]) == process[1]
    except (FileNotFoundError, ProcessLookupError):
        return False


def traces(name: str) -> list[str]:
    """Return everything on this machine that bears the lab's name: files, namespaces, mounts, control groups, processes."""
    found = [str(path) for path in (base_directory() / name,) if path.exists()]
    found += [str(path) for path in Path("/run/netns").glob(f"st-{name}-*")]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{name}-" in line or f"/{name}/" in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/swarmtrain/{name}")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text()
        except OSError:
            continue
        if f"/{name}/" in command or f"st-{name}-" in command:
            found.append(f"process {process.name}: {command}")
    return found


def interfaces() -> set[str]:
    """Return the host's own network interfaces; the number in a name is not that of a run beside this one."""
    return {name for _, name in socket.if_nameindex()}


def lab_command(*arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "swarmtrain", "lab", *arguments]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_every_node_is_ready_and_knows_the_others(lab: Lab, engine: Engine) -> None:
    assert node_states(engine) == {"node0": "ready", "node1": "ready", "node2": "ready"}
    assert [(node.node, node.state, node.role) for node in lab.status()] == [
        ("node0", "up", "manager"),
        ("node1", "up", "worker"),
        ("node2", "up", "worker"),
    ]
    addresses = {node.node: node.address for node in lab.status()}
    for name, address in addresses.items():
        known = subprocess.run([*lab.enter("node1"), "getent", "hosts", name], check=True, capture_output=True, text=True).stdout
        assert known.split() == [address, name]


def test_another_process_finds_the_lab(lab: Lab) -> None:
    command = lab_command("status", "--json", "--name", lab.name)
    output, _ = command.communicate(timeout=30)
    assert [node["state"] for node in json.loads(output)] == ["up"] * 3
    command = lab_command("env", "--name", lab.name)
    output, _ = command.communicate(timeout=30)
    asked = subprocess.run(
        ["sh", "-c", f"{output}\ndocker info --format '{{{{.Name}}}}'"], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert asked.stdout == "node0\n", asked.stderr


def test_each_node_counts_its_share_of_the_cores(lab: Lab, base: str) -> None:
    share = f"{max(1, len(os.sched_getaffinity(0)) // 3)}\n"
    run = ("run", "--rm", "--network", "none")
    assert docker(lab, *run, base, "printenv", "SWARMTRAIN_CORES", node="node2") == share
    assert docker(lab, *run, "-e", "SWARMTRAIN_CORES=7", base, "printenv", "SWARMTRAIN_CORES", node="node2") == "7\n"
    for prefix in (
        [str(lab.directory / "bin" / "ssh"), "node1"],
        [sys.executable, "-m", "swarmtrain", "lab", "enter", "--name", lab.name, "node1"],
    ):
        done = subprocess.run([*prefix, "printenv", "SWARMTRAIN_CORES"], capture_output=True, text=True, check=True)
        assert done.stdout == share


def test_the_shared_disk_is_one_disk(lab: Lab) -> None:
    subprocess.run([*lab.enter("node1"), "sh", "-c", "echo from node1 >/mnt/shared/letter"], check=True)
    assert subprocess.run([*lab.enter("node2"), "cat", "/mnt/shared/letter"], check=True, capture_output=True).stdout == b"from node1\n"
    assert (lab.shared / "letter").read_text() == "from node1\n"
    (lab.shared / "letter").unlink()


def test_a_killed_node_is_gone_and_comes_back_with_its_data(lab: Lab, engine: Engine, served: Callable[[str], None]) -> None:
    own = Engine(lab.docker_host("node2"))
    own.post("/volumes/create", {"Name": "kept"})
    before = with_children(machine_pid(lab.name, "node2"))
    assert len(before) >= 3, "init, engine, containerd"
    served("node2")
    listener = started(lab, "node0", LISTEN, "node2", PORT, 2)
    assert listener.stdout is not None
    assert listener.stdout.readline() == "connected\n"

    bridge = registry_hardware_address(lab)
    lab.kill("node2", say=say)
    assert registry_hardware_address(lab) == bridge, "the others reach the registry without asking anew where it is"
    assert [process for process in before if alive(process)] == []
    assert listener.communicate()[0] == "silence\n", "a machine without power tells no peer that it is gone"
    assert [(node.state, node.pid) for node in lab.status()][2] == ("dead", None)
    wait_for("node2 is down", lambda: node_states(engine)["node2"] == "down", 40)
    with pytest.raises(LabError, match="dead"):
        lab.kill("node2", say=say)

    lab.start("node2", say=say)
    assert node_states(engine)["node2"] == "ready"
    assert [volume["Name"] for volume in own.get("/volumes")["Volumes"]] == ["kept"]
    own.delete("/volumes/kept")
    with pytest.raises(LabError, match="runs already"):
        lab.start("node2", say=say)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_swarm_survives_the_loss_of_its_manager(lab: Lab, engine: Engine) -> None:
    lab.kill("node0", say=say)
    lab.start("node0", say=say)
    wait_for("all are ready again", lambda: set(node_states(engine).values()) == {"ready"}, 40)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_cut_node_lives_alone(lab: Lab, engine: Engine, served: Callable[[str], None]) -> None:
    served("node1")
    before = with_children(machine_pid(lab.name, "node1"))
    assert seconds_to_send(lab, "node0", "node1", 1) < 2
    lab.cut("node1", say=say)
    try:
        with pytest.raises(subprocess.CalledProcessError):
            seconds_to_send(lab, "node0", "node1", 1)
        assert [node.state for node in lab.status()] == ["up", "cut", "up"]
        wait_for("node1 is down", lambda: node_states(engine)["node1"] == "down", 40)
        assert [process for process in before if not alive(process)] == []
    finally:
        lab.heal("node1", say=say)
    assert seconds_to_send(lab, "node0", "node1", 1) < 2
    wait_for("node1 is ready again", lambda: node_states(engine)["node1"] == "ready", 40)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
@pytest.mark.parametrize(("source", "target"), [("node0", "node1"), ("node1", "node0")])
def test_a_slow_node_is_slow_in_both_directions(lab: Lab, served: Callable[[str], None], source: str, target: str) -> None:
    served(target)
    size = 5_000_000
    fast = seconds_to_send(lab, source, target, size)
    lab.slow("node1", "20mbit", say=say)
    try:
        assert lab.status()[1].link == "20mbit"
        slow = seconds_to_send(lab, source, target, size)
    finally:
        lab.heal("node1", say=say)
    assert 1.5 < slow < 6, "40 Mbit at 20 Mbit/s take 2 s"
    assert fast < slow / 4
    assert seconds_to_send(lab, source, target, size) < slow / 4
    assert lab.status()[1].link == "up"


def test_an_unknown_node_is_refused_with_the_known_ones(lab: Lab) -> None:
    for fault in (lab.kill, lab.start, lab.cut, lab.heal):
        with pytest.raises(LabError, match="node0, node1, node2"):
            fault("node7", say=say)
    with pytest.raises(LabError, match="'fast' is no rate"):
        lab.slow("node1", "fast", say=say)


def test_up_beside_a_live_lab_leaves_it_alone(lab: Lab) -> None:
    pids = [node.pid for node in lab.status()]
    said: list[str] = []
    Lab(lab.name).up(3, parts=PARTS, say=said.append)
    assert said == [f"lab {lab.name}: 3 of its 3 engines run already (node0, node1, node2); left as it is"]
    with pytest.raises(LabError, match="up already"):
        Lab(lab.name).up(2, parts=PARTS, say=say)
    assert [node.pid for node in lab.status()] == pids


def test_down_leaves_nothing_and_other_labs_alone(lab: Lab, new_lab: Callable[[str], Lab]) -> None:
    pids, links = [node.pid for node in lab.status()], interfaces()
    other = new_lab("gone")
    other.up(2, say=say)
    processes = set().union(*(with_children(machine_pid(other.name, part)) for part in ("node0", "node1")))
    processes.add((registry := int((base_directory() / other.name / "registry.pid").read_text().split()[0]), start_time(registry)))
    assert len(traces(other.name)) >= 6, "what is looked for can be found"
    other.down(say=say)
    assert traces(other.name) == []
    assert [process for process in processes if alive(process)] == []
    assert interfaces() == links
    assert [node.pid for node in lab.status()] == pids


def test_a_command_on_a_node_means_that_nodes_engine(lab: Lab) -> None:
    """As it would there, whatever the shell points to here; its exit code is the command's own."""
    elsewhere = {**os.environ, "DOCKER_HOST": lab.docker_host("node0")}
    words = ["sh", "-c", "hostname && pwd && docker info --format {{.Name}} && ls /mnt/shared && exit 7"]
    argv = [sys.executable, "-m", "swarmtrain", "lab", "enter", "--name", lab.name, "node1", *words]
    done = subprocess.run(argv, cwd=ROOT, env=elsewhere, check=False, capture_output=True, text=True, timeout=30)
    assert (done.stdout.splitlines()[:3], done.returncode) == (["node1", str(ROOT), "node1"], 7), done.stderr


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_bare_lab_is_machines_that_nobody_has_set_up(new_lab: Callable[[str], Lab]) -> None:
    lab = new_lab("bare")
    said: list[str] = []
    lab.up(2, bare=True, say=said.append)
    assert said[-1] == f"  swarmtrain lab enter --name {lab.name} node0"
    assert [(node.state, node.role) for node in lab.status()] == [("up", "")] * 2
    first, second = (Engine(lab.docker_host(node)) for node in ("node0", "node1"))
    assert [engine.get("/info")["Swarm"]["LocalNodeState"] for engine in (first, second)] == ["inactive"] * 2
    assert "registry.lab:5000" not in first.get("/info")["RegistryConfig"]["IndexConfigs"]
    lab.kill("node1", say=say)
    lab.start("node1", say=say)
    assert [node.state for node in lab.status()] == ["up", "up"]
    with pytest.raises(LabError, match="up already, and bare"):
        lab.up(2, say=say)

    def typed(node: str, *command: str) -> str:
        argv = [*lab.enter(node), *command]
        return subprocess.run(argv, check=True, capture_output=True, text=True, env=lab.environment_on(node, os.environ)).stdout

    typed("node0", "docker", "swarm", "init", "--advertise-addr", "eth0")
    token = typed("node0", "docker", "swarm", "join-token", "--quiet", "worker").strip()
    typed("node1", "docker", "swarm", "join", "--advertise-addr", "eth0", "--token", token, "node0:2377")
    assert node_states(first) == {"node0": "ready", "node1": "ready"}
    lab.kill("node1", say=say)
    lab.start("node1", say=say)
    wait_for("node1 is back in the swarm that was made by hand", lambda: node_states(first)["node1"] == "ready", 40)
    lab.down(say=say)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_lab_behind_ssh_and_with_a_slurm(new_lab: Callable[..., Lab]) -> None:
    """By what `lab env` prints; a machine that was killed comes back with both."""
    lab = new_lab("reached", ("ssh", "slurm"))
    lab.up(2, parts=("ssh", "slurm"), say=say)
    assert [node.services for node in lab.status()] == [("sshd", "slurmctld", "slurmd"), ("sshd", "slurmd")]

    def typed(line: str) -> list[str]:
        """Return what a line prints in a user's shell."""
        shell = f'eval "$({sys.executable} -m swarmtrain lab env --name {lab.name})"; {line}'
        done = subprocess.run(["sh", "-ec", shell], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.split())

    def both() -> list[str]:
        return typed("ssh node1 hostname; ssh node0 ssh node1 hostname; srun -N2 hostname")

    assert both() == ["node0", "node1", "node1", "node1"]
    assert typed("srun -N1 printenv SWARMTRAIN_CORES") == [str(max(1, len(os.sched_getaffinity(0)) // 2))]
    if shutil.which("pdsh") or os.environ.get("CI") == "true":
        assert typed("pdsh -N -w 'node[0-1]' hostname") == ["node0", "node1"]
    assert typed("ssh node1 'touch /mnt/own/mine; ls /mnt/own'; ssh node0 ls /mnt/own") == ["mine"]
    for node in ("node1", "node0"):
        lab.kill(node, say=say)
        with pytest.raises(AssertionError, match=r"timed out|refused|No route"):
            typed(f"ssh -o ConnectTimeout=1 {node} hostname")
        lab.start(node, say=say)
        assert both() == ["node0", "node1", "node1", "node1"]
    lab.cut("node1", say=say)
    with pytest.raises(AssertionError, match=r"timed out|No route"):
        typed("ssh -o ConnectTimeout=1 node1 hostname")
    lab.heal("node1", say=say)
    assert typed("ssh node1 ls /mnt/own") == ["mine"]
    with pytest.raises(LabError, match="up already, and its machines have ssh, slurm"):
        lab.up(2, say=say)
    lab.down(say=say)
    assert traces(lab.name) == []


def test_what_machines_cannot_have_is_refused(new_lab: Callable[[str], Lab]) -> None:
    with pytest.raises(LabError, match="'slrum' is nothing that machines can have; there is: swarm, docker, ssh, slurm"):
        new_lab("wrong").up(2, parts=("ssh", "slrum"), say=say)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_up_replaces_a_lab_whose_engines_are_dead(new_lab: Callable[[str], Lab]) -> None:
    lab = new_lab("dead")
    lab.up(2, say=say)
    (lab.shared / "old").touch()
    for node in ("node0", "node1"):
        os.kill(machine_pid(lab.name, node), signal.SIGKILL)
    wait_for("both are dead", lambda: [node.state for node in lab.status()] == ["dead", "dead"], 5)
    said: list[str] = []
    lab.up(1, say=said.append)
    assert "all its engines are dead; removing it" in said[0]
    assert [node.state for node in lab.status()] == ["up"]
    assert list(lab.shared.iterdir()) == []
    lab.down(say=say)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
@pytest.mark.parametrize("seconds", [0.45, 0.7, 1.0])
def test_an_interrupted_up_removes_what_it_made(new_lab: Callable[[str], Lab], seconds: float) -> None:
    lab = new_lab("interrupted")
    command = lab_command("up", "--nodes", "3", "--name", lab.name)
    wait_for("it has begun", (base_directory() / lab.name).exists, 10)
    time.sleep(seconds - 0.4)
    os.killpg(command.pid, signal.SIGINT)
    _, talk = command.communicate(timeout=30)
    assert command.returncode == 130, talk
    assert "removing what was made" in talk
    assert traces(lab.name) == []


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_an_engine_that_dies_at_once_is_reported_with_its_words(new_lab: Callable[[str], Lab], tmp_path: Path) -> None:
    (tmp_path / "dockerd").write_text("#!/bin/sh\necho this engine has had enough\nexit 1\n")
    (tmp_path / "dockerd").chmod(0o755)
    lab = new_lab("broken")
    with pytest.raises(LabError, match="this engine has had enough"):
        lab.up(2, engine=tmp_path, say=say)
    assert traces(lab.name) == []


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_four_engines_are_up_in_seconds(new_lab: Callable[[str], Lab]) -> None:
    lab = new_lab("quick")
    began = time.monotonic()
    lab.up(4, say=say)
    took = time.monotonic() - began
    lab.down(say=say)
    say(f"four engines up and joined: {took:.1f} s")
    assert took < 15, "under 5 s on a machine that does nothing else"
