"""Key-value stores of torch's agents, one for each round. Agents use them through swarmtrain.entrypoint.coordinator_store.

Values are bytes, in JSON as text in which each character is one byte (latin-1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

_MAX_ROUNDS = 4
_MAX_WAIT_SECONDS = 5.0
"""Maximum seconds for which a request waits for a key. A client that waits longer repeats its request."""


class RoundStores:
    """Stores of the newest rounds. All methods run in one event loop."""

    def __init__(self) -> None:
        self._stores: dict[str, dict[str, str]] = {}
        self._waiters: dict[tuple[str, str], set[asyncio.Future[None]]] = {}

    async def handle_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle one command for the store of a round, and return its result.

        Raises KeyError, ValueError or TypeError if the request is malformed.
        """
        name, command = str(request["round"]), request["command"]
        if command == "read":
            return {"values": await self._read_values(name, list(map(str, request["keys"])), float(request["wait"]))}
        store = self._open_store(name)
        key = str(request["key"])
        match command:
            case "set":
                store[key] = str(request["value"])
            case "append":
                store[key] = store.get(key, "") + str(request["value"])
            case "add":
                store[key] = str(int(store.get(key, "0")) + int(request["value"]))
            case "compare_set":
                # As in torch's TCPStore: a key that does not exist is set if an empty value is expected.
                if store.get(key, "") == request["expected"]:
                    store[key] = str(request["value"])
            case _:
                raise ValueError(f"unknown command of a store: {command}")
        self._wake_waiters(name, key)
        return {"value": store.get(key, request.get("expected"))}

    def _open_store(self, round: str) -> dict[str, str]:
        store = self._stores.setdefault(round, {})
        if len(self._stores) > _MAX_ROUNDS:
            del self._stores[next(iter(self._stores))]
        return store

    async def _read_values(self, round: str, keys: list[str], wait_seconds: float) -> list[str | None]:
        """Return the values of `keys`, None for those that do not exist, once all exist or `wait_seconds` have passed."""
        loop = asyncio.get_running_loop()
        end = loop.time() + min(wait_seconds, _MAX_WAIT_SECONDS)
        while True:
            store = self._stores.get(round, {})
            missing_key = next((key for key in keys if key not in store), None)
            if missing_key is None or loop.time() >= end:
                return [store.get(key) for key in keys]
            await self._wait_for_key(round, missing_key, end - loop.time())

    async def _wait_for_key(self, round: str, key: str, seconds: float) -> None:
        """Wait until `key` is written, for at most `seconds`."""
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault((round, key), set())
        waiters.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop((round, key), None)

    def _wake_waiters(self, round: str, key: str) -> None:
        for waiter in self._waiters.pop((round, key), ()):
            if not waiter.done():
                waiter.set_result(None)
