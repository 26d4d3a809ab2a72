"""Keeps one process of a run going, as Swarm's `restart_policy: on-failure` does: 0 is final, all else comes back.

`python -m swarmtrain.host.keeper SPEC`, started by the launcher, in a session of its own. SIGTERM is handed on
to the process, which then is not started again. What becomes of it is written beside SPEC, with the suffix .state.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from swarmtrain.host.folder import clean
from swarmtrain.host.log import written_down
from swarmtrain.host.spec import Spec, State, replace
from swarmtrain.process import start

_DELAY = 1.0
_LOOK_EVERY = 0.1


class Keeper:
    """The loop around one process."""

    def __init__(self, path: Path) -> None:
        self.spec = Spec.load(path)
        self.report = path.with_suffix(".state")
        self.stopping = False
        self.restarts = 0

    def run(self) -> int:
        """Return when the process has ended with 0, or was told to stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self.stopping:
            code = self._once()
            if code == 0:
                self._say("complete", 0)
                return 0
            self._say("shutdown" if self.stopping else "failed", code)
            self._pause()
            self.restarts += 1
        return 0

    def _once(self) -> int:
        with self._output() as (out, errors):
            if self.spec.prepare and (code := self._prepare(errors)):
                return code
            child = start(self.spec.argv, env=self.spec.env, cwd=self.spec.cwd, stdout=out, stderr=errors, die_with_parent=True)
            self._say("running")
            return self._ended(child)

    def _ended(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for its end, which is asked for as soon as this keeper is to stop, and again where that did not get through."""
        asked = False
        while True:
            if self.stopping and not asked:
                asked = self._ask_to_end(child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=_LOOK_EVERY)

    def _ask_to_end(self, child: subprocess.Popen[bytes]) -> bool:
        if not self.spec.end:
            child.terminate()
            return True
        return subprocess.run(self.spec.end, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0

    def _prepare(self, errors: IO[bytes]) -> int:
        """Return 0 if the process can be started, and is still to be. What an earlier one may have left is in the way only then."""
        code = self._make(subprocess.DEVNULL)
        if code and not self.stopping:
            clean(self.spec)
            code = self._make(errors)
        return code or (-signal.SIGTERM if self.stopping else 0)

    def _make(self, errors: IO[bytes] | int) -> int:
        return start(self.spec.prepare, env=self.spec.env, cwd=self.spec.cwd, stdout=subprocess.DEVNULL, stderr=errors).wait()

    @contextlib.contextmanager
    def _output(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Where the process prints to: one log for all, or a file of its own making and a log of its errors."""
        out, errors = Path(self.spec.stdout), Path(self.spec.stderr)
        with written_down(errors) as log:
            if out == errors:
                yield log, log
            else:
                with out.open("ab") as file:
                    yield file, log

    def _pause(self) -> None:
        until = time.monotonic() + _DELAY
        while not self.stopping and time.monotonic() < until:
            time.sleep(0.05)

    def _say(self, state: str, exit_code: int | None = None) -> None:
        replace(self.report, json.dumps(asdict(State(os.getpid(), state, exit_code, self.restarts))))

    def _stop(self, *_: Any) -> None:
        self.stopping = True


if __name__ == "__main__":
    sys.exit(Keeper(Path(sys.argv[1])).run())
