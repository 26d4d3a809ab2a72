"""Watches whether this rank waits in torch's init_process_group, and reports it to the coordinator.

torch waits for up to 30 min there, for example for a rank 0 that died before it opened its store. If all ranks wait, and the group has not
formed after 60 s, ranks of the built-in trainer and of `run()` fail with that reason, and the run starts a new world. Other scripts may
have a reason to wait longer: of them, `swarmtrain status` and `why` only show which ranks wait for which address.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePath
from types import FrameType

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import ENV_RANK_STORE, ENV_WORLD, EVENT_FAILURE, ConnectingRank, ConnectingWorld, Event, NodeEnv
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_POLL_SECONDS = 5.0
_DEADLINE_SECONDS = 60.0
"""Seconds after the arrival of the last rank in init_process_group by which the process group must have formed."""
_TORCH_FUNCTION = (("torch", "distributed", "distributed_c10d.py"), "init_process_group")
_TRAINER_FUNCTION = (("swarmtrain", "trainer", "runtime.py"), "_init_process_group")


class ProcessGroupWatch:
    """Thread that watches the main thread of this rank until torch's default process group is initialized.

    `poll_seconds`: interval of the checks; two in a row count as waiting. `fail`: ends the process of this rank.
    """

    def __init__(
        self,
        env: NodeEnv,
        *,
        poll_seconds: float = _POLL_SECONDS,
        deadline_seconds: float = _DEADLINE_SECONDS,
        fail: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._env, self._poll_seconds, self._deadline_seconds, self._fail = env, poll_seconds, deadline_seconds, fail
        self._client = CoordinatorClient(env.coordinator)
        self._main_thread_id = threading.main_thread().ident
        environ = os.environ
        self._rank = ConnectingRank(
            environ[ENV_WORLD],
            int(environ["WORLD_SIZE"]),
            int(environ["RANK"]),
            env.node,
            environ[ENV_RANK_STORE],
            waits=True,
        )

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, name="process-group-watch", daemon=True).start()

    def _watch(self) -> None:
        polls, is_reported = 0, False
        while not has_process_group():
            frame = sys._current_frames().get(self._main_thread_id or 0)
            polls = polls + 1 if is_inside_function(frame, _TORCH_FUNCTION, _TRAINER_FUNCTION) else 0
            if polls >= 2:
                is_reported = True
                self._report_waiting(can_fail=is_inside_function(frame, _TRAINER_FUNCTION))
            elif is_reported:
                break
            time.sleep(self._poll_seconds)
        if is_reported:
            with suppress(CoordinatorError):
                self._client.report_connecting_rank(replace(self._rank, waits=False))

    def _report_waiting(self, *, can_fail: bool) -> None:
        try:
            world = self._client.report_connecting_rank(self._rank)
        except CoordinatorError:
            return  # the supervisor handles a coordinator that is unreachable
        has_all_ranks = world.waiting_ranks == self._rank.world_size
        if can_fail and has_all_ranks and world.seconds_since_last_arrival >= self._deadline_seconds:
            self._report_failure(world)
            self._fail()

    def _report_failure(self, world: ConnectingWorld) -> None:
        rank = self._rank
        error = (
            f"the process group did not form within {world.seconds_since_last_arrival:.0f} s after all {rank.world_size} ranks had "
            f"started to connect to rank 0 at {rank.address}"
        )
        hint = "check that the nodes reach each other: swarmtrain doctor CONFIG"
        facts = {"node": rank.node, "rank": rank.rank, "local_rank": int(os.environ["LOCAL_RANK"]), "world": rank.world}
        self._client.try_post_event(Event(EVENT_FAILURE, {**facts, "error": error, "hint": hint, "exit_code": 1}))
        sys.stderr.write(f"swarmtrain: {error}\n")
        sys.stderr.flush()


def has_process_group() -> bool:
    """Return whether torch's default process group is initialized in this process."""
    # The main thread may be importing the module.
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def is_inside_function(frame: FrameType | None, *functions: tuple[tuple[str, ...], str]) -> bool:
    """Return whether `frame`, or a frame that called it, runs one of `functions`: the end of a file's path, and the function's name."""
    while frame is not None:
        for path_end, name in functions:
            if frame.f_code.co_name == name and PurePath(frame.f_code.co_filename).parts[-len(path_end) :] == path_end:
                return True
        frame = frame.f_back
    return False
