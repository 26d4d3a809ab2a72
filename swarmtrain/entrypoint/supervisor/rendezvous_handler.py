"""Rendezvous handler of torch's elastic agent: the coordinator says which nodes form a world, and when it is over."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from swarmtrain.entrypoint.coordinator_store import CoordinatorStore
from swarmtrain.entrypoint.rank_store import RankStore
from swarmtrain.errors import CoordinatorError, ProtocolMismatch
from swarmtrain.protocol import NodeEnv, WorldAssignment, WorldRequest
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol.distributed_env import LOOPBACK, reserve_port
from swarmtrain.protocol.run_key import load_run_key

_REQUEST_TIMEOUT_SECONDS = 15.0
"""Longer than the coordinator holds a request."""
_RETRY_SECONDS = 0.5
_STORE_TIMEOUT = timedelta(seconds=60)


class CoordinatorRendezvousHandler(RendezvousHandler):
    """Implements torch's RendezvousHandler for the node `env`, in one round of the coordinator.

    `address`: address at which other nodes reach this one. If the run has a key, the agent on the node of rank 0 serves the ranks' store to
    the run's own processes; else, or with torch's variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE, rank 0 serves it to everybody.
    """

    def __init__(self, env: NodeEnv, round: str, address: str) -> None:
        """Raises OSError if this node cannot serve the ranks' store."""
        self.world = ""
        """Key of the newest world; empty before the first."""
        self.store_address = ""
        """Address (host:port) at which other nodes reach the store of its ranks."""
        self._env, self._round, self._address = env, round, address
        self._agent = secrets.token_hex(8)
        self._client = CoordinatorClient(env.coordinator, timeout=_REQUEST_TIMEOUT_SECONDS)
        # torch keeps no reference to the Python object behind a PrefixStore.
        self._store = CoordinatorStore(env.coordinator, round, _STORE_TIMEOUT)
        self._watch: _WorldWatch | None = None
        key = b"" if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1" else load_run_key()
        self._rank_store = RankStore(key, address) if key else None
        # Ports of rank 0 in the newest and in the next world. They differ, so that no rank reaches the store of an earlier world.
        self._port, self._next_port = reserve_port(""), reserve_port("")

    @property
    def is_world_over(self) -> bool:
        """Whether the coordinator has said that the ranks of the newest world must end."""
        return self._watch is not None and self._watch.is_over.is_set()

    def end_world(self) -> None:
        """Tell the coordinator that ranks have left the newest world without a failure. If it cannot be reached, nothing happens."""
        with contextlib.suppress(CoordinatorError):
            CoordinatorClient(self._env.coordinator).end_world(self.world)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until the next world has formed, and return this node's place in it.

        While the coordinator cannot be reached, this waits for it. Raises RendezvousClosedError if the round is over.
        """
        while not (assignment := self._request_world()).world:
            if assignment.is_round_over:
                raise RendezvousClosedError(f"round {self._round} is over")
        # With equal slots, torch computes the ranks of all nodes without a store.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = str(int(assignment.has_equal_slots))
        self.world, self.store_address = assignment.world, f"{assignment.address}:{assignment.port}"
        self._watch = _WorldWatch(self._env.coordinator, assignment.world)
        self._watch.start()
        return RendezvousInfo(
            PrefixStore(assignment.world, self._store),
            assignment.group_rank,
            assignment.node_count,
            self._open_rank_store(assignment),
        )

    def _open_rank_store(self, assignment: WorldAssignment) -> RendezvousStoreInfo:
        """Return the address at which this node's ranks reach their store."""
        if self._rank_store is None:
            self._port, self._next_port = self._next_port, reserve_port("")
            return RendezvousStoreInfo(assignment.address, assignment.port)
        if assignment.group_rank == 0:
            return RendezvousStoreInfo(LOOPBACK, self._rank_store.serve_world(assignment.world))
        return RendezvousStoreInfo(LOOPBACK, self._rank_store.join_world(assignment.world, assignment.address, assignment.port))

    def num_nodes_waiting(self) -> int:
        """Return 1 if the newest world is over, so that torch's agent restarts its ranks, else 0."""
        return int(self.is_world_over)

    def is_closed(self) -> bool:
        """Return False: whether a round is over, `next_rendezvous` says."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the coordinator closes rounds."""

    def shutdown(self) -> bool:
        """Return True: the coordinator keeps no resources for a handler."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "swarmtrain"

    def get_run_id(self) -> str:
        """Return the id of the round."""
        return self._round

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent on the node of rank 0 serves the ranks' store."""
        return self._rank_store is not None

    def _request_world(self) -> WorldAssignment:
        request = WorldRequest(
            node=self._env.node,
            agent=self._agent,
            round=self._round,
            previous_world=self.world,
            slots=self._env.slots,
            address=self._address,
            port=self._rank_store.port if self._rank_store else self._next_port.getsockname()[1],
            min_nodes=self._env.min_nodes,
            max_nodes=self._env.max_nodes,
        )
        try:
            return self._client.request_world(request)
        except ProtocolMismatch:
            raise
        except CoordinatorError:
            time.sleep(_RETRY_SECONDS)  # the supervisor decides how long
            return WorldAssignment()


class _WorldWatch(threading.Thread):
    """Thread that waits until the coordinator says that a world is over."""

    def __init__(self, coordinator: str, world: str) -> None:
        super().__init__(name="world-watch", daemon=True)
        self.is_over = threading.Event()
        self._client, self._world = CoordinatorClient(coordinator, timeout=_REQUEST_TIMEOUT_SECONDS), world

    def run(self) -> None:
        while not self.is_over.is_set():
            try:
                if self._client.is_world_over(self._world):
                    self.is_over.set()
            except CoordinatorError:
                time.sleep(_RETRY_SECONDS)
