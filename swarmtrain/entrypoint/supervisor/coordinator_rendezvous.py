"""Backend of torch's rendezvous that stores the state in the coordinator instead of the c10d store.

torch pickles this state, and unpickles what it reads. The c10d store has no authentication: any client that reaches its port could run code
on every node. The coordinator accepts a state only from the run's own processes, which sign their requests with the run's key.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from swarmtrain.coordinator_client import CoordinatorClient
from swarmtrain.errors import CoordinatorError

BACKEND_NAME = "swarmtrain"


class CoordinatorRendezvousBackend(RendezvousBackend):
    """Implements torch's RendezvousBackend for one round: a state that is replaced if its token, here its version, is still current."""

    def __init__(self, coordinator: CoordinatorClient, round: str) -> None:
        self._coordinator, self._round = coordinator, round

    @property
    def name(self) -> str:
        return BACKEND_NAME

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and its token; None if no agent has written a state. Raises RendezvousConnectionError."""
        try:
            state, version = self._coordinator.read_rendezvous_state(self._round)
        except CoordinatorError as error:
            raise RendezvousConnectionError(str(error)) from error
        return (b64decode(state), version) if version else None

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state if `token` is current. Return the current state, its token, and whether it is `state`.

        Raises RendezvousConnectionError.
        """
        text = b64encode(state).decode()
        try:
            current, version = self._coordinator.replace_rendezvous_state(self._round, text, token if isinstance(token, int) else 0)
        except CoordinatorError as error:
            raise RendezvousConnectionError(str(error)) from error
        return b64decode(current), version, current == text


def register_rendezvous_backend(coordinator: CoordinatorClient) -> None:
    """Register the backend with torch, whose `rdzv_endpoint` remains the address of the c10d store, which the ranks use."""

    def create_rendezvous_handler(parameters: RendezvousParameters) -> RendezvousHandler:
        host, _, port = parameters.endpoint.rpartition(":")
        timeout = timedelta(seconds=float(parameters.get("read_timeout")))
        try:
            store = TCPStore(host, int(port), is_master=False, multi_tenant=True, timeout=timeout)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(str(error)) from error
        return create_handler(store, CoordinatorRendezvousBackend(coordinator, parameters.run_id), parameters)

    rendezvous_handler_registry.register(BACKEND_NAME, create_rendezvous_handler)
