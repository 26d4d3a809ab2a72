"""Store of torch's agents that the coordinator keeps, instead of a TCPStore, which has no authentication.

The agents wait for each other in it at the end of a world, and agree on ranks if nodes have different numbers of them. The coordinator
accepts requests only from the run's own processes, which sign them with the run's key.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_REQUEST_TIMEOUT_SECONDS = 15.0
"""Longer than the coordinator waits for a key in one request."""
_Value = str | bytes


class CoordinatorStore(Store):
    """Implements torch's Store, for one round of the coordinator. Values are bytes.

    torch keeps no reference to the Python object behind a PrefixStore: the creator must keep one.
    Each method raises DistNetworkError if the coordinator cannot be reached, and DistStoreError if a key is not set within `timeout`.
    """

    def __init__(self, coordinator: str, round: str, timeout: timedelta) -> None:
        """Open the store of `round` at the coordinator `coordinator` (host:port)."""
        super().__init__()
        self.set_timeout(timeout)
        self._client, self._round = CoordinatorClient(coordinator, timeout=_REQUEST_TIMEOUT_SECONDS), round

    def set(self, key: str, value: _Value) -> None:
        """Set `key` to `value`."""
        self._write("set", key, value)

    def get(self, key: str) -> bytes:
        """Return the value of `key`, once it exists."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the integer at `key`, 0 if it does not exist, and return the sum."""
        return int(self._write("add", key, str(amount)))

    def append(self, key: str, value: _Value) -> None:
        """Append `value` to the value of `key`."""
        self._write("append", key, value)

    def compare_set(self, key: str, expected_value: _Value, desired_value: _Value) -> bytes:
        """Set `key` to `desired_value` if it has `expected_value`, or does not exist and that is empty. Return the value after that."""
        return self._write("compare_set", key, desired_value, expected=_encode_value(expected_value))

    def multi_set(self, keys: Sequence[str], values: Sequence[_Value]) -> None:
        """Set each of `keys` to its value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, once all exist."""
        return self._read_all(keys, None)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all `keys` exist, for at most `timeout`."""
        self._read_all(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist."""
        return None not in self._read(keys, 0.0)

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are implemented."""
        return True

    def _read_all(self, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        end = time.monotonic() + limit.total_seconds()
        while True:
            values = self._read(keys, max(0.0, end - time.monotonic()))
            existing = [value for value in values if value is not None]
            if len(existing) == len(values):
                return existing
            if time.monotonic() >= end:
                missing = ", ".join(key for key, value in zip(keys, values, strict=True) if value is None)
                raise DistStoreError(f"timed out after {limit.total_seconds():g} s, waiting for {missing}")

    def _read(self, keys: Sequence[str], wait_seconds: float) -> list[bytes | None]:
        values = self._send("read", keys=list(keys), wait=wait_seconds)["values"]
        return [None if value is None else _decode_value(value) for value in values]

    def _write(self, command: str, key: str, value: _Value, **fields: Any) -> bytes:
        return _decode_value(self._send(command, key=key, value=_encode_value(value), **fields)["value"])

    def _send(self, command: str, **fields: Any) -> dict[str, Any]:
        try:
            return self._client.send_store_command(self._round, command, **fields)
        except CoordinatorError as error:
            raise DistNetworkError(str(error)) from error


def _encode_value(value: _Value) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _decode_value(text: str) -> bytes:
    return text.encode("latin-1")
