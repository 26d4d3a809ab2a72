"""The ranks' store of a run with a key: ranks of all nodes share it, and nobody else reaches it, from other machines or from this one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from conftest import SmallRun
from intruder import STORE_ANSWER, greet_stores, list_listeners
from torch.distributed import DistNetworkError, TCPStore

from swarmtrain.entrypoint import own_connections, rank_store
from swarmtrain.entrypoint.rank_store import RankStore
from swarmtrain.protocol.run_key import build_signed_message, create_run_key

KEY = create_run_key()
LOOPBACK = "127.0.0.1"
WORLD = "b-1/1"
NOBODY = 65534
ROOT = Path(__file__).parents[2]


def open_store(port: int, *, host: str = LOOPBACK, seconds: float = 20.0) -> TCPStore:
    """Return a client of the store at `port`, as a rank has it."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))


CLOSED = ("", "ConnectionResetError")


def greet(address: tuple[str, int], *, user: int = os.geteuid()) -> str:
    """Return what a program of `user` on this machine receives that greets a TCPStore at `address`: bytes as hexadecimal, or an error."""
    return greet_stores([address], user=user)[0]


@pytest.fixture
def nodes() -> tuple[RankStore, RankStore]:
    return RankStore(KEY, LOOPBACK), RankStore(KEY, LOOPBACK)


def test_ranks_of_two_nodes_share_a_store_and_each_world_has_a_new_one(nodes: tuple[RankStore, RankStore]) -> None:
    leader, other = nodes
    stores = []
    for world in (WORLD, "b-1/2"):
        own, remote = open_store(leader.serve_world(world)), open_store(other.join_world(world, LOOPBACK, leader.port))
        assert not remote.check(["key"])
        own.set("key", world)
        remote.set("large", "x" * 1_000_000)
        assert (remote.get("key"), len(own.get("large"))) == (world.encode(), 1_000_000)
        stores.append(remote)
    with pytest.raises(DistNetworkError):
        stores[0].check(["key"])  # of the world before


def test_a_node_may_join_a_world_before_the_leader_knows_it(nodes: tuple[RankStore, RankStore]) -> None:
    leader, other = nodes
    port = other.join_world(WORLD, LOOPBACK, leader.port)
    opener = threading.Timer(0.5, leader.serve_world, [WORLD])
    opener.start()
    store = open_store(port)
    store.set("key", "value")
    assert store.get("key") == b"value"
    opener.join()


def test_another_node_may_become_the_leader(nodes: tuple[RankStore, RankStore]) -> None:
    first, second = nodes
    open_store(first.serve_world(WORLD)).set("key", "old")
    own, remote = open_store(second.serve_world("b-1/2")), open_store(first.join_world("b-1/2", LOOPBACK, second.port))
    own.set("key", "new")
    assert remote.get("key") == b"new"


def test_a_client_without_the_key_is_refused_and_counted(nodes: tuple[RankStore, RankStore], capfd: pytest.CaptureFixture[str]) -> None:
    leader, _ = nodes
    store = open_store(leader.serve_world(WORLD))
    with pytest.raises(DistNetworkError):
        open_store(leader.port, seconds=2.0)
    forged = [
        b"x\n",
        b"x" * 100_000 + b"\n",
        build_signed_message(create_run_key(), "store request", "nonce", "{}"),
        build_signed_message(KEY, "store request", "a nonce of another connection", "{}"),
        build_signed_message(KEY, "request", "nonce", "{}"),
    ]
    for line in forged:
        with socket.create_connection((LOOPBACK, leader.port), timeout=5.0) as connection, connection.makefile("rb") as stream:
            nonce = stream.readline().strip()
            connection.sendall(line.replace(b"nonce", nonce) if b"request" in line else line)
            assert read_rest(connection) == b""
    assert capfd.readouterr().err.count("that is not signed with the run's key") == 1
    store.set("key", "value")


def read_rest(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


def test_a_false_leader_gets_no_connection_of_a_rank(nodes: tuple[RankStore, RankStore], capfd: pytest.CaptureFixture[str]) -> None:
    received = []
    with socket.create_server((LOOPBACK, 0)) as server:

        def answer() -> None:
            for response in (b"nonce\n", build_signed_message(create_run_key(), "store response", "nonce", "")):
                connection, _ = server.accept()
                with connection, connection.makefile("rb") as stream:
                    connection.sendall(b"nonce\n")
                    received.append(stream.readline())
                    connection.sendall(response)
                    received.append(stream.read())

        thread = threading.Thread(target=answer)
        thread.start()
        port = nodes[1].join_world(WORLD, *server.getsockname())
        for _ in range(2):
            assert greet((LOOPBACK, port)) in CLOSED
        thread.join()
    assert [len(content) > 0 for content in received] == [True, False] * 2
    assert capfd.readouterr().err.count("its response is not signed with the run's key") == 2


def test_a_leader_that_cannot_be_reached_is_logged(
    nodes: tuple[RankStore, RankStore], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_store, "_CONNECT_SECONDS", 0.5)
    with socket.create_server((LOOPBACK, 0)) as server:
        address, port = server.getsockname()
    assert greet((LOOPBACK, nodes[1].join_world(WORLD, address, port))) in CLOSED
    assert f"ranks' store on {address}:{port}: no response within 0.5 s" in capfd.readouterr().err


def test_other_users_of_this_machine_reach_neither_relay_nor_store(nodes: tuple[RankStore, RankStore]) -> None:
    leader, other = nodes
    ports = leader.serve_world(WORLD), other.join_world(WORLD, LOOPBACK, leader.port)
    store = open_store(ports[0])
    for port in ports:
        assert greet((LOOPBACK, port)) == STORE_ANSWER
        assert greet((LOOPBACK, port), user=NOBODY) in CLOSED
    # The store itself, at an address that anybody can read in the kernel's table: not even this user reaches it but through the relay.
    (address,) = [(host, port) for host, port in list_listeners() if port == ports[0] and host != LOOPBACK]
    assert greet(address, user=NOBODY) == greet(address) == "TimeoutError"
    store.set("key", "value")


def test_a_normal_user_has_a_store_that_other_users_do_not_reach() -> None:
    user = 65533
    program = (
        "import os, sys\n"
        "from datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "from swarmtrain.entrypoint.rank_store import RankStore\n"
        f"os.setuid({user})\n"
        f"leader, other = RankStore({KEY!r}, '127.0.0.1'), RankStore({KEY!r}, '127.0.0.1')\n"
        "ports = leader.serve_world('b-1/1'), other.join_world('b-1/1', '127.0.0.1', leader.port)\n"
        "stores = [TCPStore('127.0.0.1', port, is_master=False, timeout=timedelta(seconds=20)) for port in ports]\n"
        "stores[1].set('key', 'value')\n"
        "print(stores[0].get('key').decode(), *ports, flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout
        value, *ports = process.stdout.readline().split() or process.communicate()
        assert value == "value"
        addresses = [(host, port) for host, port in list_listeners() if str(port) in ports]
        assert len(addresses) == 3
        assert STORE_ANSWER not in greet_stores(addresses, user=NOBODY)
        assert greet_stores(addresses, user=user).count(STORE_ANSWER) == 2
        assert process.communicate("") == ("", "")


def test_without_signatures_of_the_kernel_the_store_works_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_connections, "_TCP_MD5SIG_EXT", 999)
    open_store(RankStore(KEY, LOOPBACK).serve_world(WORLD)).set("key", "value")
    expected = (
        "swarmtrain: this kernel does not sign packets (Protocol not available): other users of this machine can reach the ranks' store\n"
    )
    assert capfd.readouterr().err == expected


def test_the_owner_of_a_connection_is_read_for_both_kinds_of_sockets() -> None:
    for family, host in ((socket.AF_INET, LOOPBACK), (socket.AF_INET6, f"::ffff:{LOOPBACK}")):
        with socket.create_server((LOOPBACK, 0)) as server, socket.socket(family) as client:
            client.connect((host, server.getsockname()[1]))
            connection, _ = server.accept()
            with connection:
                assert own_connections.is_own_connection(connection)


def test_many_ranks_connect_at_once(nodes: tuple[RankStore, RankStore]) -> None:
    leader, other = nodes
    ports = leader.serve_world(WORLD), other.join_world(WORLD, LOOPBACK, leader.port)
    stores: list[TCPStore] = []

    def add_rank(port: int) -> None:
        store = open_store(port)
        store.add("count", 1)
        stores.append(store)

    threads = [threading.Thread(target=add_rank, args=(ports[number % 2],)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stores[0].get("count") == b"64"


def test_a_run_with_a_key_survives_a_killed_rank_and_strangers_reach_no_store(small_run: SmallRun) -> None:
    (small_run.folder / "key").write_bytes(KEY)
    environment = {"SWARMTRAIN_KEY_FILE": str(small_run.folder / "key")}
    small_run.start_coordinator(environment=environment)
    for number in (0, 1):
        small_run.start_training_node(number, environment=environment)
    small_run.wait_for_event("progress")
    os.kill(small_run.find_ranks(1)[0], signal.SIGKILL)
    world = small_run.wait_for_event("world", count=2)
    small_run.wait_for_event("progress", condition=lambda event: event.time > world.time)
    processes = [psutil.Process(pid) for number in (0, 1) for pid in small_run.find_descendants(number)]
    connections = [connection for process in processes for connection in process.net_connections() if connection.status == "LISTEN"]
    listeners = sorted({tuple(connection.laddr) for connection in connections})
    assert len(listeners) > 4
    answers = [greet_stores(listeners, user=user) for user in (os.geteuid(), NOBODY)]
    # On loopback, both nodes have a relay. The ranks' connections among themselves stay open to everybody, but do not serve a store.
    assert [answer.count(STORE_ANSWER) for answer in answers] == [2, 0]
    assert small_run.finish_training(2) == {"node0": 0, "node1": 0, "coordinator": 0}
    assert len(small_run.read_events("world")) == 2
