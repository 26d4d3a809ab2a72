"""Peer monitor: if a peer dies or stops responding, ends the collectives on this rank's GPU that would wait for it forever.

A collective over NCCL returns at once, and runs on the GPU. If a peer has died, its kernel waits; so does the host, when it first reads a
result, and no exception is raised. torch's own watchdog ends the process in this case, so that the surviving ranks could not save a
just-in-time checkpoint. Instead:

    pulse            a thread of each rank exchanges a pulse with all other ranks each second, over gloo. The exchange fails at once if the
                     process of a peer has died, and after 25 s if a peer does not respond (a frozen container, a lost connection). A
                     rank that only computes for longer than usual still responds
    abort            the thread aborts all communicators on the GPU: kernels that wait end, and leave arbitrary values
    exception        the host's read returns. `raise_if_peer_failed` then raises, before these values are used; the surviving ranks save

Collectives over gloo raise exceptions themselves, so nothing is monitored if no others are used.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from swarmtrain.protocol import ENV_ATTACHED
from swarmtrain.trainer import collectives

LOG = logging.getLogger("swarmtrain")
_PULSE_SECONDS = 1.0
_SILENCE_SECONDS = 25.0
"""Seconds after which a peer that does not respond counts as failed."""
_DEBUGGER_SECONDS = 24 * 3600.0
_STOP_SECONDS = 60.0
"""Seconds for which a rank that is done waits for its peers to be done."""
Abortable = Any
"""A backend of a process group, or a process group: its `abort()` ends all collectives. torch's types do not share a base class."""


class PeerFailedError(RuntimeError):
    """A peer died or stopped responding, so the results of this step's collectives are invalid."""


class PeerMonitor:
    """Context manager that monitors all peers of this rank in a thread. Collective: all ranks must enter and leave it."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        """`groups`: the groups whose collectives use `device`; those over gloo need no monitoring."""
        self._backends = _find_device_backends(groups, device)
        self._failure = ""
        self._is_done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if collectives.all_reduce_sum([bool(self._backends)])[0]:
            seconds = _DEBUGGER_SECONDS if ENV_ATTACHED in os.environ else _SILENCE_SECONDS
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
            self._thread = threading.Thread(target=self._exchange_pulses, args=(group,), name="peer-monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_done.set()
        if self._thread and kind is None:
            self._thread.join(_STOP_SECONDS)

    def raise_if_peer_failed(self) -> None:
        """Raise PeerFailedError if collectives were aborted. Call this after reading results, and before they are used."""
        if self._failure:
            raise PeerFailedError(self._failure)

    def _exchange_pulses(self, group: dist.ProcessGroup) -> None:
        """Exchange pulses until all ranks are done, or until a peer fails."""
        while True:
            is_done = self._is_done.wait(_PULSE_SECONDS)
            waiting_ranks = torch.tensor(0 if is_done else 1)
            try:
                dist.all_reduce(waiting_ranks, group=group)
            except RuntimeError as error:
                if not self._is_done.is_set():
                    self._abort_collectives(str(error).partition("\n")[0])
                return
            if waiting_ranks.item() == 0:
                return

    def _abort_collectives(self, reason: str) -> None:
        self._failure = f"a peer died, or has not responded for {_SILENCE_SECONDS:.0f} s: {reason}"  # before results become invalid
        LOG.warning("%s", self._failure)
        with _group_nccl_calls(self._backends):
            for backend in self._backends:
                backend.abort()


def _find_device_backends(groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Abortable]:
    """Return the backends of `groups` for `device` whose collectives do not raise an exception if a peer dies: all but gloo."""
    backends: dict[int, Abortable] = {}
    for group in groups:
        try:
            backend: Abortable = group._get_backend(device)
        except RuntimeError:
            backend = group  # a process group that is implemented in Python is its own backend
        if group.size() > 1 and not isinstance(backend, dist.ProcessGroupGloo):
            backends[id(backend)] = backend
    return [*backends.values()]


@contextmanager
def _group_nccl_calls(backends: Sequence[Abortable]) -> Iterator[None]:
    """Context manager for calls of several communicators: otherwise their aborts could wait for each other (pytorch issue 119797)."""
    backend = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if backend is None:
        yield
        return
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()
