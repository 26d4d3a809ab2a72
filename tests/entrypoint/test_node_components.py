"""The small parts of a node: network interface, checks, the command line, and reports of errors that a restart cannot fix."""

from __future__ import annotations

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
from swarmtrain.entrypoint.network_interface import (
    Route,
    choose_advertised_address,
    choose_route,
    find_route_by_interface,
    find_route_to_host,
    read_connected_networks,
    read_machine_resolvers,
)
from swarmtrain.entrypoint.preflight_checks import compute_threads_per_rank, find_permanent_problems
from swarmtrain.entrypoint.supervisor import fork_server, node_supervisor
from swarmtrain.entrypoint.supervisor.elastic_agent import compute_shutdown_timeout
from swarmtrain.entrypoint.supervisor.rank_process import resolve_exit_code
from swarmtrain.errors import CoordinatorError, ProtocolMismatch
from swarmtrain.protocol import EXIT_PLANNED, PROTOCOL_VERSION, NodeEnv, RunOutcome, coordinator_client
from swarmtrain.protocol.coordinator_client import CoordinatorClient

ROOT = Path(__file__).parents[2]


def build_node_env(folder: Path, **changes: Any) -> NodeEnv:
    (folder / "config.json").write_text("{}")
    (folder / "script.py").write_text("")
    values = {
        "run": "r",
        "node": "node0",
        "slots": 1,
        "min_nodes": 1,
        "max_nodes": 1,
        "coordinator": "127.0.0.1:1",
        "config": str(folder / "config.json"),
        "code_folder": str(folder),
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
    route = find_route_to_host("127.0.0.1", 9)
    assert route == Route("127.0.0.1", "lo")
    assert choose_advertised_address(route) == "127.0.0.1"


def test_the_route_to_elsewhere_is_the_interface_that_the_kernel_would_use() -> None:
    try:
        route = find_route_to_host("192.0.2.1", 9)
    except OSError:
        pytest.skip("this machine has no route off itself")
    shown = subprocess.run(["ip", "-o", "route", "get", "192.0.2.1"], capture_output=True, text=True, check=False).stdout.split()
    if not shown:
        pytest.skip("this machine has no `ip` to compare with")
    assert (route.interface, route.address) == (shown[shown.index("dev") + 1], shown[shown.index("src") + 1])


def test_an_interface_is_named_exactly_and_the_users_own_choice_stands() -> None:
    wanted = Route("10.0.1.4", "eth1").build_interface_environment({"GLOO_SOCKET_IFNAME": "mine"})
    assert wanted == {"NCCL_SOCKET_IFNAME": "=eth1", "TP_SOCKET_IFNAME": "eth1"}
    assert Route("10.0.1.4", "").build_interface_environment({}) == {}


def test_a_sound_node_has_no_problems(tmp_path: Path) -> None:
    assert find_permanent_problems(build_node_env(tmp_path)) == []


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = build_node_env(
        tmp_path, script="/no/script.py", secrets={"TOKEN": "/no/token"}, log_dir=str(tmp_path / "file" / "logs"), mounts=("/no/mount",)
    )
    (tmp_path / "config.json").write_text("{")
    problems = "\n".join(find_permanent_problems(broken))
    for part in ("/no/script.py", "config.json is not JSON", "the secret TOKEN", "log directory", "the mount /no/mount"):
        assert part in problems


def test_threads_are_divided_among_ranks_and_at_least_one_each() -> None:
    cores = len(os.sched_getaffinity(0))
    assert 1 <= compute_threads_per_rank(1) <= cores
    assert compute_threads_per_rank(10 * cores) == 1


@pytest.mark.parametrize(("grace", "timeout"), [(90.0, 85), (10.0, 8), (5.0, 4), (1.0, 1)])
def test_ranks_get_less_than_the_whole_grace(grace: float, timeout: int) -> None:
    assert compute_shutdown_timeout(grace) == timeout


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (75, 75), ("no data", 1), (256, 0), (-1, 255)])
def test_exit_codes_are_those_of_the_interpreter(code: Any, exit_code: int) -> None:
    assert resolve_exit_code(SystemExit(code)) == exit_code
    script = f"import sys; sys.exit({code!r})"
    assert subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False).returncode == exit_code


@pytest.mark.parametrize("arguments", [[], ["look"], ["agent"], ["node", "again"]])
def test_other_words_are_a_usage_error(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarmtrain.entrypoint", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


def test_the_supervisor_and_the_coordinator_load_no_torch() -> None:
    script = (
        "import sys, swarmtrain.entrypoint.supervisor.node_supervisor, swarmtrain.entrypoint.coordinator.server, "
        "swarmtrain.entrypoint.supervisor.elastic_agent\n"
        "print({'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_node_without_its_script_reports_to_the_coordinator_and_exits_for_good(small_run: Any) -> None:
    small_run.start_coordinator()
    CoordinatorClient(f"127.0.0.1:{small_run.coordinator_port}").wait_until_reachable(20)
    env = build_node_env(small_run.folder, coordinator=f"127.0.0.1:{small_run.coordinator_port}", script="/no/script.py")
    small_run.nodes["node0"] = small_run._start_process("node", env.to_env(), small_run.get_log_path(0))
    assert small_run.wait_for_exit(timeout=20) == {"node0": 0, "coordinator": 0}
    assert small_run.read_events("outcome")[0].data["reason"].startswith("node0: the script /no/script.py does not exist on this node;")


def test_an_agent_that_cannot_be_created_reports_why(small_run: Any) -> None:
    small_run.start_coordinator(max_restarts=0)
    (small_run.folder / "log0").write_text("a file where the folder of the logs must be")
    small_run.start_node(0, "", node_range=(1, 1))
    assert "log0" in small_run.wait_for_event("failure").data["error"]
    assert small_run.wait_for_exit()["coordinator"] == 0


def test_a_broken_environment_is_reported_as_far_as_it_can_be_read(small_run: Any) -> None:
    small_run.start_coordinator()
    environ = build_node_env(small_run.folder, coordinator=f"127.0.0.1:{small_run.coordinator_port}").to_env()
    small_run.nodes["node0"] = small_run._start_process("node", {**environ, "SWARMTRAIN_SLOTS": "two"}, small_run.get_log_path(0))
    assert small_run.wait_for_exit(timeout=20) == {"node0": 0, "coordinator": 0}
    assert "SWARMTRAIN_SLOTS is malformed" in small_run.read_events("outcome")[0].data["reason"]


def test_a_node_that_waits_for_its_coordinator_exits_when_a_stop_is_requested(small_run: Any) -> None:
    waiting = small_run._start_process("node", build_node_env(small_run.folder).to_env(), small_run.get_log_path(0))
    small_run.nodes["node0"] = waiting
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1.5)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(10) == EXIT_PLANNED


def test_a_node_without_a_coordinator_does_not_train_on_forever(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    agent = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    agent.start()
    assert (
        node_supervisor.Supervisor(build_node_env(tmp_path), heartbeat_interval=0.1, isolation_timeout=0.5)._wait_for_agent(agent, "round")
        == -signal.SIGTERM
    )
    assert "this node may be partitioned, and stops until the coordinator responds" in capfd.readouterr().err


def test_an_agent_has_ranks_whatever_their_titles() -> None:
    """A stopping agent without ranks is not waited for; a rank whose script changed its process title may still be saving."""
    rank, said = multiprocessing.Pipe()

    def agent() -> None:
        os.setsid()
        process.set_process_name("agent")
        if not (pid := os.fork()):
            process.set_process_name("a title")
            said.send(os.getpid())
            time.sleep(60)
        os.waitpid(pid, 0)
        time.sleep(60)

    leader = multiprocessing.get_context("fork").Process(target=agent, name="agent")
    leader.start()
    pid = rank.recv()
    assert fork_server.has_rank_processes(leader)
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while fork_server.has_rank_processes(leader):
        assert time.monotonic() < end
        time.sleep(0.05)
    leader.kill()
    leader.join()


def test_the_coordinator_answers_nonsense_with_an_error_and_survives(small_run: Any) -> None:
    small_run.start_coordinator()
    coordinator = CoordinatorClient(f"127.0.0.1:{small_run.coordinator_port}")
    coordinator.wait_until_reachable(20)
    for op, fields in (("dance", {}), ("join", {}), ("post", {"kind": "outcome", "data": {}})):
        with pytest.raises(CoordinatorError):
            coordinator._send_request(op, **fields)
    coordinator.register_node("node0")
    response = coordinator.send_heartbeat("node0")
    assert response.outcome is None
    assert isinstance(response.round, str)
    while coordinator.report_round_closed("node0", "").wait:
        time.sleep(0.1)
    assert coordinator.report_round_closed("node0", "") == response
    coordinator._send_request("post", kind="finished", data={"step": 1}, time=0.0)
    outcome = RunOutcome("done", "the last step, 1, is done", 0, round=response.round)
    while not (last_response := coordinator.report_node_exit("node0", 0)).is_over:
        assert last_response.outcome == outcome
        time.sleep(0.1)
    assert small_run.coordinator.wait(20) == 0


def test_the_networks_and_resolvers_of_a_container_are_read_from_its_files(tmp_path: Path) -> None:
    """The files of a container on an overlay network, on Docker 26 and on Docker 20.10."""
    header = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    rows = "eth1 00000000 010012AC 0003 0 0 0 00000000 0 0 0\neth0 0004630A 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
    (tmp_path / "route").write_text(header + rows + "eth1 000012AC 00000000 0001 0 0 0 0000FFFF 0 0 0\n")
    assert read_connected_networks(tmp_path / "route") == {"eth0": "10.99.4.0/24", "eth1": "172.18.0.0/16"}
    for comment, resolvers in {
        "# ExtServers: [10.0.0.2 192.168.1.1]\n": ["10.0.0.2", "192.168.1.1"],
        "# ExtServers: [host(127.0.0.53) 10.0.0.2]\n": ["10.0.0.2"],
        "# NO EXTERNAL NAMESERVERS DEFINED\n": [],
        "": [],
    }.items():
        (tmp_path / "resolv.conf").write_text(
            f"nameserver 127.0.0.11\noptions ndots:0\n\n# Based on host file: '/etc/resolv.conf'\n{comment}"
        )
        assert read_machine_resolvers(tmp_path / "resolv.conf") == resolvers


def test_an_interface_is_found_by_its_name_its_subnet_or_an_address() -> None:
    by_name, by_subnet = find_route_by_interface("lo"), find_route_by_interface("127.0.0.0/8")
    assert by_name == by_subnet == Route("127.0.0.1", "lo", is_configured=True)
    assert choose_advertised_address(Route("10.1.0.4", "ib0", is_configured=True)) == "10.1.0.4"
    assert choose_route("localhost", "nobody.invalid:1") == choose_route("127.0.0.1", "nobody.invalid:1") == by_name
    with pytest.raises(OSError, match=r"^203\.0\.113\.7 is not an address of this node; this node has .*lo 127\.0\.0\.1"):
        find_route_by_interface("203.0.113.7")
    with pytest.raises(OSError, match=r"no interface ib7 has an address on this node; this node has .*lo 127\.0\.0\.1"):
        find_route_by_interface("ib7")


def test_an_interface_that_is_not_there_is_a_permanent_problem(tmp_path: Path) -> None:
    assert any(
        "no interface 203.0.113.0/24" in problem
        for problem in find_permanent_problems(build_node_env(tmp_path, interface="203.0.113.0/24"))
    )


def test_a_node_with_another_protocol_than_the_coordinator_reports_both_versions(small_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run.start_coordinator()
    client = CoordinatorClient(f"127.0.0.1:{small_run.coordinator_port}")
    client.wait_until_reachable(20)
    monkeypatch.setattr(coordinator_client, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    begun = time.monotonic()
    with pytest.raises(
        ProtocolMismatch, match=f"uses protocol version {PROTOCOL_VERSION}, but .* on this machine uses version {PROTOCOL_VERSION + 1}"
    ):
        client.wait_until_reachable(20)
    assert time.monotonic() - begun < 10, "waiting would not help"
