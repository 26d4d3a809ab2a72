"""Lock that serializes changes to a run. It is stored in the swarm, since any machine that reaches a manager may deploy.

The lock is a Swarm config object, separate from those of the stack: the managers create only one object per name, and accept an update
only if it contains the object's newest version. While the lock is *held*, its holder makes changes and renews the lock every few seconds; a
lock that is no longer renewed is taken over. While the lock is *preemptible*, its holder only waits for containers, and any other command
that wants to make changes takes the lock: the first holder notices the loss and makes no more changes.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import EngineError, StackError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine, is_not_found_error, is_outdated_version_error
from swarmtrain.launchers.swarm.cluster_state import LABEL_LOCK, LABEL_LOCK_ACTION, LABEL_LOCK_OWNER
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts
from swarmtrain.process import defer_signals

_TOKEN_LABEL = "swarmtrain.lock.token"  # noqa: S105  # a label's name
_SINCE_LABEL = "swarmtrain.lock.since"
_PREEMPTIBLE_LABEL = "swarmtrain.lock.preemptible"
_POLL_SECONDS = 0.5
_LOG_INTERVAL_SECONDS = 10.0


@dataclass(frozen=True)
class _LockState:
    """The lock as stored in the swarm."""

    id: str
    version: int
    labels: dict[str, str]

    def __str__(self) -> str:
        return f"{self.labels.get(LABEL_LOCK_OWNER, 'an unknown user')} {self.labels.get(LABEL_LOCK_ACTION, 'is changing it')}"


class UnchangedLocks:
    """Locks that others hold, and since when each is unchanged, for a process that does not wait for a lock but tries again later."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[_LockState, float]] = {}

    def measure_unchanged_seconds(self, name: str, state: _LockState) -> float:
        """Return for how many seconds the lock `name` has been in `state`, by this process's observation."""
        seen_state, since = self._seen.get(name, (None, 0.0))
        if seen_state != state:
            since = time.monotonic()
            self._seen[name] = (state, since)
        return time.monotonic() - since

    def forget(self, name: str) -> None:
        """Forget the lock `name`, which this process has acquired."""
        self._seen.pop(name, None)


class RunLock:
    """Lock of one run, for one change. `action` describes the change, as a phrase that follows the holder's name: "is deploying it".

    `kind_label` is the label by which locks of this kind are found. It determines the suffix of the lock's name, unless `name` is given:
    then all runs have the same lock of this kind.
    """

    def __init__(
        self,
        engine: DockerEngine,
        run: str,
        action: str,
        timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS,
        *,
        kind_label: str = LABEL_LOCK,
        name: str = "",
    ) -> None:
        self._engine, self._run, self._action, self._timeouts, self._kind_label = engine, run, action, timeouts, kind_label
        self._name = name or f"{run}_{kind_label.split('.')[1]}"
        self._token = secrets.token_hex(8)
        self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._is_preemptible = False
        self._is_lost = False
        self._renewed_at = time.monotonic()
        self._released = threading.Event()

    @contextlib.contextmanager
    def hold_lock(self, report_progress: ProgressReporter) -> Iterator[None]:
        """Acquire the lock, reporting its holder while waiting, and release the lock at the end of the body. Raises EngineError."""
        try:
            self._wait_and_acquire_lock(report_progress)
            threading.Thread(target=self._renew_lock_periodically, name=f"lock of {self._run}", daemon=True).start()
            yield
        except BaseException:
            # If the lock cannot be released now, the next command takes it over.
            with contextlib.suppress(EngineError):
                self._release_lock()
            raise
        self._release_lock()

    @contextlib.contextmanager
    def hold_lock_if_free(self, unchanged_locks: UnchangedLocks) -> Iterator[bool]:
        """Acquire the lock if nobody holds it, and release it at the end of the body, which receives whether it was acquired.

        `unchanged_locks` is kept between attempts: a lock that is no longer renewed counts as free. Raises EngineError.
        """
        state = self._read_lock_state()
        if state is None:
            is_acquired = self._try_create_lock()
        else:
            stale_seconds = self._timeouts.stale_lock_polls * _POLL_SECONDS
            is_free = _PREEMPTIBLE_LABEL in state.labels or unchanged_locks.measure_unchanged_seconds(self._name, state) > stale_seconds
            is_acquired = is_free and self._try_update_lock(state)
        if not is_acquired:
            yield False
            return
        unchanged_locks.forget(self._name)
        threading.Thread(target=self._renew_lock_periodically, name=f"lock of {self._run}", daemon=True).start()
        try:
            yield True
        finally:
            with contextlib.suppress(EngineError):  # if the lock cannot be released now, the next command takes it over
                self._release_lock()

    def check_lock_held(self) -> None:
        """Check that this process still holds the lock, before each change. Raises StackError if the lock has been lost."""
        if self._is_lost or time.monotonic() - self._renewed_at > self._timeouts.lock_valid_seconds:
            raise StackError(
                f"this command was suspended for {self._timeouts.lock_valid_seconds:.0f} s or longer, and has lost the lock of the run",
                place=f"run {self._run}",
                hint=f"swarmtrain status {self._run}, then run the command again",
            )

    def allow_preemption(self) -> None:
        """Make the lock preemptible: other commands may take it from now on. Raises EngineError, StackError."""
        self._is_preemptible = True
        if not self._rewrite_lock():
            raise self.build_preemption_error()

    def reacquire_lock(self) -> bool:
        """Reacquire the preemptible lock. Return False if another command has acquired it in the meantime. Raises EngineError."""
        self._is_preemptible = False
        self._is_lost = not self._rewrite_lock()
        return not self._is_lost

    def is_held_by_this_command(self) -> bool:
        """Return whether no other command has taken the lock since it became preemptible. Raises EngineError."""
        state = self._read_lock_state()
        return state is not None and state.labels.get(_TOKEN_LABEL) == self._token

    def build_preemption_error(self) -> StackError:
        """Return the error for a lock that another command has taken. Raises EngineError."""
        state = self._read_lock_state()
        owner = str(state) if state else "another command has changed or removed it"
        return StackError(
            f"{owner} in the meantime; this command makes no more changes", place=f"run {self._run}", hint=f"swarmtrain status {self._run}"
        )

    def _wait_and_acquire_lock(self, report_progress: ProgressReporter) -> None:
        previous_state, unchanged_polls, reported_at = None, 0, float("-inf")
        while True:
            state = self._read_lock_state()
            if state is None:
                if self._try_create_lock():
                    return
                continue
            unchanged_polls, previous_state = (unchanged_polls + 1 if state == previous_state else 1), state
            if (_PREEMPTIBLE_LABEL in state.labels or unchanged_polls > self._timeouts.stale_lock_polls) and self._try_update_lock(state):
                return
            if time.monotonic() - reported_at > _LOG_INTERVAL_SECONDS:
                reported_at = time.monotonic()
                report_progress(f"waiting: {state}, since {state.labels.get(_SINCE_LABEL, 'an unknown time')}")
            time.sleep(_POLL_SECONDS)

    def _renew_lock_periodically(self) -> None:
        while not self._released.wait(self._timeouts.lock_renew_seconds):
            with contextlib.suppress(EngineError):
                if not self._is_preemptible and not self._rewrite_lock() and not self._is_preemptible and not self._released.is_set():
                    self._is_lost = True

    def _release_lock(self) -> None:
        with defer_signals():
            self._released.set()
            # Reacquire a preemptible lock before its removal: another command may have taken it, and then it must not be removed.
            if self.reacquire_lock():
                self._engine.delete(f"/configs/{self._name}")

    def _rewrite_lock(self) -> bool:
        """Renew the lock. Return False if another command has acquired or removed the lock."""
        while True:
            state = self._read_lock_state()
            if state is None or state.labels.get(_TOKEN_LABEL) != self._token:
                return False
            if self._try_update_lock(state):
                return True

    def _read_lock_state(self) -> _LockState | None:
        try:
            item = self._engine.get(f"/configs/{self._name}")
        except EngineError as error:
            if is_not_found_error(error):
                return None
            raise
        return _LockState(item["ID"], item["Version"]["Index"], item["Spec"].get("Labels") or {})

    def _try_create_lock(self) -> bool:
        """Create the lock. Return False if another command has created it first."""
        data = base64.b64encode(
            f"A command is changing the run {self._run} of swarmtrain. The labels identify its owner.\n".encode()
        ).decode()
        started_at = time.monotonic()
        try:
            self._engine.post("/configs/create", {**self._build_lock_spec(), "Data": data})
        except EngineError as error:
            if error.status == 409:
                return False
            raise
        self._renewed_at = started_at
        return True

    def _try_update_lock(self, state: _LockState) -> bool:
        """Acquire or renew the lock. Return False if the lock has changed since it was read."""
        started_at = time.monotonic()
        try:
            self._engine.post(f"/configs/{state.id}/update", self._build_lock_spec(), {"version": str(state.version)})
        except EngineError as error:
            if is_not_found_error(error) or is_outdated_version_error(error):
                return False
            raise
        self._renewed_at = started_at
        return True

    def _build_lock_spec(self) -> dict[str, Any]:
        labels = {
            self._kind_label: self._run,
            _TOKEN_LABEL: self._token,
            LABEL_LOCK_OWNER: _describe_user(),
            LABEL_LOCK_ACTION: self._action,
            _SINCE_LABEL: self._since,
        }
        return {"Name": self._name, "Labels": {**labels, **({_PREEMPTIBLE_LABEL: "yes"} if self._is_preemptible else {})}}


def _describe_user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name
        return f"somebody@{socket.gethostname()}"
