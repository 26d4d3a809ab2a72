"""A training run on the lab for fault injection: start it, wait for a step, inject a fault, wait for the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import run_audit

from swarmtrain.lab import Lab

ROOT = Path(__file__).parents[2]
NODES = ("node0", "node1", "node2")
STEPS = 200
SAVE_INTERVAL = 50
_SMALL_OPTIONS = [
    f"trainer.train_iterations={STEPS}",
    f"trainer.save_interval={SAVE_INTERVAL}",
    "trainer.eval_interval=null",
    "trainer.eval_iterations=1",
    "transformer_architecture.hidden_size=64",
    "logger.log_interval=50",
]
_POLL_SECONDS = 0.1
# In seconds. An engine removes the containers of tasks that the swarm has forgotten only when the swarm notifies it.
_REMOVAL_TIMEOUT_SECONDS = 30.0

# Runs inside a node's container and sends a signal to its first rank, or to torch's agent.
SIGNAL_SCRIPT = """
import contextlib, os, sys
from pathlib import Path
def named(word):
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if path.read_text().split()[0] == word else []
    return sorted(found)
os.kill(named(sys.argv[1])[0], int(sys.argv[2]))
"""


class _PauseMonitor:
    """Measures the longest pause from the audit files in `folder`; ranks append a line to them at each step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stop_event = folder, threading.Event()
        self.longest_pause = 0.0
        self._thread = threading.Thread(target=self._watch_files, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop_event.set()
        self._thread.join()

    def _watch_files(self) -> None:
        last = 0.0
        while not self._stop_event.wait(_POLL_SECONDS):
            newest = max((path.stat().st_mtime for path in self._folder.glob("*.jsonl") if path.stat().st_size), default=0.0)
            if last:
                self.longest_pause = max(self.longest_pause, newest - last)
            last = newest


class ChaosRun:
    """A run named `name`, sharded as `topology` says. With `own_disks` each node has its own save_dir, otherwise all share one.

    A node's own disk is a volume of its engine, in a folder that this machine can read. The ranks' audit files are below `audit_root`,
    which is not on the shared disk.
    """

    def __init__(self, lab: Lab, image: str, name: str, topology: tuple[str, ...], audit_root: Path, *, own_disks: bool) -> None:
        self.lab, self.name, self._audit_root = lab, name, audit_root
        self._disks = {node: lab.shared_disk / f"{name}-{node}" for node in NODES} if own_disks else {}
        self._options = [*_SMALL_OPTIONS, f"runner.docker_config.docker_container={image}", *topology]
        self._options += [f"trainer.save_dir=runs/{name}", f"logger.audit_dir=audit/{name}"]
        self._options += ["trainer.save_dir_shared=false"] if own_disks else []
        self._deploy_process: subprocess.Popen[bytes] | None = None
        self._pause_monitor = _PauseMonitor(self._audit_dir)

    @property
    def _audit_dir(self) -> Path:
        return self._audit_root / self.name

    @property
    def longest_pause(self) -> float:
        """The longest time without a completed step, in seconds, counted from the first step."""
        return self._pause_monitor.longest_pause

    @property
    def save_dirs(self) -> list[Path]:
        """The run's checkpoint folders, as paths on this machine."""
        return [disk / self.name for disk in self._disks.values() or (self.lab.shared_disk,)]

    @property
    def _volume_name(self) -> str:
        """The name of the stack's volume `runs` on an engine."""
        return f"{self.name}_runs"

    @property
    def audit(self) -> run_audit.RunAudit:
        """What the run's ranks have written to their audit files so far."""
        return run_audit.read_audit(self._audit_dir)

    @property
    def step(self) -> int:
        """The highest step that any rank has completed."""
        return max((line.step for line in self.audit.lines), default=0)

    @property
    def generation(self) -> int:
        """The generation of the newest world that has completed a step."""
        return max(self.audit.worlds, default=0)

    def start(self, *extra_settings: str) -> None:
        """Deploy the run with `extra_settings`, and follow it in the background."""
        for node, disk in self._disks.items():
            disk.mkdir()
            disk.chmod(0o1777)
            device = f"/mnt/shared/{disk.name}"
            self.run_docker(node, "volume", "create", "-o", "type=none", "-o", "o=bind", "-o", f"device={device}", self._volume_name)
        source = "runs" if self._disks else "/mnt/shared"
        pairs = [(source, "/workspace/runs"), (str(self._audit_root), "/workspace/audit")]
        settings = (*self._options, f"runner.docker_config.docker_mounts={json.dumps(pairs)}", *extra_settings)
        options = [word for value in settings for word in ("-o", value)]
        self._deploy_process = self.start_command("deploy", "examples/quickstart.yml", "--name", self.name, "--yes", *options)

    def start_command(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a swarmtrain command that connects to the lab's manager."""
        environ = {**os.environ, "DOCKER_HOST": self.lab.get_docker_host("node0")}
        return subprocess.Popen([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT, env=environ)

    def wait_for_step(self, step: int) -> None:
        """Wait until `step` is completed."""
        self.wait_until(lambda: self.step >= step, f"step {step} is not made; the last was {self.step}")

    def wait_until(self, condition: Callable[[], bool], message: str, seconds: float = 240) -> None:
        """Wait until `condition` is true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{message}, after {seconds:.0f} s"
            assert self._deploy_process is None or self._deploy_process.poll() is None, (
                f"deploy has ended with {self._deploy_process.returncode}"
            )
            time.sleep(_POLL_SECONDS)

    def wait_for_end(self, seconds: float = 400) -> int:
        """Wait for the run to end by itself; return the exit code of the command that deployed it."""
        assert self._deploy_process
        return self._deploy_process.wait(seconds)

    def read_diagnosis(self) -> str:
        """Return what `swarmtrain why` prints."""
        environ = {**os.environ, "DOCKER_HOST": self.lab.get_docker_host("node0")}
        command = [sys.executable, "-m", "swarmtrain", "why", self.name]
        return subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True, text=True).stdout

    def take_down(self) -> None:
        """Take the run down, check that no container is left, and remove what it wrote. Do nothing if that is already done."""
        if self._deploy_process is None:
            return
        assert self.start_command("down", self.name).wait(120) == 0
        self._deploy_process.wait(60)
        self._deploy_process = None
        self._pause_monitor.stop()
        end, listed = time.monotonic() + _REMOVAL_TIMEOUT_SECONDS, ["ps", "-a", "--filter", f"name={self.name}_", "--format", "{{.Names}}"]
        while left := [name for node in NODES for name in self.run_docker(node, *listed).splitlines()]:
            assert time.monotonic() < end, f"these containers are left: {', '.join(left)}"
            time.sleep(0.5)
        for node in self._disks:
            self.run_docker(node, "volume", "rm", self._volume_name)
        for folder in (*self._audit_root.glob(self.name), *self.lab.shared_disk.glob(f"{self.name}*")):
            shutil.rmtree(folder)

    def run_docker(self, node: str, *argv: str) -> str:
        """Return the output of a docker command on the engine of `node`."""
        command = ["docker", "-H", self.lab.get_docker_host(node), *argv]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def find_container(self, node: str, service: str | None = None) -> str:
        """Return the id of the container on `node` that runs its ranks, or the id of another `service`'s container."""
        found = self.run_docker(node, "ps", "-q", "--filter", f"name={self.name}_{service or node}.").split()
        assert len(found) == 1, f"{node} has {len(found)} containers of {service or node}"
        return found[0]

    def send_signal(self, node: str, process: str, signum: int) -> None:
        """Send a signal to a node's first rank or to its torch agent: `process` is "rank" or "agent"."""
        self.run_docker(node, "exec", self.find_container(node), "python3", "-c", SIGNAL_SCRIPT, process, str(int(signum)))

    def kill_containers(self, *nodes: str) -> None:
        """Kill the containers of these nodes at the same time."""
        for node, container in [(node, self.find_container(node)) for node in nodes]:
            self.run_docker(node, "kill", "--signal", "KILL", container)
