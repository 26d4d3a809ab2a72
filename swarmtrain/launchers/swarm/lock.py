"""One change at a time to a run: a lock in the swarm itself, since any machine that reaches a manager may deploy.

It is a config object beside the stack's own: the managers make one of a name only once, and take an update only from
whoever knows its newest version. While it is *held*, its holder changes things and renews it every few seconds; one
that stands still has lost its holder, and is taken over. While it is *lent*, its holder merely waits for containers,
and whoever wants to change something takes it: that it is gone tells the first one to leave everything alone.
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
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.engine import Engine, gone
from swarmtrain.launchers.swarm.observe import LABEL_DOES, LABEL_LOCK, LABEL_WHO
from swarmtrain.launchers.swarm.patience import USUAL, Patience
from swarmtrain.process import uninterrupted

_TOKEN = "swarmtrain.lock.token"  # noqa: S105  # a label's name
_SINCE = "swarmtrain.lock.since"
_LENT = "swarmtrain.lock.lent"
_LOOK = 0.5
_SAY_EVERY = 10.0


@dataclass(frozen=True)
class _Found:
    """The lock as the swarm has it."""

    id: str
    version: int
    labels: dict[str, str]

    def __str__(self) -> str:
        return f"{self.labels.get(LABEL_WHO, 'somebody')} {self.labels.get(LABEL_DOES, 'changes it')}"


class Lock:
    """The lock of one run, for one change of it. `does` says what is done to the run, in words that follow a name.

    `kind` is the label by which locks of its kind are found, and the last word of its name; `labels` are what else is to stand on it.
    """

    def __init__(self, engine: Engine, run: str, does: str, patience: Patience = USUAL, *, kind: str = LABEL_LOCK) -> None:
        self._engine, self._run, self._does, self._patience, self._kind = engine, run, does, patience, kind
        self._name = f"{run}_{kind.split('.')[1]}"
        self.labels: dict[str, str] = {}
        self._token = secrets.token_hex(8)
        self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self._lent = False
        self._lost = False
        self._renewed = time.monotonic()
        self._over = threading.Event()

    @contextlib.contextmanager
    def held(self, say: Say) -> Iterator[None]:
        """Wait until the lock is ours, saying whose it is, and give it back in the end. Raises EngineError."""
        try:
            self._take(say)
            threading.Thread(target=self._keep, name=f"lock of {self._run}", daemon=True).start()
            yield
        except BaseException:
            # What cannot be given back now is taken over by the next one.
            with contextlib.suppress(EngineError):
                self._release()
            raise
        self._release()

    def check(self) -> None:
        """Raise StackError if the lock has been lost, so that nothing more may be changed."""
        if self._lost or time.monotonic() - self._renewed > self._patience.valid:
            raise StackError(
                f"this command stood still for {self._patience.valid:.0f} s or longer, and has lost its turn to change the run",
                place=f"run {self._run}",
                hint=f"swarmtrain status {self._run}, and repeat the command",
            )

    def lend(self) -> None:
        """Let whoever wants take it from here on. Raises EngineError, StackError."""
        self._lent = True
        if not self._put():
            raise self.taken()

    def take_back(self) -> bool:
        """Hold it again; False if somebody else has taken it meanwhile. Raises EngineError."""
        self._lent = False
        self._lost = not self._put()
        return not self._lost

    def write(self) -> None:
        """Put `labels` on it as they are now. Raises EngineError, and StackError if it has been lost."""
        if not self._put():
            raise self.taken()

    def mine(self) -> bool:
        """Say whether nobody else has taken it since it was lent. Raises EngineError."""
        found = self._look()
        return found is not None and found.labels.get(_TOKEN) == self._token

    def taken(self) -> StackError:
        """Return what to say when somebody else has taken it. Raises EngineError."""
        found = self._look()
        who = str(found) if found else "somebody has changed it or taken it down"
        return StackError(
            f"{who} meanwhile; this command leaves everything alone", place=f"run {self._run}", hint=f"swarmtrain status {self._run}"
        )

    def _take(self, say: Say) -> None:
        last, looks, told = None, 0, float("-inf")
        while True:
            found = self._look()
            if found is None:
                if self._create():
                    return
                continue
            looks, last = (looks + 1 if found == last else 1), found
            if (_LENT in found.labels or looks > self._patience.looks) and self._update(found):
                return
            if time.monotonic() - told > _SAY_EVERY:
                told = time.monotonic()
                say(f"waiting: {found}, since {found.labels.get(_SINCE, 'some time')}")
            time.sleep(_LOOK)

    def _keep(self) -> None:
        while not self._over.wait(self._patience.renew):
            with contextlib.suppress(EngineError):
                if not self._lent and not self._put() and not self._lent and not self._over.is_set():
                    self._lost = True

    def _release(self) -> None:
        with uninterrupted():
            self._over.set()
            # Held first: what is lent may be another's a moment later, and then is not ours to remove.
            if self.take_back():
                self._engine.delete(f"/configs/{self._name}")

    def _put(self) -> bool:
        """Write the lock anew, held or lent; False if it is another's by now."""
        while True:
            found = self._look()
            if found is None or found.labels.get(_TOKEN) != self._token:
                return False
            if self._update(found):
                return True

    def _look(self) -> _Found | None:
        try:
            item = self._engine.get(f"/configs/{self._name}")
        except EngineError as error:
            if gone(error):
                return None
            raise
        return _Found(item["ID"], item["Version"]["Index"], item["Spec"].get("Labels") or {})

    def _create(self) -> bool:
        """Make the lock; False if somebody else was faster."""
        data = base64.b64encode(f"Somebody changes the run {self._run} of swarmtrain. The labels say who.\n".encode()).decode()
        started = time.monotonic()
        try:
            self._engine.post("/configs/create", {**self._spec(), "Data": data})
        except EngineError as error:
            if error.status == 409:
                return False
            raise
        self._renewed = started
        return True

    def _update(self, found: _Found) -> bool:
        """Make the lock ours, or keep it so; False if it has changed since it was found."""
        started = time.monotonic()
        try:
            self._engine.post(f"/configs/{found.id}/update", self._spec(), {"version": str(found.version)})
        except EngineError as error:
            if gone(error) or "out of sequence" in error.message:
                return False
            raise
        self._renewed = started
        return True

    def _spec(self) -> dict[str, Any]:
        labels = {self._kind: self._run, _TOKEN: self._token, LABEL_WHO: _who(), LABEL_DOES: self._does, _SINCE: self._since}
        return {"Name": self._name, "Labels": {**self.labels, **labels, **({_LENT: "yes"} if self._lent else {})}}


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user id without a name
        return f"somebody@{socket.gethostname()}"
