"""How long the Swarm launcher waits, and for what: a value, since not everybody who uses it has as much time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """Seconds, unless said otherwise."""

    renew: float = 3.0
    """Between two renewals of the lock by whoever holds it."""
    valid: float = 10.0
    """Without a renewal for so long the holder changes nothing more; whoever waits takes over a little later."""
    looks: int = 30
    """As many looks in a row at a lock that stands still, half a second apart, and its holder is dead. No clock is compared
    with another: the waiter counts what it saw."""
    dead: float = 30.0
    """A place in the queue that has not been renewed for so long counts no more."""
    pending: float = 20.0
    """What is merely pending is left to itself when nothing has changed for so long; pulling an image may take longer."""
    manager: float = 120.0
    """A manager that does not answer for so long is given up by whoever follows a run."""


USUAL = Patience()
