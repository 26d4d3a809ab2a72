"""The client's half of the notice board: one JSON line out, one JSON line back, per connection.

Supervisors ask it for orders and ranks post events. A connection a call keeps it simple when the board restarts
under a new address. Standard library only, so that a node whose image lacks even torch can still say so.
The server's half is swarmtrain.entrypoint.rendezvous.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from swarmtrain.errors import BoardError
from swarmtrain.wire import Event, Orders, Receipt, Rescue, Stand, Verdict

_RETRY_EVERY = 0.5
_TRIES = 5


class Board:
    """A client for the board at `address` (host:port); `timeout` in seconds bounds one call."""

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self.address = address
        self.timeout = timeout

    def post(self, event: Event) -> Receipt:
        """Put an event on the board. Raises BoardError if it cannot be reached."""
        return Receipt(**self._call("post", kind=event.kind, data=event.data))

    def join(self, node: str) -> None:
        """Say that `node` is here, and will beat every second. Raises BoardError."""
        self._call("join", node=node)

    def beat(self, node: str) -> Orders:
        """Say that `node` is still here. Raises BoardError."""
        return self._orders("beat", node=node)

    def close(self, node: str, round: str) -> Orders:
        """Say that the rendezvous `round`, "" if there was none, is closed for good; the answer holds a fresh one. Raises BoardError."""
        return self._orders("close", node=node, round=round)

    def leave(self, node: str, exit_code: int) -> Orders:
        """Say that `node` has ended: 0 all its ranks are done, EXIT_PLANNED it was asked to go. Raises BoardError."""
        return self._orders("leave", node=node, exit_code=exit_code)

    def stand(self, world: str, rank: int, stand: Stand) -> Rescue:
        """Say what this rank of a broken world holds, and again and again that it lives; learn who saves. Raises BoardError."""
        answer = self._call("stand", world=world, rank=rank, stand=asdict(stand))
        return Rescue(**{**answer, "writers": tuple(answer["writers"])})

    def rescued(self, world: str, attempt: int, rank: int) -> None:
        """Say that `rank`, the first of the writers, or of those of its node, is done, well or not. Raises BoardError."""
        self._call("rescued", world=world, attempt=attempt, rank=rank)

    def rescuing(self) -> bool:
        """Return whether survivors of a broken world are saving. Raises BoardError."""
        return bool(self._call("rescuing")["rescuing"])

    def token(self, above: int) -> int:
        """Return a world token higher than `above` and than all that were drawn here before. Raises BoardError."""
        return int(self._call("token", above=above)["token"])

    def clock(self) -> float:
        """Return by how many seconds this machine's clock is ahead of the board's. Raises BoardError."""
        return self._difference("time", time.time)

    def ahead(self) -> float:
        """Return what is to be added to time.monotonic() here to have the board's. Raises BoardError."""
        return -self._difference("monotonic", time.monotonic)

    def _difference(self, name: str, now: Callable[[], float]) -> float:
        """Return ours less theirs, of a few tries by the quickest; it is wrong by half of what asking took, at most."""
        return min(self._asked(name, now) for _ in range(_TRIES))[1]

    def _asked(self, name: str, now: Callable[[], float]) -> tuple[float, float]:
        before = now()
        theirs = float(self._call("ping")[name])
        after = now()
        return after - before, (before + after) / 2 - theirs

    def wait(self, deadline: float) -> None:
        """Return when the board answers; names are looked up anew at each try, since DNS may lag by seconds.

        `deadline` is in seconds from now. Raises BoardError with the last reason.
        """
        end = time.monotonic() + deadline
        while True:
            try:
                self._call("ping")
                return
            except BoardError as error:
                if time.monotonic() + _RETRY_EVERY > end:
                    raise BoardError(f"no answer within {deadline:g} s: {error.message}", place=error.place, hint=error.hint) from None
            time.sleep(_RETRY_EVERY)

    def _orders(self, op: str, **fields: Any) -> Orders:
        reply = self._call(op, **fields)
        verdict = reply.get("verdict")
        return Orders(reply["round"], Verdict(**verdict) if verdict else None, reply["wait"])

    def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        host, _, port = self.address.rpartition(":")
        request = json.dumps({"op": op, **fields}, default=str).encode() + b"\n"
        try:
            with socket.create_connection((host, int(port)), timeout=self.timeout) as connection:
                connection.sendall(request)
                with connection.makefile("rb") as reply:
                    line = reply.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise BoardError(str(error), place=f"notice board {self.address}") from None
        if "error" in answer:
            raise BoardError(answer["error"], place=f"notice board {self.address}")
        return answer
