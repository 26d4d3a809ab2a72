"""The ranks' store, torch's TCPStore, in a run with a key: only the run's own processes reach it.

TCPStore has no authentication. So it listens on loopback, on the node of rank 0, and each node relays the connections of its ranks:

    rank ── loopback ── relay of its node ── authenticated with the run's key ── relay of rank 0's node ── loopback ── TCPStore

On loopback, only processes of the run's user are served (own_connections). Between nodes, both sides show once that they have the key, each
for the other's nonce. What follows is not encrypted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

from torch.distributed import TCPStore

from swarmtrain.entrypoint.coordinator.strangers import RefusedRequests, UnverifiedConnections
from swarmtrain.entrypoint.own_connections import SigningKey, is_own_connection
from swarmtrain.protocol.distributed_env import LOOPBACK
from swarmtrain.protocol.run_key import build_signed_message, open_signed_message

_REQUEST_PURPOSE, _RESPONSE_PURPOSE = "store request", "store response"
_HANDSHAKE_SECONDS = 15.0
_CONNECT_SECONDS = 60.0
"""Seconds until the node of rank 0 must be reachable, and its agent must have learned of the world."""
_RETRY_SECONDS = 0.2
_CHUNK_BYTES = 1 << 14
_BACKLOG = 4096
_STORE_HOST = "127.0.0.2"
_Result = TypeVar("_Result")


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


_Connect = Callable[[], Awaitable[_Connection]]


class RankStore:
    """Serves the ranks' store of a world, or relays connections to it, for the ranks of this node: one world at a time."""

    def __init__(self, key: bytes, address: str) -> None:
        """Listen for the other nodes of the run with the key `key`, which reach this node at `address`. Raises OSError."""
        self._key = key
        self._store_key = SigningKey()
        self._store: TCPStore | None = None
        self._rank_listener: asyncio.Server | None = None
        self._relayed_connections: set[_Connection] = set()
        self._served_world, self._store_address, self._world_served = "", ("", 0), asyncio.Event()
        self._unverified_connections, self._refused_requests = UnverifiedConnections(), RefusedRequests(time.monotonic)
        listener = _listen_for_nodes(address)
        self.port = int(listener.getsockname()[1])
        """Port at which the other nodes reach this one."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rank-store", daemon=True).start()
        self._run(self._start_server(listener, self._handle_node))

    def serve_world(self, world: str) -> int:
        """Serve a new, empty store to the ranks of `world`, and return its port on this node's loopback. Raises OSError."""
        listener = socket.create_server((LOOPBACK, 0))
        port = int(listener.getsockname()[1])
        # The same port at another loopback address: the constructor of a TCPStore connects to this port itself, through the relay.
        store_address = (_STORE_HOST, port)
        store_socket = self._store_key.open_socket()
        store_socket.bind(store_address)
        store_socket.listen(_BACKLOG)
        self._run(self._enter_world(listener, lambda: self._connect_to_store(store_address)))
        timeout = timedelta(seconds=_CONNECT_SECONDS)
        self._store = TCPStore(LOOPBACK, port, None, True, timeout, False, master_listen_fd=store_socket.detach())
        self._loop.call_soon_threadsafe(self._announce_world, world, store_address)
        return port

    def join_world(self, world: str, address: str, port: int) -> int:
        """Relay the ranks of this node to the store of `world`, and return its port on this node's loopback. Raises OSError.

        `address`, `port`: address of the node of rank 0, and the `port` of its RankStore.
        """
        listener = socket.create_server((LOOPBACK, 0))
        self._run(self._enter_world(listener, lambda: self._connect_to_node(world, address, port)))
        self._store = None
        return int(listener.getsockname()[1])

    def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start_server(self, listener: socket.socket, handle: Callable[[_Connection], Awaitable[None]]) -> asyncio.Server:
        """Call `handle` for each connection to `listener`, and close the connection when it returns."""

        async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handle(_Connection(reader, writer))
            except OSError:
                pass  # the client has gone or is too slow, or what it wants cannot be reached
            finally:
                writer.close()

        return await asyncio.start_server(handle_connection, sock=listener, limit=_CHUNK_BYTES, backlog=_BACKLOG)

    async def _enter_world(self, listener: socket.socket, connect: _Connect) -> None:
        """Close the connections of the world before. Relay this node's ranks, which connect to `listener`, to what `connect` returns."""
        if self._rank_listener:
            self._rank_listener.close()
        for connection in self._relayed_connections:
            connection.writer.transport.abort()
        self._served_world = ""

        async def handle_rank(rank: _Connection) -> None:
            if is_own_connection(rank.writer.get_extra_info("socket")):
                await self._relay(rank, connect)

        self._rank_listener = await self._start_server(listener, handle_rank)

    def _announce_world(self, world: str, store_address: tuple[str, int]) -> None:
        self._served_world, self._store_address = world, store_address
        self._world_served.set()
        self._world_served = asyncio.Event()

    async def _handle_node(self, node: _Connection) -> None:
        """Relay a connection of another node to the store of its world, once that node has shown that it has the run's key."""
        address = str(node.writer.get_extra_info("peername")[0])
        with self._unverified_connections.track(address, node.writer.transport.abort):
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                nonce = secrets.token_hex(16)
                await _send(node, nonce.encode() + b"\n")
                message = open_signed_message(self._key, _REQUEST_PURPOSE, await _read_line(node))
        if message is None or message.nonce != nonce:
            self._refused_requests.record_refusal(address)
            if report := self._refused_requests.take_report():
                _log_message(f"ranks' store: {report}")
            return
        request = json.loads(message.body)
        async with asyncio.timeout(_CONNECT_SECONDS):
            while self._served_world != request["world"]:
                await self._world_served.wait()
        store_address = self._store_address
        await _send(node, build_signed_message(self._key, _RESPONSE_PURPOSE, request["nonce"], ""))
        await self._relay(node, lambda: self._connect_to_store(store_address))

    async def _connect_to_node(self, world: str, address: str, port: int) -> _Connection:
        """Return a connection to the store of `world` on the node of rank 0. Raises OSError, which is also logged."""
        node: _Connection | None = None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                node = await _open_connection(address, port)
                nonce = secrets.token_hex(16)
                request = json.dumps({"world": world, "nonce": nonce})
                await _send(node, build_signed_message(self._key, _REQUEST_PURPOSE, (await _read_line(node)).decode().strip(), request))
                message = open_signed_message(self._key, _RESPONSE_PURPOSE, await _read_line(node))
            if message is None or message.nonce != nonce:
                raise ConnectionRefusedError("its response is not signed with the run's key")
        except (OSError, UnicodeDecodeError) as error:
            _log_message(f"ranks' store on {address}:{port}: {str(error) or f'no response within {_CONNECT_SECONDS:g} s'}")
            if node:
                node.writer.close()
            raise ConnectionError from error
        return node

    async def _connect_to_store(self, store_address: tuple[str, int]) -> _Connection:
        connection = self._store_key.open_socket()
        await self._loop.sock_connect(connection, store_address)
        return _Connection(*await asyncio.open_connection(sock=connection, limit=_CHUNK_BYTES))

    async def _relay(self, client: _Connection, connect: _Connect) -> None:
        """Relay `client` to the connection that `connect` returns, until one of them ends. Raises OSError if that is impossible."""
        self._relayed_connections.add(client)
        try:
            server = await connect()
            try:
                await _join(client, server)
            finally:
                server.writer.close()
        finally:
            self._relayed_connections.discard(client)


async def _open_connection(address: str, port: int) -> _Connection:
    """Return a connection to a node, once it can be reached."""
    while True:
        try:
            return _Connection(*await asyncio.open_connection(address, port, limit=_CHUNK_BYTES))
        except OSError:
            await asyncio.sleep(_RETRY_SECONDS)


class _Pipe(asyncio.Protocol):
    """Writes what a connection sends to another one, `target`. Streams would take twice the time for the short messages of a store."""

    def __init__(self, target: asyncio.Transport, ended: asyncio.Event) -> None:
        self._target, self._ended = target, ended

    def data_received(self, data: bytes) -> None:
        self._target.write(data)

    def pause_writing(self) -> None:
        """The connection itself cannot send as fast as `target` does."""
        self._target.pause_reading()

    def resume_writing(self) -> None:
        self._target.resume_reading()

    def eof_received(self) -> None:
        self._ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()


async def _join(first: _Connection, second: _Connection) -> None:
    """Copy what each of two connections sends to the other one, until one of them ends."""
    ended = asyncio.Event()
    transports = [cast("asyncio.Transport", connection.writer.transport) for connection in (first, second)]
    pipes = [_Pipe(target, ended) for target in reversed(transports)]
    for connection, transport, pipe in zip((first, second), transports, pipes, strict=True):
        transport.pause_reading()
        connection.reader.feed_eof()
        pipe.data_received(await connection.reader.read())
        transport.set_protocol(pipe)
        if transport.is_closing():
            return
    for transport in transports:
        transport.resume_reading()
    await ended.wait()


async def _send(connection: _Connection, content: bytes) -> None:
    connection.writer.write(content)
    await connection.writer.drain()


async def _read_line(connection: _Connection) -> bytes:
    """Return the next line; empty if it is too long."""
    try:
        return await connection.reader.readline()
    except ValueError:
        return b""


def _listen_for_nodes(address: str) -> socket.socket:
    """Return a socket that listens on `address`; on all addresses if it is a name, or not one of this machine. Raises OSError."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        return socket.create_server((address, 0), family=family)
    except (ValueError, OSError):
        family, is_dual = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
        return socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)


def _log_message(message: str) -> None:
    sys.stderr.write(f"swarmtrain: {message}\n")
    sys.stderr.flush()
