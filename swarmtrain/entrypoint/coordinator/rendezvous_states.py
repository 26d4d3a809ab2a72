"""State of torch's rendezvous for each round, which the agents read and replace. Its content is known only to torch.

Pure: no clock and no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_ROUNDS = 4


class RendezvousStates:
    """States of the newest rounds, each with a version that increases with each replacement."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, int]] = {}

    def handle_request(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a request to read or to replace the state of a round, and return the state after that, and its version.

        Raises KeyError, ValueError or TypeError if the request is malformed.
        """
        name = str(request["round"])
        if op == "read_rendezvous_state":
            state, version = self.read_state(name)
        else:
            state, version = self.replace_state(name, str(request["state"]), int(request["version"]))
        return {"state": state, "version": version}

    def read_state(self, round: str) -> tuple[str, int]:
        """Return the state of `round` and its version; an empty state of version 0 if none was written."""
        return self._states.get(round, ("", 0))

    def replace_state(self, round: str, state: str, version: int) -> tuple[str, int]:
        """Replace the state of `round` by `state` if it still has `version`. Return the state after that, and its version."""
        if version == self.read_state(round)[1]:
            self._states[round] = (state, version + 1)
            if len(self._states) > _MAX_ROUNDS:
                del self._states[next(iter(self._states))]
        return self.read_state(round)
