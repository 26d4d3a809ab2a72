"""Links between the ends that measure them: here the addresses 127.0.0.1 to 127.0.0.5 of one machine are the nodes."""

from __future__ import annotations

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarmtrain.entrypoint.links import Ends, Link, rounds

MTU = 1450


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def measured(names: list[str], port: int) -> list[Link]:
    """Let all nodes measure all their links, each in a thread of its own, and return what the first of each pair found."""

    def node(name: str) -> list[Link]:
        ends = Ends(name, port, MTU, bind=name)
        peers = [peer for peer in names if peer != name]
        assert all(seconds is not None and seconds < 10 for seconds in ends.meet(peers, 10).values())
        pairs = [pair for pairs in rounds(names) for pair in pairs if name in pair]
        links = [ends.measure(a, b, patience=10) for a, b in pairs]
        return [link for link in links if link.a == name]

    with ThreadPoolExecutor(len(names)) as pool:
        return [link for found in pool.map(node, names) for link in found]


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_meets_once_in_as_few_rounds_as_there_can_be(count: int) -> None:
    names = [f"node{index}" for index in range(count)]
    made = rounds(names)
    assert sorted(pair for pairs in made for pair in pairs) == sorted(itertools.combinations(names, 2))
    assert len(made) <= (count - 1 if count % 2 == 0 else count)
    for pairs in made:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy)), "a node is in two pairs of one round"


def test_all_links_of_four_nodes() -> None:
    links = measured(["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"], free_port())
    assert len(links) == 6
    for link in links:
        assert link.error == ""
        assert 0 < link.round_trip < 0.1
        assert min(link.there, link.back) > 1e6
        assert link.packet == MTU


def test_a_peer_that_is_not_there_is_told_of() -> None:
    port = free_port()
    alone = Ends("127.0.0.1", port, MTU, bind="127.0.0.1")
    assert alone.meet(["127.0.0.9"], 60, silent=0.3) == {"127.0.0.9": None}
    assert alone.meet(["nobody.invalid"], 0.3) == {"nobody.invalid": None}
    assert alone.measure("127.0.0.1", "127.0.0.9", 0.1).error == "127.0.0.9 cannot be reached from 127.0.0.1"
    silent = Ends("127.0.0.2", port, MTU, bind="127.0.0.2")
    assert alone.meet([silent.name], 10)[silent.name] is not None
    assert alone.measure("127.0.0.1", "127.0.0.2", 0.1).error == "127.0.0.2 cannot be reached from 127.0.0.1: timed out"
    assert alone.measure("127.0.0.2", "127.0.0.1", 0.1).error == "127.0.0.2 did not call 127.0.0.1"


def test_a_caller_that_says_nothing_holds_nobody_up() -> None:
    port = free_port()
    ends = Ends("127.0.0.1", port, MTU, bind="127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)):
        other = Ends("127.0.0.2", port, MTU, bind="127.0.0.2")
        assert other.meet([ends.name], 10)[ends.name] is not None
        assert ends.meet([other.name], 10)[other.name] is not None
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ends.measure, "127.0.0.2", "127.0.0.1", 10)
            assert other.measure("127.0.0.2", "127.0.0.1", 10).error == ""
        assert answer.result().error == ""
