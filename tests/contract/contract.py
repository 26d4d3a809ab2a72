"""The contract of all launchers, told as the life of a run: each test is a feature, and what it asserts is what a command answers.

A launcher has a Place, where all is real, and a class that inherits Contract. The tests run in the order of this text, since one run
lives through most of them; one that fails leaves the run to the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from features import IN_A_CONTAINER, LAUNCHERS, NODE_DIES, SCALE_DOWN, SCALE_UP, feature
from interrupt import ROOT, at_line
from processes import below

from swarmtrain import process
from swarmtrain.lab import Lab

HERE = Path(__file__).parent
CONFIG = HERE / "contract.yml"
RUN = "life"
_HUSH = "hush-7f1c"
_PATIENCE = 90.0
_START = re.compile(r" starts at (\d+), ")


class Place:
    """Where a launcher brings runs to, and the folder from which it is asked."""

    kind: str
    missing: tuple[str, ...] = ("-o", "runner.hosts=[node0, nowhere]")
    """Options with which there can be no run."""

    def __init__(self, folder: Path) -> None:
        self.home, self.project = folder / "home", folder / "project"
        self.shared = self.project / "shared"
        """What all ranks see as the folder `shared`."""
        self.env = {"XDG_STATE_HOME": str(self.home), "PYTHONPATH": str(ROOT), "DOCKER_HOST": f"unix://{folder}/no.sock"}
        self.env_missing: dict[str, str] = {}
        """The same as variables."""
        self.project.mkdir(parents=True)
        shutil.copy(HERE / "train.py", self.project)
        shutil.copy(HERE / "fail.py", self.project)
        (self.project / "token").write_text(_HUSH)
        (self.project / "contract.yml").write_bytes(
            CONFIG.read_bytes().replace(b"runner_type: swarm", b"runner_type: " + self.kind.encode())
        )
        self.shared.mkdir()

    def left(self) -> list[str]:
        """Return all that there is of any run: processes, containers, the files of a run that is there."""
        commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in below(self.home)]
        return [*commands, *self.files(self.home)]

    def check_nothing_left(self) -> None:
        """Fail unless nothing is left of any run; the process that served a command on a host may still be exiting."""
        end = time.monotonic() + _PATIENCE
        while left := self.left():
            assert time.monotonic() < end, f"left after {_PATIENCE:g} s: {left}"
            time.sleep(0.2)

    @staticmethod
    def files(state: Path) -> list[str]:
        """Return the files below a state directory that a run has only as long as it is there."""
        return [str(path) for path in state.rglob("*") if path.is_file() and (path.name in ("TOKEN", "train.py") or path.suffix == ".spec")]

    def in_container(self, node: str) -> bool:
        """Say whether the ranks of a node of RUN are in a container."""
        return False

    def kill_node(self, node: str) -> None:
        """Kill the process of RUN that is the parent of a node's ranks, or the node's container."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                ours = {f"SWARMTRAIN_NODE={node}".encode(), f"SWARMTRAIN_RUN={RUN}".encode()} <= set(environ)
                if ours and b"-m\0swarmtrain.entrypoint\0node\0" in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
        raise AssertionError(f"nothing runs as {node}")

    def kill_machine(self, node: str) -> None:
        """End the machine of a node at once, with all that is on it."""
        raise NotImplementedError

    def mend(self) -> None:
        """Start the machines that were ended."""

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """Start `swarmtrain ARGV` in the project."""
        return subprocess.Popen(
            [sys.executable, "-m", "swarmtrain", *argv], cwd=self.project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        )  # fmt: skip

    def __call__(self, *argv: str, code: int = 0) -> str:
        """Run `swarmtrain ARGV` in the project, see it end with `code`, and return what it printed: stdout, or stderr if it fails."""
        process = self.start(*argv)
        with _ended(process):
            out, err = process.communicate(timeout=_PATIENCE)
        assert process.returncode == code, f"{argv} ended with {process.returncode}\n{out}{err}"
        assert "Traceback" not in err
        return err if code else out

    def deploy(self, *argv: str, code: int = 0) -> str:
        """Deploy the one config."""
        return self("deploy", "contract.yml", *argv, code=code)

    def status(self, run: str = RUN) -> dict[str, Any]:
        """Return what `status --json` says."""
        answer: dict[str, Any] = json.loads(self("status", run, "--json"))
        return answer

    def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the status of RUN when something is `true` of it."""
        end = time.monotonic() + _PATIENCE
        while not true(status := self.status()):
            assert time.monotonic() < end, f"{json.dumps(status, indent=1)}\n{self('logs', RUN)}"
            time.sleep(0.2)
        return status

    def training(self, nodes: int, worlds: int = 1) -> dict[str, Any]:
        """Return the status when world number `worlds` or a later one trains on `nodes` nodes."""

        def trains(status: dict[str, Any]) -> bool:
            of = status["worlds"]
            return len(of) >= worlds and status["world"]["nodes"] == nodes and status["progress"].get("time", 0.0) > of[-1]["time"]

        return self.until(trains)


class LabPlace(Place):
    """A place whose machines are those of a lab."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder)
        self.lab = lab
        self.env |= lab.env()

    def kill_machine(self, node: str) -> None:
        self.lab.kill(node, say=print)

    def mend(self) -> None:
        for node in self.lab.status():
            if node.state == "dead":
                self.lab.start(node.node, say=print)

    def docker(self, node: str, *argv: str) -> list[str]:
        """Run a command of the node's own engine, and return the lines that it prints."""
        return process.run(["docker", "-H", self.lab.docker_host(node), *argv]).splitlines()


@contextlib.contextmanager
def entered(place: Place) -> Iterator[Place]:
    """Make a place that of all commands; what is left of it afterwards is killed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        for name, value in place.env.items():
            patch.setenv(name, value)
        yield place
    for pid in below(place.home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Contract:
    """What every launcher keeps. `place` is given by the class that inherits this."""

    kind: str

    def can(self, what: str) -> bool:
        """Say whether the table says yes."""
        return what not in LAUNCHERS[self.kind]

    @pytest.fixture(scope="class")
    @classmethod
    def life(cls, place: Place) -> Iterator[Place]:
        """The place, with the run that most of the tests are about. A node that comes late finds the other training already."""
        place.deploy("--name", RUN, "--detach")
        place.training(2)
        yield place
        place.mend()
        if RUN in place.start("status", RUN).communicate(timeout=_PATIENCE)[0]:
            place("down", RUN)

    @pytest.fixture(scope="class")
    @classmethod
    def follower(cls, life: Place) -> Iterator[subprocess.Popen[str]]:
        """A `deploy` that follows the run, in which it changes nothing."""
        process = life.start("deploy", "contract.yml", "--name", RUN, "--yes")
        assert process.stderr
        with _ended(process):
            assert any("Ctrl-C detaches" in line for line in process.stderr)
            yield process

    @feature("The same config file, with `runner_type` changed and nothing else")
    def test_the_config_is_the_same(self, place: Place) -> None:
        ours, one = ((folder / "contract.yml").read_bytes().split(b"\n") for folder in (place.project, HERE))
        different = [pair for pair in zip(ours, one, strict=True) if pair[0] != pair[1]]
        assert different == ([] if self.kind == "swarm" else [(f"  runner_type: {self.kind}".encode(), b"  runner_type: swarm")])
        assert json.loads(place("plan", "contract.yml", "--json"))["up"] is False

    @feature("`plan` says who would run what, and changes nothing")
    def test_a_plan_changes_nothing(self, place: Place) -> None:
        plan = json.loads(place("plan", "contract.yml", "--json"))
        assert [(node["name"], node["slots"]) for node in plan["nodes"]] == [("node0", 1), ("node1", 1)]
        place.check_nothing_left()

    @feature("What is missing is told before anything starts, with exit code 1", gate=False)
    def test_what_is_missing_is_told(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            for name, value in place.env_missing.items():
                patch.setenv(name, value)
            told = place.deploy("--name", "never", *place.missing, code=1)
        assert "error: " in told
        assert "hint: " in told
        place("status", "never", code=1)
        place.check_nothing_left()

    @feature("Ctrl-C while a run comes up leaves nothing, or what it says", gate=False)
    def test_interrupted(self, place: Place) -> None:
        ended = at_line("bringing", "deploy", "contract.yml", "--name", "brief", cwd=place.project)
        assert (ended.code, "Traceback" in ended.err) == (130, False), ended.err
        if "nothing of it is left" not in ended.err:
            assert "swarmtrain down brief removes it" in ended.err or "detached; brief goes on" in ended.err, ended.err
            place("down", "brief")
        place("status", "brief", code=1)
        place.check_nothing_left()

    @feature("A rank that fails ends the run: `deploy` says why, and its exit code is 3; the rank's own is in `status`", gate=False)
    def test_a_rank_fails(self, place: Place) -> None:
        try:
            told = place.deploy("--name", "bad", "-o", "runner.script=fail.py", "-o", "runner.max_restarts=0", code=3)
            assert re.search(r"failed with exit code 7: node\d rank 1", told), told
            assert "no such thing" in place("why", "bad")
            status = place.status("bad")
            assert (status["state"], status["exit_code"]) == ("failed", 7)
        finally:
            place("down", "bad")
        place.check_nothing_left()

    @feature("`deploy --detach` returns when the run is up, and it goes on")
    def test_detached(self, life: Place) -> None:
        step = life.status()["progress"]["step"]
        life.until(lambda status: status["progress"]["step"] > step)

    @feature("A run that is not there is said to be, with exit code 1", gate=False)
    def test_no_such_run(self, life: Place) -> None:
        for command in (["status"], ["logs"], ["scale", "--nodes", "2"], ["stop"], ["down"]):
            told = life(command[0], "never", *command[1:], code=1)
            assert told.startswith("error: run never: there is no run of this name; there is: life")

    @feature("`plan` says what a deploy would change in a run that is up", gate=False)
    def test_a_plan_of_what_is_up(self, life: Place) -> None:
        assert json.loads(life("plan", "contract.yml", "--name", RUN, "--json"))["changes"] == []
        worlds = life.status()["worlds"]
        changed = json.loads(life("plan", "contract.yml", "--name", RUN, "-o", "runner.env.MORE=yes, indeed", "--json"))
        assert changed["up"]
        assert changed["changes"]
        assert life.status()["worlds"] == worlds

    @feature("A deploy that restarts what runs is asked about, and refused where nobody can be", gate=False)
    def test_a_restart_is_asked_about(self, life: Place) -> None:
        assert "this would restart" in life.deploy("--name", RUN, "-o", "runner.env.MORE=yes, indeed", code=1)

    @feature("`status` says how each node stands, the world and the step")
    def test_status(self, life: Place) -> None:
        status = life.status()
        assert (status["run"], status["state"], status["world"]["world_size"]) == (RUN, "training", 2)
        assert {task["node"]: task["state"] for task in status["tasks"]} == dict.fromkeys(("node0", "node1", "rendezvous"), "running")
        assert [task["host"] for task in status["tasks"]][:2] == ["node0", "node1"]
        assert "run life: training" in life("status", RUN)

    @feature("`logs` has the lines of all ranks as one stream, each with its node and rank")
    def test_logs(self, life: Place) -> None:
        lines = life("logs", RUN).splitlines()
        for rank in (0, 1):
            assert [line for line in lines if f" rank {rank} | rank {rank} of 2 starts at " in line and line.startswith("node")]
        assert {line.split(" | ")[0].split()[-1] for line in life("logs", RUN, "--rank", "1").splitlines()} == {"1"}

    @feature("A secret reaches the ranks as a file")
    def test_secrets(self, life: Place) -> None:
        assert len([line for line in life("logs", RUN).splitlines() if line.endswith(f"its secret has {len(_HUSH)} characters")]) >= 2

    @feature(IN_A_CONTAINER)
    def test_in_a_container(self, life: Place) -> None:
        assert life.in_container("node1") == self.can(IN_A_CONTAINER)

    @feature("Ctrl-C detaches who follows, and the run goes on", gate=False)
    def test_detaching(self, life: Place) -> None:
        worlds = life.status()["worlds"]
        ended = at_line("Ctrl-C detaches", "deploy", "contract.yml", "--name", RUN, cwd=life.project)
        assert (ended.code, f"detached; {RUN} goes on" in ended.err) == (130, True), ended.err
        assert life.training(2)["worlds"] == worlds

    @feature("A node's process that is killed is started again, and the run goes on", gate=False)
    def test_a_node_is_killed(self, life: Place) -> None:
        worlds = len(life.status()["worlds"])
        life.kill_node("node1")
        assert life.training(2, worlds + 1)["state"] == "training"

    @feature("`stop` lets the ranks save; a deploy goes on where they were")
    def test_stop_and_go_on(self, life: Place) -> None:
        worlds = len(life.status()["worlds"])
        life("stop", RUN)
        assert life.status()["state"] == "stopped"
        saved = int((life.shared / f"{RUN}.state").read_text())
        assert saved > 0
        life.deploy("--name", RUN, "--detach")
        life.training(2, worlds + 1)
        life.until(lambda _: f" starts at {saved}, " in life("logs", RUN))
        starts = [int(each) for each in _START.findall(life("logs", RUN))]
        assert min(starts[starts.index(saved) :]) == saved

    @feature(SCALE_DOWN, gate=False)
    def test_scale_down(self, life: Place) -> None:
        self._scale(life, 1, alone=self.can(SCALE_DOWN))

    @feature(SCALE_UP, gate=False)
    def test_scale_up(self, life: Place) -> None:
        self._scale(life, 2, alone=self.can(SCALE_UP))

    def _scale(self, life: Place, nodes: int, *, alone: bool) -> None:
        """Scale the run; if it leaves others `alone`, it does without being told that it may restart them."""
        argv, before = ["scale", RUN, "--nodes", str(nodes)], life.status()
        if not alone:
            assert "this would restart" in life(*argv, code=1)
        joined = _joined(life, "node0")
        life(*argv, *([] if alone else ["--yes"]))
        assert [task["node"] for task in life.training(nodes, len(before["worlds"]) + 1)["tasks"]] == [
            *("node0", "node1")[:nodes],
            "rendezvous",
        ]
        assert (_joined(life, "node0") == joined) == alone

    @feature(NODE_DIES, gate=False)
    def test_a_machine_dies(self, life: Place, follower: subprocess.Popen[str]) -> None:
        worlds = len(life.training(2)["worlds"])
        life.kill_machine("node1")
        try:
            status = life.training(1, worlds + 1)
            assert status["state"] == "training"
            assert follower.poll() is None
        finally:
            life.mend()

    @feature("Who follows a run ends with it: exit code 0 when it is done")
    def test_done(self, life: Place, follower: subprocess.Popen[str]) -> None:
        (life.shared / f"{RUN}.enough").touch()
        out, err = follower.communicate(timeout=_PATIENCE)
        assert (follower.returncode, f"{RUN} is done" in err) == (0, True), out + err
        assert life.status()["state"] == "done"

    @feature("`down` leaves nothing but what was logged, which `logs` and `history` show afterwards")
    def test_down(self, life: Place) -> None:
        life("down", RUN)
        life.check_nothing_left()
        life("status", RUN, code=1)
        kept = life("logs", RUN)
        assert " of 2 starts at " in kept, kept
        assert "has formed" in life("history", RUN)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that has not ended by itself; what it has printed is told if it took too long."""
    try:
        yield
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{process.args} does not end\n{''.join(process.communicate())}") from None
    finally:
        process.kill()
        process.communicate()


def _joined(place: Place, node: str) -> int:
    """Return how often the process that is a node has come to the run."""
    entries = json.loads(place("history", RUN, "--json"))["entries"]
    return len([entry for entry in entries if entry["kind"] == "joined" and entry["data"]["node"] == node])
