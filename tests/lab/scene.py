"""A run on the lab to which something happens: start it, wait for a step, break something, see it end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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

# Runs inside a node's container and sends a signal to its first rank, or to torch's agent.
SIGNAL = """
import os, sys
from pathlib import Path
def named(word):
    found = sorted((int(path.parent.name), path.read_text()) for path in Path("/proc").glob("[0-9]*/comm"))
    return [pid for pid, name in found if name.split()[0] == word]
os.kill(named(sys.argv[1])[0], int(sys.argv[2]))
"""


class Scene:
    """One run, called `run`, in which the state is divided as `topology` says."""

    def __init__(self, lab: Lab, image: str, run: str, topology: tuple[str, ...]) -> None:
        self.lab, self.run = lab, run
        self._options = [*_SMALL, f"runner.docker_config.docker_container={image}", *topology]
        self._options += [f"trainer.save_dir=runs/{run}", f"logger.audit_dir=runs/{run}-audit"]
        self._deploy: subprocess.Popen[bytes] | None = None

    @property
    def save_dir(self) -> Path:
        """Where its checkpoints are, as this machine sees it."""
        return self.lab.shared / self.run

    @property
    def story(self) -> audit.Story:
        """What its ranks have written down so far."""
        return audit.read(self.lab.shared / f"{self.run}-audit")

    @property
    def step(self) -> int:
        """The highest step that any rank has made."""
        return max((line.step for line in self.story.lines), default=0)

    @property
    def token(self) -> int:
        """The newest world that has made a step."""
        return max(self.story.worlds, default=0)

    def begin(self, *more: str) -> None:
        """Deploy it, and follow it in the background."""
        options = [word for value in (*self._options, *more) for word in ("-o", value)]
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
        """Take it down, and remove what it wrote; nothing happens if that was done."""
        if self._deploy is None:
            return
        assert self.swarmtrain("down", self.run).wait(120) == 0
        self._deploy.wait(60)
        self._deploy = None
        for folder in self.lab.shared.glob(f"{self.run}*"):
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
