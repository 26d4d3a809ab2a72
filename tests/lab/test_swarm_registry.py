"""The registry in the swarm: it starts, keeps its images, and refuses pushes without its login and requests that delete images."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import print_line
from swarm_helpers import NODES, RUN, run_docker

from swarmtrain.errors import ImageError, SwarmtrainError
from swarmtrain.images import swarm_nodes, swarm_registry
from swarmtrain.images.registry_access import RegistryAccess
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.base import QUEUED_STATE
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.launchers.swarm.queue.submission import SCHEDULER_SERVICE
from swarmtrain.planning.plan import Plan
from swarmtrain.queueing import queue_service

pytestmark = pytest.mark.test_all_only("builds images and starts registries")

REGISTRY_CONFIG = """
version: "0.1"
storage: {filesystem: {rootdirectory: /var/lib/registry}}
http: {addr: ":5000"}
"""
PORT = 5055
OPEN = RegistryAccess()
# Sends the request in argv with the login in its standard input, and prints the HTTP status.
SEND_REQUEST = """
import base64, sys, urllib.error, urllib.request
login = base64.b64encode(sys.stdin.read().encode()).decode()
headers = {"Authorization": f"Basic {login}", "Accept": "application/vnd.docker.distribution.manifest.v2+json"}
try:
    print(urllib.request.urlopen(urllib.request.Request(sys.argv[2], method=sys.argv[1], headers=headers)).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


@pytest.fixture(scope="module")
def registry_image(engine: DockerEngine, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of a registry, on the manager only: Docker Hub is not reachable."""
    folder = tmp_path_factory.mktemp("registry")
    shutil.copy(shutil.which("docker-registry") or "/usr/bin/docker-registry", folder / "registry")
    (folder / "config.yml").write_text(REGISTRY_CONFIG)
    (folder / "Dockerfile").write_text(f'FROM {base_image}\nCOPY * /srv/\nENTRYPOINT ["/srv/registry", "serve", "/srv/config.yml"]\n')
    for _ in engine.client.build(path=str(folder), tag="registry-by-hand:1", rm=True, decode=True):
        pass
    return "registry-by-hand:1"


@pytest.fixture(autouse=True)
def no_registry(engine: DockerEngine) -> Iterator[None]:
    """Remove the registry, if a test leaves one."""
    yield
    with contextlib.suppress(ImageError):  # there is none
        swarm_registry.remove_registry(engine, remove_images=True, report_progress=print_line)


@pytest.fixture
def registry_address(lab: Lab, engine: DockerEngine) -> Iterator[str]:
    """The address that the registry will have, which all engines trust."""
    address = swarm_registry.get_registry_address(engine, node=None, port=PORT)
    for node in NODES:
        write_insecure_registries(lab, node, REGISTRY_ADDRESS, address)
    yield address
    for node in NODES:
        write_insecure_registries(lab, node, REGISTRY_ADDRESS)


def write_insecure_registries(lab: Lab, node: str, *addresses: str) -> None:
    """Change daemon.json of the node, and have its engine read the file again."""
    file = "/etc/docker/daemon.json"
    settings = json.loads(subprocess.run([*lab.build_enter_command(node), "cat", file], check=True, capture_output=True).stdout)
    text = json.dumps({**settings, "insecure-registries": list(addresses)})
    argv = [*lab.build_enter_command(node), "sh", "-ec", f"cat >{file}; kill -HUP $(cat /run/docker.pid)"]
    subprocess.run(argv, input=text.encode(), check=True)


def test_a_registry_in_the_swarm_keeps_its_images(engine: DockerEngine, registry_image: str) -> None:
    def start(port: int, node: str | None = None) -> swarm_registry.RegistryStatus:
        return swarm_registry.start_registry(engine, node=node, port=port, image=registry_image, access=OPEN, report_progress=print_line)

    standing = start(PORT)
    address = swarm_nodes.get_node_address(engine.get(f"/nodes/{swarm_nodes.get_engine_node_id(engine)}"))
    assert (standing.address, standing.host, standing.state) == (f"{address}:5055", "node0", "running")
    # The lab's engines trust the lab's own registry, but are not configured for this one.
    assert standing.trust_problem == "it is not listed in the engine's insecure-registries"
    assert standing.daemon_json_line == f'"insecure-registries": ["{address}:5055", "{REGISTRY_ADDRESS}"]'
    assert "it requires no login: anyone who reaches it can replace images" in str(standing)
    assert start(PORT) == standing
    with pytest.raises(ImageError, match="the registry is already running"):
        start(PORT + 1)
    with pytest.raises(ImageError, match="unknown node; available nodes: node0, node1, node2"):
        start(PORT, "node9")
    swarm_registry.remove_registry(engine, remove_images=False, report_progress=print_line)
    assert engine.get(f"/volumes/{swarm_registry.SERVICE_NAME}")["Name"] == swarm_registry.SERVICE_NAME
    start(PORT)
    swarm_registry.remove_registry(engine, remove_images=True, report_progress=print_line)
    assert swarm_registry.SERVICE_NAME not in [volume["Name"] for volume in engine.get("/volumes")["Volumes"] or []]
    with pytest.raises(ImageError, match="no registry in this swarm"):
        swarm_registry.get_registry_status(engine)


def test_a_registry_that_cannot_start_prints_why_and_is_removed(engine: DockerEngine, lab: Lab, registry_image: str) -> None:
    listen = "import socket, sys; there = socket.create_server(('', 5055)); print(flush=True); sys.stdin.read()"
    argv = [*lab.build_enter_command("node0", start_folder=Path.cwd()), "python3", "-c", listen]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "\n"
        with pytest.raises(ImageError, match="another process uses port 5055 of node0") as caught:
            swarm_registry.start_registry(engine, port=PORT, image=registry_image, access=OPEN, report_progress=print_line)
        listener.communicate()
    assert caught.value.hint == "swarmtrain image registry up --port 5056"
    with pytest.raises(ImageError, match=r"does not start on node1: No such image") as caught:
        swarm_registry.start_registry(engine, node="node1", image=registry_image, access=OPEN, report_progress=print_line)
    assert "--image" in str(caught.value.hint)
    with pytest.raises(ImageError, match="no registry in this swarm"):
        swarm_registry.remove_registry(engine, remove_images=False, report_progress=print_line)


def test_a_registry_that_listens_on_another_port_is_removed(engine: DockerEngine, registry_image: str, tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(REGISTRY_CONFIG.replace(":5000", ":5001"))
    (tmp_path / "Dockerfile").write_text(f"FROM {registry_image}\nCOPY config.yml /srv/\n")
    for _ in engine.client.build(path=str(tmp_path), tag="registry-by-hand:2", rm=True, decode=True):
        pass
    with pytest.raises(ImageError, match=r"its container runs on node0, but accepts no connections to \S+:5055 after 15 s"):
        swarm_registry.start_registry(engine, port=PORT, image="registry-by-hand:2", access=OPEN, report_progress=print_line)
    with pytest.raises(ImageError, match="no registry in this swarm"):
        swarm_registry.get_registry_status(engine)


class RegistryUser:
    """A user on this machine, with a home folder of their own, who runs commands on the lab's manager."""

    def __init__(self, lab: Lab, home: Path, registry_image: str) -> None:
        self.lab, self.home, self.registry_image = lab, home, registry_image
        self.docker_config = home / "docker"
        self.environment = {"DOCKER_HOST": lab.get_docker_host("node0"), "DOCKER_CONFIG": str(self.docker_config)}
        self.environment["XDG_STATE_HOME"] = str(home / "state")

    def run_command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "swarmtrain", "image", *arguments]
        return subprocess.run(argv, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False)

    def start_registry(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.run_command("registry", "up", "--port", str(PORT), "--image", self.registry_image, *options)

    def find_password_file(self) -> Path:
        [file] = (self.home / "state" / "swarmtrain" / ".registry").iterdir()
        return file

    def delete_image(self, address: str, repository: str, digest: str) -> int:
        """Send the request that deletes an image, with the login, from the manager; return the HTTP status."""
        argv = [*self.lab.build_enter_command("node0"), "python3", "-c", SEND_REQUEST]
        argv += ["DELETE", f"http://{address}/v2/{repository}/manifests/{digest}"]
        login = f"swarmtrain:{self.find_password_file().read_text().strip()}"
        return int(subprocess.run(argv, input=login, capture_output=True, text=True, check=True).stdout)


def test_a_registry_requires_its_login_and_refuses_deletes(
    *,
    lab: Lab,
    engine: DockerEngine,
    registry_image: str,
    registry_address: str,
    stub_image: str,
    launcher: SwarmLauncher,
    plan_run: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, other = RegistryUser(lab, tmp_path / "owner", registry_image), RegistryUser(lab, tmp_path / "other", registry_image)
    done = owner.start_registry()
    assert (done.returncode, done.stdout) == (0, f"{registry_address}\n"), done.stderr
    assert "this engine can use the registry" in done.stderr
    assert [stat.S_IMODE(file.stat().st_mode) for file in (owner.find_password_file(), owner.docker_config / "config.json")] == [0o600] * 2
    assert owner.find_password_file().read_text().strip() not in done.stderr + str(engine.list_objects("/services"))

    image = f"{registry_address}/stand-in:1"
    engine.client.tag(stub_image, image.rpartition(":")[0], "1")
    refused = other.run_command("push", image)
    assert refused.returncode == 1
    assert "no basic auth credentials" in refused.stderr
    pushed = owner.run_command("push", image)
    assert pushed.returncode == 0, pushed.stderr
    assert f"docker login {registry_address}" in other.run_command("registry", "status").stdout

    monkeypatch.setenv("DOCKER_CONFIG", str(other.docker_config))
    with pytest.raises(SwarmtrainError, match="no basic auth credentials"):
        SwarmLauncher(lab.get_docker_host("node0")).deploy_run(plan_run(nodes=3, image=image), print_line)
    monkeypatch.setenv("DOCKER_CONFIG", str(owner.docker_config))
    SwarmLauncher(lab.get_docker_host("node0")).deploy_run(plan_run(nodes=3, image=image), print_line)
    assert [task.state for task in launcher.list_tasks(RUN)] == ["running"] * 4
    for node in ("node1", "node2"):
        assert image.partition(":1")[0] in run_docker(lab, "image", "ls", "--digests", node=node)
    launcher.tear_down_run(RUN, print_line)

    digest = pushed.stdout.strip().partition("@")[2]
    assert owner.delete_image(registry_address, "stand-in", digest) == 405
    assert owner.start_registry("--allow-deletes", "--yes").returncode == 0
    assert owner.delete_image(registry_address, "stand-in", digest) == 202


def test_a_queued_run_pulls_with_the_login_of_a_person_whose_home_is_gone(
    *,
    lab: Lab,
    engine: DockerEngine,
    image: str,
    registry_image: str,
    registry_address: str,
    stub_image: str,
    launcher: SwarmLauncher,
    plan_run: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Swarm keeps the login with the services, so the scheduler needs none. It does not run before the home has been deleted."""
    owner = RegistryUser(lab, tmp_path / "owner", registry_image)
    assert owner.start_registry().returncode == 0
    queued_image = f"{registry_address}/queued:1"
    engine.client.tag(stub_image, queued_image.rpartition(":")[0], "1")
    assert owner.run_command("push", queued_image).returncode == 0
    queue_service.start_scheduler(engine, image, print_line)
    try:
        run_docker(lab, "service", "scale", "--detach", f"{SCHEDULER_SERVICE}=0")
        with monkeypatch.context() as patch:
            patch.setenv("DOCKER_CONFIG", str(owner.docker_config))
            SwarmLauncher(lab.get_docker_host("node0")).deploy_run(plan_run(nodes=3, image=queued_image), print_line)
        shutil.rmtree(owner.home)
        assert {task.state for task in launcher.list_tasks(RUN)} == {QUEUED_STATE}
        run_docker(lab, "service", "scale", "--detach", f"{SCHEDULER_SERVICE}=1")
        deadline = time.monotonic() + 90
        while [task.state for task in launcher.list_tasks(RUN)] != ["running"] * 4:
            assert time.monotonic() < deadline, launcher.list_tasks(RUN)
            time.sleep(0.5)
        service = engine.list_objects("/services", name=SCHEDULER_SERVICE)[0]
        assert not service["Spec"]["TaskTemplate"]["ContainerSpec"].get("Secrets"), "the scheduler has no secret"
        launcher.tear_down_run(RUN, print_line)
    finally:
        queue_service.remove_scheduler(engine, print_line)


def test_up_changes_a_running_registry_only_when_confirmed(lab: Lab, engine: DockerEngine, registry_image: str, tmp_path: Path) -> None:
    user = RegistryUser(lab, tmp_path, registry_image)
    assert user.start_registry("--no-login", "--allow-deletes").returncode == 0
    before = swarm_registry.get_registry_status(engine)
    asked = user.start_registry()
    assert asked.returncode == 2
    assert "  login: none → user swarmtrain\n  requests that delete images: allowed → refused\n" in asked.stderr
    assert "hint: add --yes to confirm" in asked.stderr
    assert swarm_registry.get_registry_status(engine) == before
    assert (before.user, before.allows_deletes) == ("", True)

    (tmp_path / "password").write_text("first\n")
    assert user.start_registry("--password-file", str(tmp_path / "password"), "--yes").returncode == 0
    status = swarm_registry.get_registry_status(engine)
    assert (status.user, status.allows_deletes) == ("swarmtrain", False)
    for options in ((), ("--password-file", str(tmp_path / "password"))):  # the same password, whose salt is kept
        assert "it is already running" in user.start_registry(*options).stderr
    (tmp_path / "password").write_text("second\n")
    asked = user.start_registry("--password-file", str(tmp_path / "password"))
    assert "login: another password for user swarmtrain" in asked.stderr
    assert len(run_docker(lab, "secret", "ls", "-q", "--filter", "label=swarmtrain.registry.htpasswd").split()) == 1
    assert user.run_command("registry", "down").returncode == 0
    assert run_docker(lab, "secret", "ls", "-q", "--filter", "label=swarmtrain.registry.htpasswd") == ""
