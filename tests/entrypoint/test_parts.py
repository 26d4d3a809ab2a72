"""The small parts of a node: interface, checks, the command line, and what a node says that can never work."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from swarmtrain import process
from swarmtrain.board import Board
from swarmtrain.entrypoint import forks, supervisor
from swarmtrain.entrypoint.agent import DeathReporter, shutdown_timeout
from swarmtrain.entrypoint.checks import permanent_problems, threads_per_rank
from swarmtrain.entrypoint.interface import Route, published_address, route, route_by, route_to
from swarmtrain.entrypoint.rank import exit_code_of
from swarmtrain.errors import BoardError
from swarmtrain.wire import EXIT_PLANNED, NodeEnv, Verdict

ROOT = Path(__file__).parents[2]


def node_env(folder: Path, **changes: Any) -> NodeEnv:
    (folder / "config.json").write_text("{}")
    (folder / "script.py").write_text("")
    values = {
        "run": "r",
        "node": "node0",
        "slots": 1,
        "min_nodes": 1,
        "max_nodes": 1,
        "board": "127.0.0.1:1",
        "store": "127.0.0.1:2",
        "config": str(folder / "config.json"),
        "script": str(folder / "script.py"),
        "script_args": (),
        "secrets": {},
        "stop_grace": 10.0,
        "log_dir": str(folder / "logs"),
        "mounts": (str(folder), str(folder / "script.py")),
        "interface": "",
        "numa": "",
    }
    return NodeEnv(**{**values, **changes})


def test_the_route_to_loopback_is_lo() -> None:
    route = route_to("127.0.0.1", 9)
    assert route == Route("127.0.0.1", "lo")
    assert published_address(route) == "127.0.0.1"


def test_the_route_to_elsewhere_is_the_interface_that_the_kernel_would_use() -> None:
    try:
        route = route_to("192.0.2.1", 9)
    except OSError:
        pytest.skip("this machine has no route off itself")
    shown = subprocess.run(["ip", "-o", "route", "get", "192.0.2.1"], capture_output=True, text=True, check=False).stdout.split()
    if not shown:
        pytest.skip("this machine has no `ip` to compare with")
    assert (route.interface, route.address) == (shown[shown.index("dev") + 1], shown[shown.index("src") + 1])


def test_an_interface_is_named_exactly_and_the_users_own_choice_stands() -> None:
    wanted = Route("10.0.1.4", "eth1").environment({"GLOO_SOCKET_IFNAME": "mine"})
    assert wanted == {"NCCL_SOCKET_IFNAME": "=eth1", "TP_SOCKET_IFNAME": "eth1"}
    assert Route("10.0.1.4", "").environment({}) == {}


def test_a_sound_node_has_no_problems(tmp_path: Path) -> None:
    assert permanent_problems(node_env(tmp_path)) == []


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = node_env(
        tmp_path, script="/no/script.py", secrets={"TOKEN": "/no/token"}, log_dir=str(tmp_path / "file" / "logs"), mounts=("/no/mount",)
    )
    (tmp_path / "config.json").write_text("{")
    problems = "\n".join(permanent_problems(broken))
    for part in ("/no/script.py", "config.json is not JSON", "the secret TOKEN", "log directory", "the mount /no/mount"):
        assert part in problems


def test_threads_are_shared_out_but_never_none() -> None:
    cores = len(os.sched_getaffinity(0))
    assert 1 <= threads_per_rank(1) <= cores
    assert threads_per_rank(10 * cores) == 1


@pytest.mark.parametrize(("grace", "timeout"), [(90.0, 85), (10.0, 8), (5.0, 4), (1.0, 1)])
def test_ranks_get_less_than_the_whole_grace(grace: float, timeout: int) -> None:
    assert shutdown_timeout(grace) == timeout


@pytest.mark.parametrize(("code", "seen"), [(None, 0), (0, 0), (75, 75), ("no data", 1), (256, 0), (-1, 255)])
def test_exit_codes_are_those_of_the_interpreter(code: Any, seen: int) -> None:
    assert exit_code_of(SystemExit(code)) == seen
    script = f"import sys; sys.exit({code!r})"
    assert subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False).returncode == seen


def test_the_log_record_by_which_torch_tells_of_a_death_is_as_we_read_it() -> None:
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")
    source = Path(api.__file__).read_text()
    assert '"failed (exitcode: %s)"\n                " local_rank: %s (pid: %s)"' in source
    assert "logger = logging.getLogger(__name__)" in source


def test_a_planned_exit_and_other_records_are_no_deaths(tmp_path: Path) -> None:
    reporter = DeathReporter(node_env(tmp_path), logs=None)
    for message, args in (("failed (exitcode: %s) local_rank: %s", (EXIT_PLANNED, 0)), ("Closing process %s via %s", (1, 2))):
        reporter.emit(logging.LogRecord("t", logging.ERROR, "f", 1, message, args, None))


@pytest.mark.parametrize("arguments", [[], ["look"], ["agent"], ["node", "again"]])
def test_other_words_are_a_usage_error(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarmtrain.entrypoint", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_the_supervisor_and_the_board_load_no_torch() -> None:
    script = (
        "import sys, swarmtrain.entrypoint.supervisor, swarmtrain.entrypoint.rendezvous, swarmtrain.entrypoint.agent\n"
        "print({'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_node_without_its_script_tells_the_board_and_ends_for_good(small_run: Any) -> None:
    small_run.start_board()
    Board(f"127.0.0.1:{small_run.board_port}").wait(20)
    node = node_env(small_run.folder, board=f"127.0.0.1:{small_run.board_port}", script="/no/script.py")
    small_run.nodes["node0"] = small_run._start("node", node.to_env(), small_run.log(0))
    assert small_run.finish(timeout=20) == {"node0": 0, "board": 0}
    assert small_run.events("verdict")[0].data["why"].startswith("node0: the script /no/script.py does not exist on this node;")


def test_a_broken_environment_is_told_as_far_as_it_can_be_read(small_run: Any) -> None:
    small_run.start_board()
    environ = node_env(small_run.folder, board=f"127.0.0.1:{small_run.board_port}").to_env()
    small_run.nodes["node0"] = small_run._start("node", {**environ, "SWARMTRAIN_SLOTS": "two"}, small_run.log(0))
    assert small_run.finish(timeout=20) == {"node0": 0, "board": 0}
    assert "SWARMTRAIN_SLOTS is malformed" in small_run.events("verdict")[0].data["why"]


def test_a_node_that_waits_for_its_board_leaves_when_told(small_run: Any) -> None:
    waiting = small_run._start("node", node_env(small_run.folder).to_env(), small_run.log(0))
    small_run.nodes["node0"] = waiting
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1.5)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(10) == EXIT_PLANNED


def test_a_node_that_nobody_answers_does_not_train_on_for_ever(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    agent = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    agent.start()
    assert supervisor.Supervisor(node_env(tmp_path), beat=0.1, alone=0.5)._watch(agent, "round") == -signal.SIGTERM
    assert "this node may be cut off, and stops until it is heard again" in capfd.readouterr().err


def test_an_agent_has_ranks_whatever_they_call_themselves() -> None:
    """One that is to end and has none is not waited for; one whose script has another title is saving."""
    rank, said = multiprocessing.Pipe()

    def agent() -> None:
        os.setsid()
        process.rename("agent")
        if not (pid := os.fork()):
            process.rename("a title")
            said.send(os.getpid())
            time.sleep(60)
        os.waitpid(pid, 0)
        time.sleep(60)

    leader = multiprocessing.get_context("fork").Process(target=agent, name="agent")
    leader.start()
    pid = rank.recv()
    assert forks.leads(leader)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while forks.leads(leader):
        assert time.monotonic() < end
        time.sleep(0.05)
    leader.kill()
    leader.join()


def test_the_board_answers_nonsense_with_an_error_and_lives_on(small_run: Any) -> None:
    small_run.start_board()
    board = Board(f"127.0.0.1:{small_run.board_port}")
    board.wait(20)
    for op, fields in (("dance", {}), ("join", {}), ("post", {"kind": "verdict", "data": {}})):
        with pytest.raises(BoardError):
            board._call(op, **fields)
    board.join("node0")
    orders = board.beat("node0")
    assert orders.verdict is None
    assert isinstance(orders.round, str)
    while board.close("node0", "").wait:
        time.sleep(0.1)
    assert board.close("node0", "") == orders
    board._call("post", kind="finished", data={"step": 1}, time=0.0)
    assert board.leave("node0", 0).verdict == Verdict("done", "the last step, 1, is done", 0)
    assert small_run.board.wait(20) == 0


def test_an_interface_is_found_by_its_name_its_subnet_or_an_address() -> None:
    by_name, by_subnet = route_by("lo"), route_by("127.0.0.0/8")
    assert by_name == by_subnet == Route("127.0.0.1", "lo", chosen=True)
    assert published_address(Route("10.1.0.4", "ib0", chosen=True)) == "10.1.0.4"
    assert route("localhost", "nobody.invalid:1") == route("127.0.0.1", "nobody.invalid:1") == by_name
    with pytest.raises(OSError, match=r"^203\.0\.113\.7 is no address of this node; it has .*lo 127\.0\.0\.1"):
        route_by("203.0.113.7")
    with pytest.raises(OSError, match=r"no interface ib7 has an address on this node; it has .*lo 127\.0\.0\.1"):
        route_by("ib7")


def test_an_interface_that_is_not_there_is_a_permanent_problem(tmp_path: Path) -> None:
    assert any("no interface 203.0.113.0/24" in problem for problem in permanent_problems(node_env(tmp_path, interface="203.0.113.0/24")))
