"""The lab's operations on real engines: power off, partition, throttle, and removal without traces."""

from __future__ import annotations

import contextlib
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

import psutil
import pytest
from conftest import LAB_PARTS, ROOT, print_line
from swarm_helpers import run_docker

from swarmtrain.errors import LabError
from swarmtrain.lab import Lab, network
from swarmtrain.lab.state import get_labs_folder
from swarmtrain.launchers.common.docker_engine import DockerEngine

PORT = 7000
SERVER_SCRIPT = """
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
SENDER_SCRIPT = """
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
# Connects, prints that, and then prints what happens to the connection within some seconds: silence, an end, or a reset.
LISTENER_SCRIPT = """
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
def start_server(lab: Lab) -> Iterator[Callable[[str], None]]:
    """Start a TCP server on a node, next to its engine."""
    servers: list[subprocess.Popen[str]] = []

    def serve(node: str) -> None:
        servers.append(start_script(lab, node, SERVER_SCRIPT, PORT))
        assert servers[-1].stdout is not None
        assert servers[-1].stdout.readline() == "listening\n"

    yield serve
    for server in servers:
        os.killpg(server.pid, signal.SIGKILL)  # nsenter, and the server that it started
        server.wait()


def start_script(lab: Lab, node: str, script: str, *arguments: object) -> subprocess.Popen[str]:
    argv = [*lab.build_enter_command(node), sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)


def measure_send_seconds(lab: Lab, source: str, target: str, size: int) -> float:
    """Return the seconds that `size` bytes take from one node to another. Raises CalledProcessError if they do not arrive."""
    argv = [*lab.build_enter_command(source), sys.executable, "-c", SENDER_SCRIPT, target, str(PORT), str(size)]
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def read_registry_mac(lab: Lab) -> str:
    """Return the MAC address of the bridge, on which the registry listens."""
    argv = ["ip", "-n", network.get_namespace_name(lab.name, "bridge"), "-j", "link", "show", "type", "bridge"]
    return str(json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)[0]["address"])


def list_node_states(engine: DockerEngine) -> dict[str, str]:
    return {node["Description"]["Hostname"]: node["Status"]["State"] for node in engine.get("/nodes")}


def wait_until(description: str, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {description}"
        time.sleep(0.1)


def read_machine_pid(name: str, node: str) -> int:
    return int((get_labs_folder() / name / node / "pid").read_text().split()[0])


def list_process_tree(pid: int) -> set[psutil.Process]:
    """Return a process and all its descendants."""
    root = psutil.Process(pid)
    return {root, *root.children(recursive=True)}


def is_process_alive(process: psutil.Process) -> bool:
    """Return whether the process still runs. A zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def find_traces(name: str) -> list[str]:
    """Return everything on this machine that has the lab's name: files, namespaces, mounts, control groups, processes."""
    found = [str(path) for path in (get_labs_folder() / name,) if path.exists()]
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


def list_interfaces() -> set[str]:
    """Return the names of the host's network interfaces."""
    return {name for _, name in socket.if_nameindex()}


def start_lab_command(*arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "swarmtrain", "lab", *arguments]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_every_node_is_ready_and_knows_the_others(lab: Lab, engine: DockerEngine) -> None:
    assert list_node_states(engine) == {"node0": "ready", "node1": "ready", "node2": "ready"}
    assert [(node.node, node.state, node.role) for node in lab.get_status()] == [
        ("node0", "up", "manager"),
        ("node1", "up", "worker"),
        ("node2", "up", "worker"),
    ]
    addresses = {node.node: node.address for node in lab.get_status()}
    for name, address in addresses.items():
        known = subprocess.run(
            [*lab.build_enter_command("node1"), "getent", "hosts", name], check=True, capture_output=True, text=True
        ).stdout
        assert known.split() == [address, name]


def test_another_process_finds_the_lab(lab: Lab) -> None:
    command = start_lab_command("status", "--json", "--name", lab.name)
    output, _ = command.communicate(timeout=30)
    assert [node["state"] for node in json.loads(output)] == ["up"] * 3
    command = start_lab_command("env", "--name", lab.name)
    output, _ = command.communicate(timeout=30)
    asked = subprocess.run(
        ["sh", "-c", f"{output}\ndocker info --format '{{{{.Name}}}}'"], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert asked.stdout == "node0\n", asked.stderr


def test_each_node_counts_its_share_of_the_cores(lab: Lab, base_image: str) -> None:
    share = f"{max(1, len(os.sched_getaffinity(0)) // 3)}\n"
    run = ("run", "--rm", "--network", "none")
    assert run_docker(lab, *run, base_image, "printenv", "SWARMTRAIN_CORES", node="node2") == share
    assert run_docker(lab, *run, "-e", "SWARMTRAIN_CORES=7", base_image, "printenv", "SWARMTRAIN_CORES", node="node2") == "7\n"
    for prefix in (
        [str(lab.directory / "bin" / "ssh"), "node1"],
        [sys.executable, "-m", "swarmtrain", "lab", "enter", "--name", lab.name, "node1"],
    ):
        done = subprocess.run([*prefix, "printenv", "SWARMTRAIN_CORES"], capture_output=True, text=True, check=True)
        assert done.stdout == share


def test_the_shared_disk_is_one_disk(lab: Lab) -> None:
    subprocess.run([*lab.build_enter_command("node1"), "sh", "-c", "echo from node1 >/mnt/shared/letter"], check=True)
    assert (
        subprocess.run([*lab.build_enter_command("node2"), "cat", "/mnt/shared/letter"], check=True, capture_output=True).stdout
        == b"from node1\n"
    )
    assert (lab.shared_disk / "letter").read_text() == "from node1\n"
    (lab.shared_disk / "letter").unlink()


def test_a_killed_node_is_gone_and_comes_back_with_its_data(lab: Lab, engine: DockerEngine, start_server: Callable[[str], None]) -> None:
    own = DockerEngine(lab.get_docker_host("node2"))
    own.post("/volumes/create", {"Name": "kept"})
    before = list_process_tree(read_machine_pid(lab.name, "node2"))
    assert len(before) >= 3, "init, engine, containerd"
    start_server("node2")
    listener = start_script(lab, "node0", LISTENER_SCRIPT, "node2", PORT, 2)
    assert listener.stdout is not None
    assert listener.stdout.readline() == "connected\n"

    bridge = read_registry_mac(lab)
    lab.power_off_node("node2", report_progress=print_line)
    assert read_registry_mac(lab) == bridge, "the other nodes reach the registry without a new ARP request"
    assert [process for process in before if is_process_alive(process)] == []
    assert listener.communicate()[0] == "silence\n", "a machine without power tells no peer that it is gone"
    assert [(node.state, node.pid) for node in lab.get_status()][2] == ("dead", None)
    wait_until("node2 is down", lambda: list_node_states(engine)["node2"] == "down", 40)
    with pytest.raises(LabError, match="is not running"):
        lab.power_off_node("node2", report_progress=print_line)

    lab.power_on_node("node2", report_progress=print_line)
    assert list_node_states(engine)["node2"] == "ready"
    assert [volume["Name"] for volume in own.get("/volumes")["Volumes"]] == ["kept"]
    own.delete("/volumes/kept")
    with pytest.raises(LabError, match="is already running"):
        lab.power_on_node("node2", report_progress=print_line)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_swarm_survives_the_loss_of_its_manager(lab: Lab, engine: DockerEngine) -> None:
    lab.power_off_node("node0", report_progress=print_line)
    lab.power_on_node("node0", report_progress=print_line)
    wait_until("all are ready again", lambda: set(list_node_states(engine).values()) == {"ready"}, 40)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_cut_node_lives_alone(lab: Lab, engine: DockerEngine, start_server: Callable[[str], None]) -> None:
    start_server("node1")
    before = list_process_tree(read_machine_pid(lab.name, "node1"))
    assert measure_send_seconds(lab, "node0", "node1", 1) < 2
    lab.partition_node("node1", report_progress=print_line)
    try:
        with pytest.raises(subprocess.CalledProcessError):
            measure_send_seconds(lab, "node0", "node1", 1)
        assert [node.state for node in lab.get_status()] == ["up", "partitioned", "up"]
        wait_until("node1 is down", lambda: list_node_states(engine)["node1"] == "down", 40)
        assert [process for process in before if not is_process_alive(process)] == []
    finally:
        lab.reconnect_node("node1", report_progress=print_line)
    assert measure_send_seconds(lab, "node0", "node1", 1) < 2
    wait_until("node1 is ready again", lambda: list_node_states(engine)["node1"] == "ready", 40)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
@pytest.mark.parametrize(("source", "target"), [("node0", "node1"), ("node1", "node0")])
def test_a_slow_node_is_slow_in_both_directions(lab: Lab, start_server: Callable[[str], None], source: str, target: str) -> None:
    start_server(target)
    size = 5_000_000
    fast = measure_send_seconds(lab, source, target, size)
    lab.limit_node_bandwidth("node1", "20mbit", report_progress=print_line)
    try:
        assert lab.get_status()[1].link == "20mbit"
        slow = measure_send_seconds(lab, source, target, size)
    finally:
        lab.reconnect_node("node1", report_progress=print_line)
    assert 1.5 < slow < 6, "40 Mbit at 20 Mbit/s take 2 s"
    assert fast < slow / 4
    assert measure_send_seconds(lab, source, target, size) < slow / 4
    assert lab.get_status()[1].link == "up"


def test_an_unknown_node_is_refused_with_the_known_ones(lab: Lab) -> None:
    for fault in (lab.power_off_node, lab.power_on_node, lab.partition_node, lab.reconnect_node):
        with pytest.raises(LabError, match="node0, node1, node2"):
            fault("node7", report_progress=print_line)
    with pytest.raises(LabError, match="'fast' is not a valid rate"):
        lab.limit_node_bandwidth("node1", "fast", report_progress=print_line)


def test_up_next_to_a_live_lab_leaves_it_alone(lab: Lab) -> None:
    pids = [node.pid for node in lab.get_status()]
    said: list[str] = []
    Lab(lab.name).bring_up(3, components=LAB_PARTS, report_progress=said.append)
    assert said == [f"lab {lab.name}: 3 of its 3 engines run already (node0, node1, node2); left unchanged"]
    with pytest.raises(LabError, match="already up with other nodes: 3 of its 3 engines run"):
        Lab(lab.name).bring_up(2, components=LAB_PARTS, report_progress=print_line)
    assert [node.pid for node in lab.get_status()] == pids


def test_down_leaves_nothing_and_other_labs_alone(lab: Lab, create_lab: Callable[[str], Lab]) -> None:
    pids, links = [node.pid for node in lab.get_status()], list_interfaces()
    other = create_lab("gone")
    other.bring_up(2, report_progress=print_line)
    processes = set().union(*(list_process_tree(read_machine_pid(other.name, part)) for part in ("node0", "node1")))
    processes.add(psutil.Process(int((get_labs_folder() / other.name / "registry.pid").read_text().split()[0])))
    assert len(find_traces(other.name)) >= 6, "what is looked for can be found"
    other.tear_down(report_progress=print_line)
    assert find_traces(other.name) == []
    assert [process for process in processes if is_process_alive(process)] == []
    assert list_interfaces() == links
    assert [node.pid for node in lab.get_status()] == pids


def test_a_command_on_a_node_means_that_nodes_engine(lab: Lab) -> None:
    """It uses that node's engine, even if DOCKER_HOST of the calling shell names another; it exits with the command's exit code."""
    elsewhere = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0")}
    words = ["sh", "-c", "hostname && pwd && docker info --format {{.Name}} && ls /mnt/shared && exit 7"]
    argv = [sys.executable, "-m", "swarmtrain", "lab", "enter", "--name", lab.name, "node1", *words]
    done = subprocess.run(argv, cwd=ROOT, env=elsewhere, check=False, capture_output=True, text=True, timeout=30)
    assert (done.stdout.splitlines()[:3], done.returncode) == (["node1", str(ROOT), "node1"], 7), done.stderr


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_bare_lab_is_machines_that_nobody_has_set_up(create_lab: Callable[[str], Lab]) -> None:
    lab = create_lab("bare")
    said: list[str] = []
    lab.bring_up(2, bare=True, report_progress=said.append)
    assert said[-1] == f"  swarmtrain lab enter --name {lab.name} node0"
    assert [(node.state, node.role) for node in lab.get_status()] == [("up", "")] * 2
    first, second = (DockerEngine(lab.get_docker_host(node)) for node in ("node0", "node1"))
    assert [engine.get("/info")["Swarm"]["LocalNodeState"] for engine in (first, second)] == ["inactive"] * 2
    assert "registry.lab:5000" not in first.get("/info")["RegistryConfig"]["IndexConfigs"]
    lab.power_off_node("node1", report_progress=print_line)
    lab.power_on_node("node1", report_progress=print_line)
    assert [node.state for node in lab.get_status()] == ["up", "up"]
    with pytest.raises(LabError, match="already up as a bare lab"):
        lab.bring_up(2, report_progress=print_line)

    def typed(node: str, *command: str) -> str:
        argv = [*lab.build_enter_command(node), *command]
        return subprocess.run(argv, check=True, capture_output=True, text=True, env=lab.build_node_environment(node, os.environ)).stdout

    typed("node0", "docker", "swarm", "init", "--advertise-addr", "eth0")
    token = typed("node0", "docker", "swarm", "join-token", "--quiet", "worker").strip()
    typed("node1", "docker", "swarm", "join", "--advertise-addr", "eth0", "--token", token, "node0:2377")
    assert list_node_states(first) == {"node0": "ready", "node1": "ready"}
    lab.power_off_node("node1", report_progress=print_line)
    lab.power_on_node("node1", report_progress=print_line)
    wait_until("node1 is back in the swarm that was made by hand", lambda: list_node_states(first)["node1"] == "ready", 40)
    lab.tear_down(report_progress=print_line)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_a_lab_behind_ssh_and_with_a_slurm(create_lab: Callable[..., Lab]) -> None:
    """Reached with the variables that `lab env` prints. A machine that was powered off comes back with both services."""
    lab = create_lab("reached", ("ssh", "slurm"))
    lab.bring_up(2, components=("ssh", "slurm"), report_progress=print_line)
    assert [node.services for node in lab.get_status()] == [("sshd", "slurmctld", "slurmd"), ("sshd", "slurmd")]

    def typed(line: str) -> list[str]:
        """Return the sorted words that a command prints in a user's shell."""
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
        lab.power_off_node(node, report_progress=print_line)
        with pytest.raises(AssertionError, match=r"timed out|refused|No route"):
            typed(f"ssh -o ConnectTimeout=1 {node} hostname")
        lab.power_on_node(node, report_progress=print_line)
        assert both() == ["node0", "node1", "node1", "node1"]
    lab.partition_node("node1", report_progress=print_line)
    with pytest.raises(AssertionError, match=r"timed out|No route"):
        typed("ssh -o ConnectTimeout=1 node1 hostname")
    lab.reconnect_node("node1", report_progress=print_line)
    assert typed("ssh node1 ls /mnt/own") == ["mine"]
    with pytest.raises(LabError, match="already up with machines that have ssh, slurm"):
        lab.bring_up(2, report_progress=print_line)
    lab.tear_down(report_progress=print_line)
    assert find_traces(lab.name) == []


def test_what_machines_cannot_have_is_refused(create_lab: Callable[[str], Lab]) -> None:
    with pytest.raises(LabError, match="'slrum' is not a known component; available components: swarm, docker, ssh, slurm"):
        create_lab("wrong").bring_up(2, components=("ssh", "slrum"), report_progress=print_line)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_up_replaces_a_lab_whose_engines_are_dead(create_lab: Callable[[str], Lab]) -> None:
    lab = create_lab("dead")
    lab.bring_up(2, report_progress=print_line)
    (lab.shared_disk / "old").touch()
    for node in ("node0", "node1"):
        os.kill(read_machine_pid(lab.name, node), signal.SIGKILL)
    wait_until("both are dead", lambda: [node.state for node in lab.get_status()] == ["dead", "dead"], 5)
    said: list[str] = []
    lab.bring_up(1, report_progress=said.append)
    assert "all its engines are dead; removing the lab" in said[0]
    assert [node.state for node in lab.get_status()] == ["up"]
    assert list(lab.shared_disk.iterdir()) == []
    lab.tear_down(report_progress=print_line)


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
@pytest.mark.parametrize("seconds", [0.45, 0.7, 1.0])
def test_an_interrupted_up_removes_what_it_made(create_lab: Callable[[str], Lab], seconds: float) -> None:
    lab = create_lab("interrupted")
    command = start_lab_command("up", "--nodes", "3", "--name", lab.name)
    wait_until("it has begun", (get_labs_folder() / lab.name).exists, 10)
    time.sleep(seconds - 0.4)
    os.killpg(command.pid, signal.SIGINT)
    _, talk = command.communicate(timeout=30)
    assert command.returncode == 130, talk
    assert "removing the created objects" in talk
    assert find_traces(lab.name) == []


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_an_engine_that_dies_at_once_is_reported_with_its_output(create_lab: Callable[[str], Lab], tmp_path: Path) -> None:
    (tmp_path / "dockerd").write_text("#!/bin/sh\necho this engine has had enough\nexit 1\n")
    (tmp_path / "dockerd").chmod(0o755)
    lab = create_lab("broken")
    with pytest.raises(LabError, match="this engine has had enough"):
        lab.bring_up(2, engine_folder=tmp_path, report_progress=print_line)
    assert find_traces(lab.name) == []


@pytest.mark.test_all_only("waits for a swarm to notice, or for labs of its own; every other lab test uses what it shows")
def test_four_engines_are_up_in_seconds(create_lab: Callable[[str], Lab]) -> None:
    lab = create_lab("quick")
    began = time.monotonic()
    lab.bring_up(4, report_progress=print_line)
    took = time.monotonic() - began
    lab.tear_down(report_progress=print_line)
    print_line(f"four engines up and joined: {took:.1f} s")
    assert took < 15, "under 5 s on a machine that does nothing else"
