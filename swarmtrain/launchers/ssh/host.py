"""The machines of a run as a launcher sees them: one that is asked by a call, and one that is asked over SSH.

Over SSH, one `ssh` per host carries everything as long as a command lasts: first the modules of swarmtrain.host as a zip file,
then questions and answers. No shell line is made of what a config says, and no secret stands in one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shlex
import subprocess
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast
from weakref import finalize

from swarmtrain import process
from swarmtrain.errors import HostError, SwarmtrainError
from swarmtrain.host.hand import READY, Hand, base_of

HERE = "localhost"
"""The name of a host that is this machine, to which no SSH is needed."""
T = TypeVar("T")
_ANSWERS_WITHIN = 60.0
_ENDS_WITHIN = 10.0
_LAST_ANSWER = 3.0
# A host that is gone is noticed within 15 s; one that is slow to let us in has 15 s too.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
_PARALLEL = 64
_TRAVELS = ("__init__.py", "errors.py", "process.py", "host/*.py")
_BOOT = """
import sys, os, json, pathlib
told = json.loads(sys.stdin.buffer.readline())
base = pathlib.Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "swarmtrain" / ".hosts"
base.mkdir(mode=0o700, parents=True, exist_ok=True)
archive = base / (told["digest"] + ".zip")
content = sys.stdin.buffer.read(told["size"])
if not archive.exists():
    new = base / (".%s.%d" % (told["host"], os.getpid()))
    new.write_bytes(content)
    new.replace(archive)
sys.path.insert(0, str(archive))
from swarmtrain.host import hand
hand.serve(hand.base_of(told["host"]))
"""


class Host(Protocol):
    """A machine that can be asked what swarmtrain.host.hand.Hand answers."""

    @property
    def name(self) -> str:
        """What the config calls it."""
        ...

    def ask(self, what: str, *, within: float = _ANSWERS_WITHIN, **fields: Any) -> Any:
        """Return the answer, which is waited for `within` seconds. Raises HostError."""
        ...

    def close(self) -> None:
        """Let go of it; what runs there goes on."""
        ...


class Here:
    """This machine."""

    name = HERE

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._hand = Hand(base_of(HERE), self._closed.is_set)

    def ask(self, what: str, *, within: float = _ANSWERS_WITHIN, **fields: Any) -> Any:
        """Return the answer, at once. Raises HostError."""
        try:
            return self._hand.answer(what, fields)
        except (OSError, SwarmtrainError) as error:
            raise HostError(str(error), place=f"host {self.name}") from None

    def close(self) -> None:
        """What it is at is given up."""
        self._closed.set()


class Remote:
    """A machine behind `ssh NAME`, with the settings that the user's own ~/.ssh/config has for this name."""

    def __init__(self, name: str, python: str) -> None:
        self.name, self.python = name, python
        self._connection: _Connection | None = None
        self._one_at_a_time = threading.Lock()

    def ask(self, what: str, *, within: float = _ANSWERS_WITHIN, **fields: Any) -> Any:
        """Return the answer. Raises HostError, after which the next question opens a new connection."""
        with self._one_at_a_time:
            try:
                if self._connection is None:
                    self._connection = _Connection(self.name, self.python)
                    self._connection.introduce()
                reply = self._connection.ask([what, fields], within)
            except BaseException:
                self._drop()
                raise
        if "error" in reply:
            raise HostError(reply["error"], place=f"host {self.name}")
        return reply["answer"]

    @property
    def is_free(self) -> bool:
        """Whether there is a connection, with no question under way."""
        connection = self._connection
        return connection is not None and connection.ssh.poll() is None and not self._one_at_a_time.locked()

    def close(self) -> None:
        """Close the connection; a question that is under way has a moment, and then fails."""
        if not self._one_at_a_time.acquire(timeout=_LAST_ANSWER):
            if (connection := self._connection) is not None:
                connection.ssh.kill()
            self._one_at_a_time.acquire()
        try:
            self._drop()
        finally:
            self._one_at_a_time.release()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Connection:
    """One `ssh` and what goes through it."""

    def __init__(self, name: str, python: str) -> None:
        self.name, self.python = name, python
        argv = [*_SSH, name, shlex.join([python, "-c", f"exec({_BOOT!r})"])]
        # A session of its own, or Ctrl-C here would cut the connection before what it interrupts is undone.
        pipe = subprocess.PIPE
        self.ssh = process.start(argv, stdin=pipe, stdout=pipe, stderr=pipe, new_session=True)
        self.to, self.back, errors = (cast("IO[bytes]", stream) for stream in (self.ssh.stdin, self.ssh.stdout, self.ssh.stderr))
        # Left open, the pipe keeps ssh alive, and what Python keeps of a living child keeps the pipe. No thread may be started for it, nor
        # anything waited for: what collects garbage may hold any lock.
        finalize(self, self.to.close)
        os.set_blocking(self.to.fileno(), False)
        self.rest = b""
        self.errors: deque[str] = deque(maxlen=20)
        self.reader = threading.Thread(target=_keep, args=(errors, self.errors), daemon=True)
        self.reader.start()

    def introduce(self) -> None:
        """Send the hand and wait until it is there. Raises HostError."""
        content = _archive()
        told = {"size": len(content), "digest": sha256(content).hexdigest()[:16], "host": self.name}
        until = time.monotonic() + _ANSWERS_WITHIN
        self._send(json.dumps(told).encode() + b"\n" + content, until)
        while self._line(until).decode(errors="replace").strip() != READY:
            pass

    def ask(self, question: list[Any], within: float) -> dict[str, Any]:
        """Return the reply. Raises HostError."""
        until = time.monotonic() + within
        self._send(json.dumps(question).encode() + b"\n", until)
        return dict(json.loads(self._line(until)))

    def close(self) -> None:
        """Close it, and wait until the other side has ended what it was at."""
        with contextlib.suppress(OSError):
            self.to.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ssh.wait(_ENDS_WITHIN)
        if self.ssh.poll() is None:
            self.ssh.kill()
            self.ssh.wait()
        self.back.close()

    def _send(self, content: bytes, until: float) -> None:
        while content:
            if not select.select([], [self.to], [], max(0.0, until - time.monotonic()))[1]:
                raise self._silent()
            try:
                content = content[os.write(self.to.fileno(), content) :]
            except OSError:
                raise self._ended() from None

    def _line(self, until: float) -> bytes:
        parts = [self.rest]
        while b"\n" not in parts[-1]:
            if not select.select([self.back], [], [], max(0.0, until - time.monotonic()))[0]:
                raise self._silent()
            if not (chunk := os.read(self.back.fileno(), 1 << 20)):
                raise self._ended()
            parts.append(chunk)
        line, _, self.rest = b"".join(parts).partition(b"\n")
        return line

    def _silent(self) -> HostError:
        return HostError("does not answer", place=f"host {self.name}", hint=f"ssh {self.name} true shows whether it is there")

    def _ended(self) -> HostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ssh.wait(_ENDS_WITHIN)
        self.reader.join(1.0)
        said = [line for line in self.errors if not line.startswith("Warning: Permanently added")]
        text = said[-1].strip() if said else "the connection has ended"
        return HostError(text, place=f"host {self.name}", hint=_hint(self.name, text, self.python, self.ssh.returncode))


class Connections:
    """Connections that one command opens once, though it asks the same hosts again and again; those left end with this."""

    def __init__(self) -> None:
        self._free: dict[tuple[str, str], Remote] = {}

    def to(self, names: Sequence[str], pythons: Mapping[str, str]) -> Team:
        """Return hosts by their names, and by the interpreter that each has. What is not open is opened when it is asked."""
        return Team([self._host(name, pythons) for name in names], pythons, self._give_back)

    def _host(self, name: str, pythons: Mapping[str, str]) -> Host:
        if name == HERE:
            return Here()
        free = self._free.pop((name, pythons[name]), None)
        return free if free and free.is_free else Remote(name, pythons[name])

    def _give_back(self, host: Host) -> None:
        if isinstance(host, Remote) and host.is_free and (host.name, host.python) not in self._free:
            self._free[host.name, host.python] = host
        else:
            host.close()


class Team:
    """Several hosts, asked side by side."""

    def __init__(
        self, hosts: Sequence[Host], pythons: Mapping[str, str], let_go: Callable[[Host], None] = lambda host: host.close()
    ) -> None:
        self.hosts = {host.name: host for host in hosts}
        self._pythons, self._let_go = pythons, let_go

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def python(self, name: str) -> str:
        """Return the interpreter that a host has."""
        return self._pythons[name]

    def each(self, work: Callable[[Host], T], among: Collection[str] | None = None) -> dict[str, T]:
        """Return what `work` returns for each host, or for those `among` them. Raises the first HostError, when all are done."""
        done, failed = self.tried(work, among)
        for error in failed.values():
            raise error
        return done

    def tried(self, work: Callable[[Host], T], among: Collection[str] | None = None) -> tuple[dict[str, T], dict[str, HostError]]:
        """Return what `work` returns for each host that it works for, and why it did not for the others."""
        names = [name for name in self.hosts if among is None or name in among]
        done: dict[str, T] = {}
        failed: dict[str, HostError] = {}
        if not names:
            return done, failed
        with ThreadPoolExecutor(min(_PARALLEL, len(names))) as threads:
            futures = {name: threads.submit(work, self.hosts[name]) for name in names}
        for name, future in futures.items():
            try:
                done[name] = future.result()
            except HostError as error:
                failed[name] = error
        return done, failed

    def close(self) -> None:
        """Let go of all of them."""
        with contextlib.suppress(HostError):
            self.each(self._let_go)


def connect(names: Sequence[str], pythons: Mapping[str, str]) -> Team:
    """Return hosts by their names, and by the interpreter that each has. Nothing is opened yet."""
    return Team([Here() if name == HERE else Remote(name, pythons[name]) for name in names], pythons)


def _archive() -> bytes:
    """Return the modules that a host needs, as a zip file whose main program is the keeper; the same bytes each time."""
    root = Path(__file__).parents[2]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for pattern in _TRAVELS for path in root.glob(pattern)):
            archive.writestr(zipfile.ZipInfo(f"swarmtrain/{path.relative_to(root)}"), path.read_bytes())
        archive.writestr(zipfile.ZipInfo("__main__.py"), b"import runpy\nrunpy.run_module('swarmtrain.host.keeper', run_name='__main__')\n")
    return content.getvalue()


def _keep(stream: IO[bytes], lines: deque[str]) -> None:
    with stream:
        lines.extend(line.decode(errors="replace").rstrip() for line in stream if line.strip())


def _hint(name: str, text: str, python: str, code: int | None) -> str:
    if "Permission denied" in text:
        return f"ssh-copy-id {name} lets you in without a password; ssh {name} true proves it"
    if "Host key verification failed" in text:
        return f"ssh {name} asks once whether its key is the right one"
    if code in (126, 127):
        return f"runner.python is the interpreter on the hosts; {python} is not on {name}"
    return f"ssh {name} true shows more"
