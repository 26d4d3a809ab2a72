"""One clock for all nodes that meet: the notice board's, which nobody can set.

torch's rendezvous compares the heartbeats of nodes by the wall clock of each machine. Where one is some seconds wrong, or is
set while a run goes on, that node takes all others for dead, or they take it for dead.
"""

from __future__ import annotations

import time
from datetime import datetime, tzinfo

from swarmtrain.board import Board


def agree(board: Board) -> None:
    """Let torch's rendezvous go by the clock of `board`, in this process. Raises BoardError."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    ahead = board.ahead()

    class BoardsTime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]  # what is kept must be torch's own kind
            return datetime.fromtimestamp(time.monotonic() + ahead, tz)

    dynamic_rendezvous.datetime = BoardsTime  # type: ignore[misc]  # there is no other way in
