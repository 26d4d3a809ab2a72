"""Link measurements between nodes. The nodes are the addresses 127.0.0.1 to 127.0.0.5 of one machine."""

from __future__ import annotations

import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarmtrain.entrypoint.probe.link_probe import Link, LinkProber, schedule_node_pairs

MTU = 1450


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def measure_links(names: list[str], port: int) -> list[Link]:
    """Let all nodes measure all their links, each in its own thread. Return what the first node of each pair measured."""

    def measure_from(name: str) -> list[Link]:
        prober = LinkProber(name, port, MTU, bind_address=name)
        peers = [peer for peer in names if peer != name]
        assert all(seconds is not None and seconds < 10 for seconds in prober.wait_for_peers(peers, 10).values())
        pairs = [pair for pairs in schedule_node_pairs(names) for pair in pairs if name in pair]
        links = [prober.measure_link(a, b, partner_timeout=10) for a, b in pairs]
        return [link for link in links if link.a == name]

    with ThreadPoolExecutor(len(names)) as pool:
        return [link for found in pool.map(measure_from, names) for link in found]


@pytest.mark.parametrize("count", range(1, 10))
def test_every_pair_meets_once_in_as_few_rounds_as_there_can_be(count: int) -> None:
    names = [f"node{index}" for index in range(count)]
    made = schedule_node_pairs(names)
    assert sorted(pair for pairs in made for pair in pairs) == sorted(itertools.combinations(names, 2))
    assert len(made) <= (count - 1 if count % 2 == 0 else count)
    for pairs in made:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len(set(busy)), "a node is in two pairs of one round"


def test_all_links_of_four_nodes() -> None:
    links = measure_links(["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"], find_free_port())
    assert len(links) == 6
    for link in links:
        assert link.error == ""
        assert 0 < link.round_trip < 0.1
        assert min(link.forward_bandwidth, link.backward_bandwidth) > 1e6
        assert link.largest_packet == MTU


def test_a_missing_peer_is_reported() -> None:
    port = find_free_port()
    alone = LinkProber("127.0.0.1", port, MTU, bind_address="127.0.0.1")
    assert alone.wait_for_peers(["127.0.0.9"], 60, unresponsive_timeout=0.3) == {"127.0.0.9": None}
    assert alone.wait_for_peers(["nobody.invalid"], 0.3) == {"nobody.invalid": None}
    assert alone.measure_link("127.0.0.1", "127.0.0.9", 0.1).error == "127.0.0.9 cannot be reached from 127.0.0.1"
    silent = LinkProber("127.0.0.2", port, MTU, bind_address="127.0.0.2")
    assert alone.wait_for_peers([silent.name], 10)[silent.name] is not None
    assert alone.measure_link("127.0.0.1", "127.0.0.2", 0.1).error == "127.0.0.2 cannot be reached from 127.0.0.1: timed out"
    assert alone.measure_link("127.0.0.2", "127.0.0.1", 0.1).error == "127.0.0.2 did not connect to 127.0.0.1"


def test_a_caller_that_says_nothing_holds_nobody_up() -> None:
    port = find_free_port()
    prober = LinkProber("127.0.0.1", port, MTU, bind_address="127.0.0.1")
    with socket.create_connection(("127.0.0.1", port)):
        other = LinkProber("127.0.0.2", port, MTU, bind_address="127.0.0.2")
        assert other.wait_for_peers([prober.name], 10)[prober.name] is not None
        assert prober.wait_for_peers([other.name], 10)[other.name] is not None
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(prober.measure_link, "127.0.0.2", "127.0.0.1", 10)
            assert other.measure_link("127.0.0.2", "127.0.0.1", 10).error == ""
        assert answer.result().error == ""
