"""The contract of all launchers, as the life of a run: each test is a feature, and asserts what a command prints.

A launcher has a LaunchTarget, where everything is real, and a class that inherits Contract. The tests run in the order of this file, since
most of them share one run; if one fails, the next ones continue with that run.
"""

from __future__ import annotations

import contextlib
import getpass
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
from fault_suspects import find_suspect
from features import IN_A_CONTAINER, LAUNCHERS, NODE_DIES, SCALE_DOWN, SCALE_UP, feature
from interrupt import ROOT, interrupt_at_line
from processes import find_run_pids, read_command_line

from swarmtrain import process
from swarmtrain.lab import Lab
from tests.webhook_receiver import ReceiverProcess, start_lab_receiver

FOLDER = Path(__file__).parent
CONFIG = FOLDER / "contract.yml"
RUN = "life"
_SECRET = "hush-7f1c"  # noqa: S105
_TIMEOUT_SECONDS = 90.0
_START_PATTERN = re.compile(r" starts at (\d+), ")
_OTHER_VERSION_PROGRAM = """
from swarmtrain.__main__ import main
from swarmtrain.config import Config

def refuse_config(text):
    raise ValueError("unknown keys")

Config.from_json = refuse_config
main()
"""
"""A command line that cannot read the config of a deployed run, such as that of another version of swarmtrain."""


class LaunchTarget:
    """The machines that a launcher deploys runs to, and the project folder in which commands run."""

    kind: str
    program: tuple[str, ...] = ("-m", "swarmtrain")
    """Python's arguments that start the command line."""
    invalid_options: tuple[str, ...] = ("-o", "runner.hosts=[node0, nowhere]")
    """Options with which a deploy must fail."""

    def __init__(self, folder: Path) -> None:
        self.home, self.project = folder / "home", folder / "project"
        self.shared = self.project / "shared"
        """The folder that all ranks see as `shared`."""
        self.env = {"XDG_STATE_HOME": str(self.home), "PYTHONPATH": str(ROOT), "DOCKER_HOST": f"unix://{folder}/no.sock"}
        self.invalid_env: dict[str, str] = {}
        """Environment variables with which a deploy must fail."""
        self.project.mkdir(parents=True)
        shutil.copy(FOLDER / "train.py", self.project)
        shutil.copy(FOLDER / "fail.py", self.project)
        (self.project / "token").write_text(_SECRET)
        (self.project / "contract.yml").write_bytes(
            CONFIG.read_bytes().replace(b"runner_type: swarm", b"runner_type: " + self.kind.encode())
        )
        self.shared.mkdir()

    def list_leftovers(self) -> list[str]:
        """Return what exists of any run: processes, containers, and the files that only a deployed run has."""
        commands = [" ".join(words) for pid in find_run_pids(self.home) if (words := read_command_line(pid))]
        return [*commands, *self.list_run_files(self.home)]

    def check_nothing_left(self) -> None:
        """Fail unless nothing is left of any run. The process that served a command on a host may take a moment to exit."""
        end = time.monotonic() + _TIMEOUT_SECONDS
        while left := self.list_leftovers():
            assert time.monotonic() < end, f"left after {_TIMEOUT_SECONDS:g} s: {left}"
            time.sleep(0.2)

    @staticmethod
    def list_run_files(state_dir: Path) -> list[str]:
        """Return the files below a state directory that exist only while a run is deployed."""
        return [
            str(path)
            for path in state_dir.rglob("*")
            if path.is_file() and (path.name in ("TOKEN", "notify-ci", "train.py") or path.suffix == ".spec")
        ]

    def is_in_container(self, node: str) -> bool:
        """Return whether the ranks of a node of RUN are in a container."""
        return False

    def kill_node(self, node: str) -> None:
        """Kill the parent process of a node's ranks of RUN, or the node's container."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                ours = {f"SWARMTRAIN_NODE={node}".encode(), f"SWARMTRAIN_RUN={RUN}".encode()} <= set(environ)
                if ours and b"-m\0swarmtrain.entrypoint\0node\0" in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
        raise AssertionError(f"nothing runs as {node}")

    def kill_machine(self, node: str) -> None:
        """Power off the machine of a node, with everything that runs on it."""
        raise NotImplementedError

    def restart_machines(self) -> None:
        """Power on the machines that are off."""

    def start_receiver(self, folder: Path) -> ReceiverProcess:
        """Start a receiver of webhooks that the coordinator of a run can reach."""
        return ReceiverProcess(folder, "127.0.0.1")

    def start_command(self, *argv: str) -> subprocess.Popen[str]:
        """Start `swarmtrain ARGV` in the project."""
        return subprocess.Popen(
            [sys.executable, *self.program, *argv], cwd=self.project, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        )  # fmt: skip

    def __call__(self, *argv: str, code: int = 0) -> str:
        """Run `swarmtrain ARGV` in the project, assert that its exit code is `code`, and return its stdout, or stderr if it fails."""
        process = self.start_command(*argv)
        with _kill_on_exit(process):
            out, err = process.communicate(timeout=_TIMEOUT_SECONDS)
        assert process.returncode == code, f"{argv} ended with {process.returncode}\n{out}{err}"
        assert "Traceback" not in err
        return err if code else out

    def deploy(self, *argv: str, code: int = 0) -> str:
        """Deploy contract.yml."""
        return self("deploy", "contract.yml", *argv, code=code)

    def read_status(self, run: str = RUN) -> dict[str, Any]:
        """Return the output of `status --json`."""
        answer: dict[str, Any] = json.loads(self("status", run, "--json"))
        return answer

    def wait_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the status of RUN as soon as `condition` is true of it."""
        end = time.monotonic() + _TIMEOUT_SECONDS
        while not condition(status := self.read_status()):
            assert time.monotonic() < end, f"{json.dumps(status, indent=1)}\n{self('logs', RUN)}"
            time.sleep(0.2)
        return status

    def wait_for_training(self, nodes: int, min_worlds: int = 1) -> dict[str, Any]:
        """Return the status as soon as world number `min_worlds` or a later one trains on `nodes` nodes."""

        def is_training(status: dict[str, Any]) -> bool:
            worlds = status["worlds"]
            return (
                len(worlds) >= min_worlds and status["world"]["nodes"] == nodes and status["progress"].get("time", 0.0) > worlds[-1]["time"]
            )

        return self.wait_until(is_training)


class LabTarget(LaunchTarget):
    """A target whose machines are those of a lab."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder)
        self.lab = lab
        self.env |= lab.build_client_environment()

    def kill_machine(self, node: str) -> None:
        self.lab.power_off_node(node, report_progress=print)

    def restart_machines(self) -> None:
        for node in self.lab.get_status():
            if node.state == "dead":
                self.lab.power_on_node(node.node, report_progress=print)

    def start_receiver(self, folder: Path) -> ReceiverProcess:
        return start_lab_receiver(self.lab, folder)

    def run_docker(self, node: str, *argv: str) -> list[str]:
        """Run docker with the node's own engine, and return its output lines."""
        return process.run_command(["docker", "-H", self.lab.get_docker_host(node), *argv]).splitlines()


@contextlib.contextmanager
def activate_target(target: LaunchTarget) -> Iterator[LaunchTarget]:
    """Make `target` the target of all commands; leftover processes are killed at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        for name, value in target.env.items():
            patch.setenv(name, value)
        yield target
    for pid in find_run_pids(target.home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Contract:
    """The features that every launcher must have. The fixture `target` comes from the class that inherits this."""

    kind: str

    def has_feature(self, name: str) -> bool:
        """Return whether the launcher has a feature according to LAUNCHERS."""
        return name not in LAUNCHERS[self.kind]

    @pytest.fixture(scope="class")
    @classmethod
    def target_with_run(cls, target: LaunchTarget) -> Iterator[LaunchTarget]:
        """The target with the run RUN, which most of the tests use. A node that joins late may find the other one training already."""
        target.deploy("--name", RUN, "--detach")
        target.wait_for_training(2)
        yield target
        target.restart_machines()
        if RUN in target.start_command("status", RUN).communicate(timeout=_TIMEOUT_SECONDS)[0]:
            target("down", RUN)

    @pytest.fixture
    def follower(self, target_with_run: LaunchTarget) -> Iterator[subprocess.Popen[str]]:
        """A `deploy` that follows the run and changes nothing in it."""
        process = target_with_run.start_command("deploy", "contract.yml", "--name", RUN, "--yes")
        assert process.stderr
        with _kill_on_exit(process):
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if "Ctrl-C detaches" in line:
                    break
            else:
                pytest.fail(f"the deploy has ended: {''.join(lines)}")
            yield process

    @feature("The same config file, with `runner_type` changed and nothing else")
    def test_the_config_is_the_same(self, target: LaunchTarget) -> None:
        ours, one = ((folder / "contract.yml").read_bytes().split(b"\n") for folder in (target.project, FOLDER))
        different = [pair for pair in zip(ours, one, strict=True) if pair[0] != pair[1]]
        assert different == ([] if self.kind == "swarm" else [(f"  runner_type: {self.kind}".encode(), b"  runner_type: swarm")])
        assert json.loads(target("plan", "contract.yml", "--json"))["up"] is False

    @feature("`plan` prints the assignment of nodes to hosts, and changes nothing")
    def test_a_plan_changes_nothing(self, target: LaunchTarget) -> None:
        plan = json.loads(target("plan", "contract.yml", "--json"))
        assert [(node["name"], node["slots"]) for node in plan["nodes"]] == [("node0", 1), ("node1", 1)]
        target.check_nothing_left()

    @feature("`deploy` reports a missing requirement before it starts the run, with exit code 1", gate=False)
    def test_what_is_missing_is_reported(self, target: LaunchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            for name, value in target.invalid_env.items():
                patch.setenv(name, value)
            printed = target.deploy("--name", "never", *target.invalid_options, code=1)
        assert "error: " in printed
        assert "hint: " in printed
        target("status", "never", code=1)
        target.check_nothing_left()

    @feature("Ctrl-C while a run starts removes the run, or `deploy` prints the command that removes it", gate=False)
    def test_interrupted(self, target: LaunchTarget) -> None:
        ended = interrupt_at_line("deploying", "deploy", "contract.yml", "--name", "brief", cwd=target.project)
        assert (ended.code, "Traceback" in ended.err) == (130, False), ended.err
        if "no part of the run remains" not in ended.err:
            assert "swarmtrain down brief removes it" in ended.err or "detached; brief continues" in ended.err, ended.err
            target("down", "brief")
        target("status", "brief", code=1)
        target.check_nothing_left()

    @feature(
        "A failed rank ends the run: `deploy` prints the reason and exits with code 3; `status` shows the exit code of the rank", gate=False
    )
    def test_a_rank_fails(self, target: LaunchTarget) -> None:
        try:
            printed = target.deploy("--name", "bad", "-o", "runner.script=fail.py", "-o", "runner.max_restarts=0", code=3)
            assert re.search(r"failed with exit code 7: node\d rank 1", printed), printed
            assert "no such thing" in target("why", "bad")
            status = target.read_status("bad")
            assert (status["state"], status["exit_code"]) == ("failed", 7)
        finally:
            target("down", "bad")
        target.check_nothing_left()

    @feature("The outcome of a run that nobody follows reaches a webhook, with the first line of `why`", gate=False)
    def test_a_notification(self, target: LaunchTarget, tmp_path: Path) -> None:
        receiver = target.start_receiver(tmp_path)
        try:
            secret = target.project / "webhook.secret"
            secret.write_text(receiver.secret)
            options = ("-o", "runner.script=fail.py", "-o", "runner.max_restarts=0", "-o", "notify.ci.secret=webhook.secret")
            target.deploy("--name", "bad", *options, "--detach")
            [request] = receiver.wait_for_requests(1)
            assert request["is_signed"]
            message = request["body"]["data"]["message"]
            assert re.match(r"run bad: failed, node\d rank 1: exit code 7; failed once", message), message
            assert target("why", "bad").splitlines()[0] == message
            secret.unlink()
        finally:
            target("down", "bad")
            receiver.close()
        assert len(receiver.read_requests()) == 1
        target.check_nothing_left()

    @feature("`deploy --detach` returns when the run is up, and the run continues")
    def test_detached(self, target_with_run: LaunchTarget) -> None:
        step = target_with_run.read_status()["progress"]["step"]
        target_with_run.wait_until(lambda status: status["progress"]["step"] > step)

    @feature("Commands reject an unknown run, with exit code 1", gate=False)
    def test_no_such_run(self, target_with_run: LaunchTarget) -> None:
        for command in (["status"], ["logs"], ["scale", "--nodes", "2"], ["stop"], ["down"]):
            printed = target_with_run(command[0], "never", *command[1:], code=1)
            assert printed.startswith("error: run never: unknown run; existing runs: life")

    @feature("`plan` prints the changes that a deploy would make to an existing run", gate=False)
    def test_a_plan_of_what_is_up(self, target_with_run: LaunchTarget) -> None:
        assert json.loads(target_with_run("plan", "contract.yml", "--name", RUN, "--json"))["changes"] == []
        worlds = target_with_run.read_status()["worlds"]
        changed = json.loads(target_with_run("plan", "contract.yml", "--name", RUN, "-o", "runner.env.MORE=yes, indeed", "--json"))
        assert changed["up"]
        assert changed["changes"]
        assert target_with_run.read_status()["worlds"] == worlds

    @feature(
        "`deploy` asks for confirmation before it restarts nodes; without a terminal, it is rejected unless `--yes` is passed", gate=False
    )
    def test_a_restart_is_asked_about(self, target_with_run: LaunchTarget) -> None:
        assert "this would restart" in target_with_run.deploy("--name", RUN, "-o", "runner.env.MORE=yes, indeed", code=2)

    @feature("`status` shows the state of each node, the world and the step")
    def test_status(self, target_with_run: LaunchTarget) -> None:
        status = target_with_run.read_status()
        assert (status["run"], status["state"], status["world"]["world_size"]) == (RUN, "training", 2)
        assert {task["node"]: task["state"] for task in status["tasks"]} == dict.fromkeys(("node0", "node1", "rendezvous"), "running")
        assert [task["host"] for task in status["tasks"]][:2] == ["node0", "node1"]
        assert "run life: training" in target_with_run("status", RUN)

    @feature("`ps` lists the run with its owner, nodes and step; a change to somebody else's run must be confirmed")
    def test_owner(self, target_with_run: LaunchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        (row,) = json.loads(target_with_run("ps", "--json"))["runs"]
        assert (row["run"], row["owner"], row["running_nodes"], row["state"]) == (RUN, getpass.getuser(), 2, "training")
        assert row["step"] > 0
        with monkeypatch.context() as patch:
            patch.setenv("SWARMTRAIN_OWNER", "somebody")
            for command in ("stop", "down"):
                assert f"run of {getpass.getuser()}" in target_with_run(command, RUN, code=2)
                assert "no run of yours exists" in target_with_run(command, code=1)
            deploy_error = target_with_run.deploy("--name", RUN, "-o", "runner.env.MORE=yes, indeed", "--detach", code=2)
            assert f"the run of {getpass.getuser()}" in deploy_error
        assert target_with_run.read_status()["state"] == "training"

    @feature("`logs` merges the output of all ranks into one stream, with node and rank on each line")
    def test_logs(self, target_with_run: LaunchTarget) -> None:
        lines = target_with_run("logs", RUN).splitlines()
        for rank in (0, 1):
            assert [line for line in lines if f" rank {rank} | rank {rank} of 2 starts at " in line and line.startswith("node")]
        assert {line.split(" | ")[0].split()[-1] for line in target_with_run("logs", RUN, "--rank", "1").splitlines()} == {"1"}

    @feature("A secret reaches the ranks as a file")
    def test_secrets(self, target_with_run: LaunchTarget) -> None:
        assert (
            len([line for line in target_with_run("logs", RUN).splitlines() if line.endswith(f"its secret has {len(_SECRET)} characters")])
            >= 2
        )

    @feature(IN_A_CONTAINER)
    def test_in_a_container(self, target_with_run: LaunchTarget) -> None:
        assert target_with_run.is_in_container("node1") == self.has_feature(IN_A_CONTAINER)

    @feature("`shell` runs a command where a rank runs, and ends with its exit code")
    def test_a_shell(self, target_with_run: LaunchTarget) -> None:
        starts = [line for line in target_with_run("logs", RUN).splitlines() if line.startswith("node0 ") and " of 2 starts" in line]
        rank = starts[-1].split()[2]
        printed = target_with_run(
            "shell", RUN, "--rank", rank, "--", "sh", "-c", "cat; echo on $SWARMTRAIN_NODE$SLURMD_NODENAME; test ! -t 1"
        )
        assert printed == "on node0\n"
        target_with_run("shell", RUN, "--node", "node0", "--", "sh", "-c", "exit 7", code=7)
        assert "unknown rank; the newest world has the ranks 0 to 1" in target_with_run("shell", RUN, "--rank", "2", code=1)
        assert "unknown node; its nodes: node0, node1\n" in target_with_run("shell", RUN, "--node", "node7", code=1)

    @feature("Ctrl-C detaches `deploy`, and the run continues", gate=False)
    def test_detaching(self, target_with_run: LaunchTarget) -> None:
        worlds = target_with_run.read_status()["worlds"]
        ended = interrupt_at_line("Ctrl-C detaches", "deploy", "contract.yml", "--name", RUN, cwd=target_with_run.project)
        assert (ended.code, f"detached; {RUN} continues" in ended.err) == (130, True), ended.err
        assert target_with_run.wait_for_training(2)["worlds"] == worlds

    @feature("A killed process of a node is restarted, and training resumes", gate=False)
    def test_a_node_is_killed(self, target_with_run: LaunchTarget) -> None:
        worlds = len(target_with_run.read_status()["worlds"])
        target_with_run.kill_node("node1")
        assert target_with_run.wait_for_training(2, worlds + 1)["state"] == "training"
        assert find_suspect(target_with_run("why", RUN)) == "node1"

    @feature(
        "`stop` lets the ranks save a checkpoint, and ends the commands that follow the run; a deploy resumes from this checkpoint",
        gate=False,
    )
    def test_stop_and_resume(self, target_with_run: LaunchTarget, follower: subprocess.Popen[str]) -> None:
        worlds = len(target_with_run.read_status()["worlds"])
        log_follower = target_with_run.start_command("logs", "-f", RUN)
        target_with_run("stop", RUN)
        with _kill_on_exit(log_follower):
            out, err = follower.communicate(timeout=_TIMEOUT_SECONDS)
            assert (follower.returncode, f"{RUN} was stopped before it ended" in err) == (3, True), out + err
            log_follower.communicate(timeout=_TIMEOUT_SECONDS)
            assert log_follower.returncode == 0
        assert target_with_run.read_status()["state"] == "stopped"
        saved = int((target_with_run.shared / f"{RUN}.state").read_text())
        assert saved > 0
        target_with_run.deploy("--name", RUN, "--detach")
        target_with_run.wait_for_training(2, worlds + 1)
        target_with_run.wait_until(lambda _: f" starts at {saved}, " in target_with_run("logs", RUN))
        starts = [int(each) for each in _START_PATTERN.findall(target_with_run("logs", RUN))]
        assert min(starts[starts.index(saved) :]) == saved

    @feature(SCALE_DOWN, gate=False)
    def test_scale_down(self, target_with_run: LaunchTarget) -> None:
        self._scale_and_check(target_with_run, 1, others_keep_running=self.has_feature(SCALE_DOWN))

    @feature(SCALE_UP, gate=False)
    def test_scale_up(self, target_with_run: LaunchTarget) -> None:
        self._scale_and_check(target_with_run, 2, others_keep_running=self.has_feature(SCALE_UP))

    def _scale_and_check(self, target_with_run: LaunchTarget, nodes: int, *, others_keep_running: bool) -> None:
        """Scale the run. If `others_keep_running`, it must succeed without `--yes`, since no other node restarts."""
        argv, before = ["scale", RUN, "--nodes", str(nodes)], target_with_run.read_status()
        if not others_keep_running:
            assert "this would restart" in target_with_run(*argv, code=2)
        joined = _count_joins(target_with_run, "node0")
        target_with_run(*argv, *([] if others_keep_running else ["--yes"]))
        assert [task["node"] for task in target_with_run.wait_for_training(nodes, len(before["worlds"]) + 1)["tasks"]] == [
            *("node0", "node1")[:nodes],
            "rendezvous",
        ]
        assert (_count_joins(target_with_run, "node0") == joined) == others_keep_running

    @feature(NODE_DIES, gate=False)
    def test_a_machine_dies(self, target_with_run: LaunchTarget, follower: subprocess.Popen[str]) -> None:
        worlds = len(target_with_run.wait_for_training(2)["worlds"])
        target_with_run.kill_machine("node1")
        try:
            status = target_with_run.wait_for_training(1, worlds + 1)
            assert status["state"] == "training"
            assert find_suspect(target_with_run("why", RUN)) == "node1"
            assert follower.poll() is None
        finally:
            target_with_run.restart_machines()

    @feature("A command that follows a run exits when the run ends, with code 0 if the run succeeded")
    def test_done(self, target_with_run: LaunchTarget, follower: subprocess.Popen[str]) -> None:
        (target_with_run.shared / f"{RUN}.enough").touch()
        out, err = follower.communicate(timeout=_TIMEOUT_SECONDS)
        assert (follower.returncode, f"{RUN} is done" in err) == (0, True), out + err
        assert target_with_run.read_status()["state"] == "done"

    @feature("`status`, `stop` and `down` also work on a run whose config this version of swarmtrain cannot read")
    def test_another_version(self, target_with_run: LaunchTarget) -> None:
        target_with_run.program = ("-c", _OTHER_VERSION_PROGRAM)  # until the run is down
        assert target_with_run.read_status()["state"] == "done"
        target_with_run("stop", RUN)
        assert "another version of swarmtrain" in target_with_run("scale", RUN, "--nodes", "1", code=1)

    @feature("`down` removes the run except for its saved logs and events, which `logs` and `history` show afterwards")
    def test_down(self, target_with_run: LaunchTarget) -> None:
        target_with_run("down", RUN)
        target_with_run.check_nothing_left()
        target_with_run("status", RUN, code=1)
        kept = target_with_run("logs", RUN)
        assert " of 2 starts at " in kept, kept
        assert "has formed" in target_with_run("history", RUN)


@contextlib.contextmanager
def _kill_on_exit(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that is still running at the end of the block. If it took too long, the error has its output."""
    try:
        yield
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"{process.args} does not end\n{''.join(process.communicate())}") from None
    finally:
        process.kill()
        process.communicate()


def _count_joins(target: LaunchTarget, node: str) -> int:
    """Return how often the supervisor of a node has joined the run."""
    entries = json.loads(target("history", RUN, "--json"))["entries"]
    return len([entry for entry in entries if entry["kind"] == "joined" and entry["data"]["node"] == node])
