"""The hand of a launcher on one machine: asked by a call there, or over SSH by lines of JSON, one question and one answer at a time.

Over SSH this module comes in a zip file by the same standard input, so the machine need have nothing but Python. Each public
method of Hand is a question. What it is asked travels in no command line and no environment.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from swarmtrain.host.environment import Environment, made
from swarmtrain.host.folder import EVENTS, LOCK, MARK, Folder
from swarmtrain.host.spec import Spec, replace_bytes

READY = "swarmtrain hand"
"""The line before the first answer: what a shell's start-up files print comes before it."""
SECRET, OPEN = 0o600, 0o644
_GPUS = Path("/proc/driver/nvidia/gpus")
_AT_ONCE = 1 << 22
_POLL = 0.1
_PROVED_WITHIN = 60.0
_PROOF = """
import importlib.util, json, sys
import swarmtrain
print(json.dumps({"swarmtrain": swarmtrain.__version__, "torch": importlib.util.find_spec("torch") is not None}))
"""


class Hand:
    """Works on the folders of runs below `base`, as long as whoever asks is not `gone`."""

    def __init__(self, base: Path, gone: Callable[[], bool] = lambda: False) -> None:
        self.base = base
        self._gone = gone
        self._locks: dict[str, IO[str]] = {}
        self._environments: dict[str, Environment] = {}

    def answer(self, what: str, fields: dict[str, Any]) -> Any:
        """Return the answer to the question `what`. Raises whatever goes wrong."""
        if what.startswith("_") or what == "answer":
            raise ValueError(f"no such question: {what}")
        return getattr(self, what)(**fields)

    def facts(self, cwd: str = "", ports: tuple[int, ...] = ()) -> dict[str, Any]:
        """Return what this machine is, which of `ports` are taken, and whether the folder `cwd` is here."""
        connection = os.environ.get("SSH_CONNECTION", "").split()
        return {
            "host": socket.gethostname(),
            "address": connection[2] if len(connection) == 4 else "",  # as sshd documents it
            "python": platform.python_version(),
            "gpus": len(list(_GPUS.glob("*"))),
            "time": time.time(),
            "user": f"{os.getuid()}:{os.getgid()}",
            "home": str(Path.home()),
            "cwd": bool(cwd) and Path(cwd).is_dir(),
            "taken": [port for port in ports if _taken(port)],
        }

    def prove(self, argv: list[str], env: dict[str, str]) -> dict[str, Any]:
        """Return the version of swarmtrain that the interpreter `argv` finds, and whether it finds torch; else why it does not."""
        try:
            done = subprocess.run(
                [*argv, "-c", _PROOF],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PROVED_WITHIN,
                check=True,
            )
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.CalledProcessError as error:
            return {"error": error.stderr.strip().splitlines()[-1] if error.stderr.strip() else f"exit code {error.returncode}"}
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            return {"error": str(error)}

    def command(self, argv: list[str], seconds: float, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run `argv` to its end, within so many seconds, with `env` added; return its exit code and what it printed."""
        more = {**os.environ, **env} if env else None
        try:
            done = subprocess.run(argv, env=more, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return {"code": 127, "output": str(error)}
        return {"code": done.returncode, "output": done.stdout + done.stderr}

    def mark(self, path: str, do: str) -> bool:
        """`make`, `look` for or `remove` the empty file `path`; return whether it was or is there, whatever the system says."""
        with contextlib.suppress(OSError):
            if do == "make":
                Path(path).touch()
            elif do == "remove":
                Path(path).unlink(missing_ok=True)
            return Path(path).exists()
        return False

    def runs(self) -> list[str]:
        """Return the names of the runs here, sorted."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(path.name for path in self.base.iterdir() if Folder(path).exists)
        return []

    def look(self, run: str) -> dict[str, Any]:
        """Return what the run's folder says: its path, its mark (None: there is no such run here), specs, states and who is alive."""
        folder = self._folder(run)
        names = folder.names()
        # First: what is started meanwhile is then not there yet, instead of there with a spec that nobody has read.
        alive = [name for name in names if folder.alive(name)]
        return {
            "path": str(folder.path),
            "mark": json.loads((folder.path / MARK).read_text(encoding="utf-8")) if folder.exists else None,
            "specs": {name: asdict(spec) for name in names if (spec := folder.spec(name))},
            "states": {name: asdict(state) if (state := folder.state(name)) else None for name in names},
            "alive": alive,
        }

    def put(self, run: str, files: dict[str, tuple[str, int]]) -> None:
        """Write files, each a content in base64 and a mode, in this order."""
        folder = self._folder(run).path
        for name, mode in ((".", 0o700), ("code", 0o755), ("logs", 0o755), ("secrets", 0o700)):
            (folder / name).mkdir(mode=mode, parents=True, exist_ok=True)
        for name, (content, mode) in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(folder / name, base64.b64decode(content), mode=mode)

    def get(self, run: str, names: list[str]) -> dict[str, str]:
        """Return what files hold, in base64."""
        folder = self._folder(run).path
        return {name: base64.b64encode((folder / name).read_bytes()).decode() for name in names}

    def drop(self, run: str, names: list[str]) -> None:
        """Remove files."""
        for name in names:
            (self._folder(run).path / name).unlink(missing_ok=True)

    def launch(self, run: str, specs: list[dict[str, Any]]) -> None:
        """Start a keeper for each of `specs`."""
        for spec in specs:
            self._folder(run).launch(Spec(**spec))

    def end(self, run: str, names: list[str] | None, grace: float) -> None:
        """Stop `names`, or all, and everything below them, and forget nothing."""
        folder = self._folder(run)
        folder.end(folder.names() if names is None else names, grace)

    def forget(self, run: str, names: list[str]) -> None:
        """Remove keepers' files; their logs stay."""
        for name in names:
            self._folder(run).forget(name)

    def put_old_events_aside(self, run: str) -> None:
        """Begin new files of events and logs."""
        self._folder(run).put_old_events_aside()

    def remove(self, run: str) -> None:
        """Remove the run and all that is kept of it here."""
        folder = self._folder(run)
        folder.remove()
        folder.erase()
        with contextlib.suppress(OSError):
            self.base.rmdir()

    def lock(self, run: str, who: str) -> str:
        """Take the right to change the run for as long as this hand lives, or until `unlock`; if it is taken, return by whom."""
        folder = self._folder(run).path
        folder.mkdir(parents=True, exist_ok=True)
        file, holder = _take(folder / LOCK, who)
        if file:
            self._locks[run] = file
        return holder

    def unlock(self, run: str) -> None:
        """Give that right back; a folder in which there is nothing else is removed."""
        if file := self._locks.pop(run, None):
            folder = self._folder(run).path
            with contextlib.suppress(OSError):
                if [entry.name for entry in folder.iterdir()] == [LOCK]:
                    (folder / LOCK).unlink()
                    folder.rmdir()
            file.close()

    def environment(self, path: str, python: str, digest: str, who: str) -> dict[str, Any]:
        """Return the `key` of the environment at `path` with the content `digest`, and whether it is `current`.

        If not, the right to make it is taken, until it is made; if that is taken, return the `holder`.
        """
        made(Path(path)).mkdir(parents=True, exist_ok=True)
        file, holder = _take(made(Path(path)) / LOCK, who)
        if file is None:
            return {"holder": holder}
        found = Environment(Path(path), file)
        try:
            key = found.key(python, digest)
            current = found.is_current(key)
        except BaseException:
            file.close()
            raise
        if current:
            file.close()
        else:
            self._environments[path] = found
        return {"holder": "", "key": key, "current": current}

    def put_wheel(self, path: str, name: str, offset: int, content: str) -> None:
        """Write a part of a wheel for the environment that is to be made."""
        self._environments[path].put(name, offset, content)

    def make_environment(self, path: str, python: str, key: str, lines: list[str], index: bool) -> dict[str, str]:
        """Make it, and give the right to it back; return what went wrong, if anything."""
        found = self._environments.pop(path)
        try:
            return found.make(python, key, lines, index=index, gone=self._gone)
        finally:
            found.lock.close()

    def news(
        self, run: str, offsets: dict[str, int], wait: float = 0.0, tail: int | None = None, only: list[str] | None = None
    ) -> dict[str, Any]:
        """Return how the run stands and what its files hold beyond `offsets`, as soon as there is more, or after `wait` seconds.

        A file without an offset is read from its start, or its last `tail` lines. `only` these files. `more`: ask again at once.
        """
        until = time.monotonic() + wait
        before: Any = None
        while True:
            look = self.look(run)
            stands = {key: look[key] for key in ("states", "alive")} | {"exists": look["mark"] is not None}
            files, reached, more = self._files(run, offsets, tail, only)
            if files or time.monotonic() >= until or before not in (None, stands):
                return {**stands, "files": files, "offsets": reached, "more": more}
            before = stands
            time.sleep(_POLL)

    def _files(
        self, run: str, offsets: dict[str, int], tail: int | None, only: list[str] | None
    ) -> tuple[dict[str, str], dict[str, int], bool]:
        found: dict[str, str] = {}
        reached: dict[str, int] = {}
        more = False
        folder = self._folder(run)
        for path in (folder.events, *(folder.log(name) for name in folder.names())):
            if only is not None and path.name not in only:
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                at = offsets.get(path.name)
                at = (0 if tail is None or path.name == EVENTS else _start_of_last(file, size, tail)) if at is None or at > size else at
                file.seek(at)
                whole, newline, _ = file.read(_AT_ONCE).rpartition(b"\n")
                reached[path.name] = at
                if newline:
                    found[path.name] = whole.decode(errors="replace")
                    reached[path.name] = at + len(whole) + 1
                    more = more or at + _AT_ONCE < size
        return found, reached, more

    def _folder(self, run: str) -> Folder:
        return Folder(self.base / run)


def serve(base: Path) -> None:
    """Answer what comes on standard input until it ends: whoever asked has gone then, and what was started stays."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing that is started here may answer for us
    hand = Hand(base, _hung_up)
    out.write(READY + "\n")
    out.flush()
    for line in sys.stdin:
        try:
            what, fields = json.loads(line)
            reply = {"answer": hand.answer(what, fields)}
        except Exception as error:  # noqa: BLE001  # the other side is to know, whatever it is
            text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            where = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
            reply = {"error": where + text.lower() if isinstance(error, OSError) else f"{type(error).__name__}: {text}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def _hung_up() -> bool:
    poll = select.poll()
    poll.register(0, select.POLLHUP | select.POLLRDHUP)
    return bool(poll.poll(0))


def _take(path: Path, who: str) -> tuple[IO[str] | None, str]:
    """Return the lock file at `path`, open and held as long as it is, or None and who holds it."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read() or "somebody"
        file.close()
        return None, holder
    file.truncate(0)
    file.write(who)
    file.flush()
    return file, ""


def base_of(host: str) -> Path:
    """Return the folder of the runs of the machine that launchers call `host`: hosts may share a home, and have a folder each there."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "swarmtrain" / ".hosts" / host


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _start_of_last(file: IO[bytes], size: int, lines: int) -> int:
    """Return where the last `lines` lines of a file of `size` bytes begin."""
    end, found = size, b""
    while end > 0 and found.count(b"\n") <= lines:
        begin = max(0, end - (1 << 16))
        file.seek(begin)
        found, end = file.read(end - begin) + found, begin
    wanted = found.splitlines(keepends=True)[-lines:] if lines else []
    return size - sum(map(len, wanted))
