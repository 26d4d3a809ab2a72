"""Registers a backend with torch whose rendezvous state and store are kept by the coordinator (swarmtrain.entrypoint.coordinator_store).

torch pickles the state, and unpickles what it reads: any client that could write it could run code on every node.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from swarmtrain.entrypoint.coordinator_store import CoordinatorStore

BACKEND_NAME = "swarmtrain"
_open_stores: list[CoordinatorStore] = []
"""Stores of this process, kept alive because torch keeps no reference to them."""


class CoordinatorRendezvousBackend(C10dRendezvousBackend):
    """torch's backend for a c10d store, under the name by which torch finds its handler."""

    @property
    def name(self) -> str:
        return BACKEND_NAME


def register_rendezvous_backend() -> None:
    """Register the backend. Its `rdzv_endpoint` is the address of the coordinator."""
    rendezvous_handler_registry.register(BACKEND_NAME, _create_rendezvous_handler)


def _create_rendezvous_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    timeout = timedelta(seconds=float(parameters.get("read_timeout")))
    store = CoordinatorStore(parameters.endpoint, parameters.run_id, timeout)
    _open_stores.append(store)
    return create_handler(store, CoordinatorRendezvousBackend(store, parameters.run_id), parameters)
