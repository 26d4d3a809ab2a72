"""Timeouts of the Swarm launcher, as one object, since callers differ in how long they can wait."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SwarmTimeouts:
    """Timeouts of the Swarm launcher, in seconds unless stated otherwise."""

    lock_renew_seconds: float = 3.0
    """Interval at which the holder renews the lock."""
    lock_valid_seconds: float = 10.0
    """After this time without a renewal, the holder makes no more changes; a waiting command takes over a little later."""
    stale_lock_polls: int = 30
    """After this many polls of an unchanged lock, half a second apart, its holder is considered dead.

    Clocks are never compared: the waiting command counts its own polls.
    """
    pending_seconds: float = 20.0
    """A deploy stops waiting for tasks that are only pending when nothing has changed for this long; pulling an image may take longer."""
    manager_seconds: float = 120.0
    """Following a run fails after this time without an answer from the manager."""


DEFAULT_TIMEOUTS = SwarmTimeouts()
