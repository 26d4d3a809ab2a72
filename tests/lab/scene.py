"""A run on the lab to which something happens: start it, wait for a step, break something, see it end."""

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

import audit

from swarmtrain.lab import Lab

ROOT = Path(__file__).parents[2]
NODES = ("node0", "node1", "node2")
STEPS = 200
SAVE_INTERVAL = 50
_SMALL = [
    f"trainer.train_iterations={STEPS}",
    f"trainer.save_interval={SAVE_INTERVAL}",
    "trainer.eval_interval=null",
    "trainer.eval_iterations=1",
    "transformer_architecture.hidden_size=64",
    "logger.log_interval=50",
]
_POLL = 0.1
# Seconds: an engine removes the containers of tasks that the swarm has forgotten when it hears of it.
_FORGOTTEN_WITHIN = 30.0

# Runs inside a node's container and sends a signal to its first rank, or to torch's agent.
SIGNAL = """
import os, sys
from pathlib import Path
def named(word):
    found = sorted((int(path.parent.name), path.read_text()) for path in Path("/proc").glob("[0-9]*/comm"))
    return [pid for pid, name in found if name.split()[0] == word]
os.kill(named(sys.argv[1])[0], int(sys.argv[2]))
"""


class _Pulse:
    """Watches the audit files in `folder`, to which ranks append a line at each step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = folder, threading.Event()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        last = 0.0
        while not self._ended.wait(_POLL):
            newest = max((path.stat().st_mtime for path in self._folder.glob("*.jsonl") if path.stat().st_size), default=0.0)
            if last:
                self.longest = max(self.longest, newest - last)
            last = newest


class Scene:
    """One run, called `run`, in which the state is divided as `topology` says; each node's save_dir is its own, or all share one.

    A node's own disk is a volume of its engine, in a folder that this machine sees. The ranks' audit files are in `audits`, which
    is not on the shared disk.
    """

    def __init__(self, lab: Lab, image: str, run: str, topology: tuple[str, ...], audits: Path, *, own_disks: bool) -> None:
        self.lab, self.run, self._audits = lab, run, audits
        self._disks = {node: lab.shared / f"{run}-{node}" for node in NODES} if own_disks else {}
        self._options = [*_SMALL, f"runner.docker_config.docker_container={image}", *topology]
        self._options += [f"trainer.save_dir=runs/{run}", f"logger.audit_dir=audit/{run}"]
        self._options += ["trainer.save_dir_shared=false"] if own_disks else []
        self._deploy: subprocess.Popen[bytes] | None = None
        self._pulse = _Pulse(self._audit)

    @property
    def _audit(self) -> Path:
        return self._audits / self.run

    @property
    def longest_pause(self) -> float:
        """Seconds of the longest time without a step, from the first step on."""
        return self._pulse.longest

    @property
    def save_dirs(self) -> list[Path]:
        """Where its checkpoints are, as this machine sees it."""
        return [disk / self.run for disk in self._disks.values() or (self.lab.shared,)]

    @property
    def _volume(self) -> str:
        """The name that the stack's volume `runs` has on an engine."""
        return f"{self.run}_runs"

    @property
    def story(self) -> audit.Story:
        """What its ranks have written down so far."""
        return audit.read(self._audit)

    @property
    def step(self) -> int:
        """The highest step that any rank has made."""
        return max((line.step for line in self.story.lines), default=0)

    @property
    def token(self) -> int:
        """The newest world that has made a step."""
        return max(self.story.worlds, default=0)

    def begin(self, *more: str) -> None:
        """Deploy it with `more` settings, and follow it in the background."""
        for node, disk in self._disks.items():
            disk.mkdir()
            disk.chmod(0o1777)
            there = f"/mnt/shared/{disk.name}"
            self.docker(node, "volume", "create", "-o", "type=none", "-o", "o=bind", "-o", f"device={there}", self._volume)
        source = "runs" if self._disks else "/mnt/shared"
        pairs = [(source, "/workspace/runs"), (str(self._audits), "/workspace/audit")]
        settings = (*self._options, f"runner.docker_config.docker_mounts={json.dumps(pairs)}", *more)
        options = [word for value in settings for word in ("-o", value)]
        self._deploy = self.swarmtrain("deploy", "examples/quickstart.yml", "--name", self.run, "--yes", *options)

    def swarmtrain(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a command that speaks to the lab's manager."""
        environ = {**os.environ, "DOCKER_HOST": self.lab.docker_host("node0")}
        return subprocess.Popen([sys.executable, "-m", "swarmtrain", *argv], cwd=ROOT, env=environ)

    def reach(self, step: int) -> None:
        """Return when `step` is made."""
        self.until(lambda: self.step >= step, f"step {step} is not made; the last was {self.step}")

    def until(self, true: Callable[[], bool], otherwise: str, seconds: float = 240) -> None:
        """Return when something is `true`."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{otherwise}, after {seconds:.0f} s"
            assert self._deploy is None or self._deploy.poll() is None, f"deploy has ended with {self._deploy.returncode}"
            time.sleep(_POLL)

    def end(self, seconds: float = 400) -> int:
        """Wait for the run to end by itself; return the exit code of the command that deployed it."""
        assert self._deploy
        return self._deploy.wait(seconds)

    def down(self) -> None:
        """Take it down, see that no container is left, and remove what it wrote; nothing happens if that was done."""
        if self._deploy is None:
            return
        assert self.swarmtrain("down", self.run).wait(120) == 0
        self._deploy.wait(60)
        self._deploy = None
        self._pulse.end()
        end, listed = time.monotonic() + _FORGOTTEN_WITHIN, ["ps", "-a", "--filter", f"name={self.run}_", "--format", "{{.Names}}"]
        while left := [name for node in NODES for name in self.docker(node, *listed).splitlines()]:
            assert time.monotonic() < end, f"these containers are left: {', '.join(left)}"
            time.sleep(0.5)
        for node in self._disks:
            self.docker(node, "volume", "rm", self._volume)
        for folder in (*self._audits.glob(self.run), *self.lab.shared.glob(f"{self.run}*")):
            shutil.rmtree(folder)

    def docker(self, node: str, *argv: str) -> str:
        """Return what docker prints on `node`."""
        command = ["docker", "-H", self.lab.docker_host(node), *argv]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def container(self, node: str, service: str | None = None) -> str:
        """Return the id of the container on `node` that runs its ranks, or that of another `service`."""
        found = self.docker(node, "ps", "-q", "--filter", f"name={self.run}_{service or node}.").split()
        assert len(found) == 1, f"{node} has {len(found)} containers of {service or node}"
        return found[0]

    def signal(self, node: str, what: str, number: int) -> None:
        """Send a signal to the first `rank` of a node, or to torch's `agent` there."""
        self.docker(node, "exec", self.container(node), "python3", "-c", SIGNAL, what, str(int(number)))

    def kill_containers(self, *nodes: str) -> None:
        """Kill these nodes' containers at once."""
        for node, container in [(node, self.container(node)) for node in nodes]:
            self.docker(node, "kill", "--signal", "KILL", container)
