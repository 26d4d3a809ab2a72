"""The store of torch's agents, which the coordinator keeps: it does what torch's own TCPStore does, for clients with the run's key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from coordinator_thread import ServedCoordinator, serve_coordinator
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.utils.store import barrier, synchronize

from swarmtrain.entrypoint.coordinator_store import CoordinatorStore
from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol.run_key import create_run_key

KEY = create_run_key()
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCoordinator]:
    key_file = tmp_path_factory.mktemp("key") / "key"
    key_file.write_bytes(KEY)
    monkeypatch.setenv("SWARMTRAIN_KEY_FILE", str(key_file))
    with serve_coordinator(KEY) as served:
        yield served


@pytest.fixture
def store(served: ServedCoordinator) -> CoordinatorStore:
    return CoordinatorStore(served.address, "round", TIMEOUT)


def run_commands(store: Store) -> list[object]:
    """Run every command of a store, as torch's agents do through a PrefixStore, and return the results."""
    prefixed = PrefixStore("p", store)
    prefixed.set("text", "one")
    prefixed.set("bytes", bytes(range(256)))
    prefixed.append("text", " two")
    prefixed.multi_set(["a", "b"], ["1", "2"])
    prefixed.wait(["a", "b"], timedelta(seconds=1))
    return [
        prefixed.get("text"),
        prefixed.get("bytes"),
        prefixed.multi_get(["a", "b"]),
        [prefixed.add("count", 2), prefixed.add("count", -5), prefixed.get("count")],
        [prefixed.check(["a", "b"]), prefixed.check(["a", "missing"])],
        prefixed.compare_set("new", "", "first"),
        prefixed.compare_set("new", "other", "second"),
        prefixed.compare_set("new", "first", "third"),
        prefixed.compare_set("absent", "expected", "value"),
        prefixed.check(["absent"]),
    ]


def test_each_command_has_the_result_of_a_tcp_store(store: CoordinatorStore) -> None:
    reference = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    assert run_commands(store) == run_commands(reference)


def test_a_key_that_is_not_set_in_time_raises_the_error_of_a_tcp_store(store: CoordinatorStore) -> None:
    reference = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    for each in (store, reference):
        started_at = time.monotonic()
        with pytest.raises(DistStoreError):
            PrefixStore("p", each).wait(["missing"], timedelta(seconds=0.5))
        assert 0.4 < time.monotonic() - started_at < 5
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(DistStoreError, match=r"timed out after 0\.3 s, waiting for missing"):
        store.get("missing")


def test_a_client_that_waits_gets_the_key_when_another_sets_it(served: ServedCoordinator, store: CoordinatorStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(store.get, "late")
        time.sleep(6)  # longer than one request waits
        CoordinatorStore(served.address, "round", TIMEOUT).set("late", "value")
        assert value.result(timeout=2) == b"value"


def test_agents_synchronize_and_meet_at_a_barrier(served: ServedCoordinator) -> None:
    stores = [CoordinatorStore(served.address, "round", TIMEOUT) for _ in range(3)]

    def run_agent(rank: int) -> list[bytes]:
        prefixed = PrefixStore("agents", stores[rank])
        data: list[bytes] = synchronize(prefixed, str(rank).encode(), rank, 3, "ranks")
        barrier(prefixed, 3, "exit", barrier_timeout=20)
        return data

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run_agent, range(3))) == [[b"0", b"1", b"2"]] * 3


def test_rounds_have_separate_keys_and_the_oldest_is_forgotten(served: ServedCoordinator, store: CoordinatorStore) -> None:
    store.set("key", "value")
    for round_name in ("a", "b", "c"):
        other = CoordinatorStore(served.address, round_name, TIMEOUT)
        assert not other.check(["key"])
        other.set("key", "value")
    assert store.check(["key"])
    CoordinatorStore(served.address, "d", TIMEOUT).set("key", "value")
    assert not store.check(["key"])


def test_a_value_longer_than_an_unverified_request_is_stored(store: CoordinatorStore) -> None:
    store.set("long", "x" * 100_000)
    assert store.get("long") == b"x" * 100_000


@pytest.mark.parametrize("command", [lambda store: store.set("a", "b"), lambda store: store.get("a"), lambda store: store.add("a", 1)])
def test_a_client_without_the_key_can_do_nothing(
    served: ServedCoordinator, command: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARMTRAIN_KEY_FILE")
    with pytest.raises(DistNetworkError, match="not signed with the run's key"):
        command(CoordinatorStore(served.address, "round", TIMEOUT))


def test_a_malformed_command_is_an_error_and_the_next_one_is_answered(served: ServedCoordinator, store: CoordinatorStore) -> None:
    client = CoordinatorClient(served.address)
    store.set("text", "not a number")
    for command, fields in (("add", {"key": "text", "value": "1"}), ("set", {}), ("drop", {"key": "a"}), ("read", {"keys": 1, "wait": 0})):
        with pytest.raises(CoordinatorError, match="Error"):
            client.send_store_command("round", command, **fields)
    assert store.get("text") == b"not a number"
