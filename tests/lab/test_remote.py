"""Remote managers: behind SSH, behind TLS in a docker context; and a machine that joins with the output of `join`."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import certificates
import pytest
from swarm_helpers import RUN, print_line

from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan

pytestmark = pytest.mark.test_all_only("starts sshd, TLS and machines that join")

ROOT = Path(__file__).parents[2]


def run_swarmtrain(
    lab: Lab, node: str, *arguments: str, env: dict[str, str] | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run swarmtrain on a machine of the lab."""
    enter_root = ["sh", "-c", 'cd "$0" && exec "$@"', str(ROOT)]
    argv = [*lab.build_enter_command(node), *enter_root, sys.executable, "-m", "swarmtrain", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_a_manager_behind_ssh(lab: Lab, tmp_path: Path) -> None:
    """The plan names the address, and the SSH tunnel is gone afterwards."""
    environ = {"DOCKER_HOST": "ssh://root@node0:22", "TMPDIR": str(tmp_path)}  # too long for the path of a socket
    before = set(Path("/tmp").glob("swarmtrain-ssh-*"))  # only read
    shown = run_swarmtrain(lab, "node1", "plan", "examples/quickstart.yml", env=environ).stdout
    assert shown.startswith("run quickstart by swarm on the swarm of 3 nodes at ssh://root@node0:22\n")
    assert set(Path("/tmp").glob("swarmtrain-ssh-*")) <= before  # as above
    refused = run_swarmtrain(
        lab, "node1", "plan", "examples/quickstart.yml", env={**environ, "DOCKER_HOST": "ssh://nobody@node0:22"}, code=1
    )
    assert "error: Docker engine at ssh://nobody@node0:22: " in refused.stderr
    assert "Permission denied" in refused.stderr


def test_a_shell_on_a_node_of_another_machine(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    """docker reaches the engine of the other machine over SSH."""
    launcher.deploy_run(plan_run(), print_line)
    environ = {"DOCKER_HOST": lab.get_docker_host("node0")}
    for node in ("node0", "node1"):
        argv = ["shell", RUN, "--node", node, "--", "sh", "-c", "echo on $SWARMTRAIN_NODE"]
        assert run_swarmtrain(lab, "node0", *argv, env=environ).stdout == f"on {node}\n"
    refused = run_swarmtrain(lab, "node0", "shell", RUN, "--rank", "0", env=environ, code=1)  # the stub forms no world
    assert "no world has formed, so its ranks have no nodes yet\nhint: use --node NODE" in refused.stderr


@contextmanager
def serve_tls(target: str, keys: Path) -> Iterator[int]:
    """Listen on a TLS port of this machine, and forward clients with a certificate of the authority in `keys` to the socket `target`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=keys / "ca.pem")
    context.load_cert_chain(keys / "server.pem", keys / "server-key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except ssl.SSLError:
                continue  # a client with a certificate of another authority
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(target.removeprefix("unix://"))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=copy_bytes, args=(source, sink), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def copy_bytes(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return


def test_a_manager_behind_tls_in_a_context(lab: Lab, tmp_path: Path) -> None:
    for folder in ("ours", "theirs"):
        certificates.create_authority(tmp_path / folder)
        certificates.sign_certificate(tmp_path / folder, cert="cert.pem", key="key.pem")
    certificates.sign_certificate(tmp_path / "ours", cert="server.pem", key="server-key.pem", address="127.0.0.1")
    environ = {**os.environ, "DOCKER_CONFIG": str(tmp_path / "docker"), "PYTHONPATH": str(ROOT)}
    environ.pop("DOCKER_HOST", None)
    with serve_tls(lab.get_docker_host("node0"), tmp_path / "ours") as port:
        for name, keys in (("good", "ours"), ("bad", "theirs")):
            files = ",".join(f"{each}={tmp_path}/{keys}/{each}.pem" for each in ("ca", "cert", "key"))
            made = ["docker", "context", "create", name, "--docker", f"host=tcp://127.0.0.1:{port},{files}"]
            subprocess.run(made, env=environ, check=True, capture_output=True)

        def plan(context: str) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, "-m", "swarmtrain", "plan", "examples/quickstart.yml"]
            done = {**environ, "DOCKER_CONTEXT": context}
            return subprocess.run(argv, cwd=ROOT, env=done, capture_output=True, text=True, check=False, timeout=60)

        good, bad = plan("good"), plan("bad")
    assert f"on the swarm of 3 nodes at tcp://127.0.0.1:{port} (context good)" in good.stdout, good.stderr
    assert bad.returncode == 1
    assert "certificate" in bad.stderr


def test_a_machine_joins_by_what_join_prints(create_lab: Callable[[str], Lab]) -> None:
    lab = create_lab("joining")
    lab.bring_up(2, bare=True, report_progress=print_line)
    first, second = lab.get_docker_host("node0"), lab.get_docker_host("node1")
    address = {node.node: node.address for node in lab.get_status()}
    init = ["docker", "-H", first, "swarm", "init", "--advertise-addr", address["node0"]]
    subprocess.run(init, check=True, capture_output=True)
    printed = run_swarmtrain(lab, "node0", "join", "examples/quickstart.yml", "-o", 'runner.swarm.labels={"pool": "a"}').stdout
    assert f"ufw allow proto udp from {address['node0']} to any port 7946,4789" in printed
    assert f"ufw allow proto tcp from ITS_ADDRESS to any port 2377  # on the managers: {address['node0']}" in printed
    commands = {words: line for line in printed.splitlines() for words in [" ".join(line.split()[:3])]}
    for words, engine in (("docker swarm join", second), ("docker node update", first)):
        line = commands[words].replace("ITS_ADDRESS", address["node1"]).replace("ITS_HOST_NAME", "node1")
        subprocess.run(["sh", "-ec", line], env={**os.environ, "DOCKER_HOST": engine}, check=True, capture_output=True)
    nodes = {item["Description"]["Hostname"]: item for item in DockerEngine(first).list_objects("/nodes")}
    assert nodes["node1"]["Spec"]["Labels"] == {"pool": "a"}
    values = json.loads(run_swarmtrain(lab, "node0", "join", "--manager", "--json").stdout)
    assert re.fullmatch("SWMTKN-1-[0-9a-z-]+", values["token"])
    assert values["token"] not in printed
    assert sorted(values["nodes"]) == sorted(address.values())
