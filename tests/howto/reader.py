"""Who does what a page says: types its blocks into a shell on each machine, saves its files, and looks at what is shown."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from page import Step, seen

Fill = Mapping[str, str | Callable[[str], str]]
_END = "--- end of block, exit code "
_PATIENCE = 480.0  # seconds for one block; less than a test may take


class PageError(AssertionError):
    """A step of a page does not do what the page says."""


class Shell:
    """A bash that lives from a page's first block to its last, as a reader's terminal does."""

    def __init__(self, folder: Path, transcript: Path, env: Mapping[str, str], *, prefix: Sequence[str] = ()) -> None:
        transcript.parent.mkdir(parents=True, exist_ok=True)
        self._transcript, self._blocks = transcript, 0
        argv = [*prefix, "bash", "--noprofile", "--norc"]
        with transcript.open("wb") as output:
            self._bash = subprocess.Popen(
                argv, cwd=folder, env=dict(env), stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._send("set -eo pipefail\n")

    def type(self, text: str, *, until: str = "") -> str:
        """Run `text` to its end, or until a line matches `until`, and return what it printed. Raises PageError if a command fails."""
        self._blocks += 1
        begun = self._transcript.stat().st_size
        block = self._transcript.with_name(f"{self._transcript.stem}-{self._blocks}.sh")
        block.write_text(f"{text}\n")
        run = f". {shlex.quote(str(block))} </dev/null"
        end = f"printf '\\n{_END}%s\\n'"
        self._send(f"set +e; {run}; {end} $?; set -e\n" if until else f"{run}; {end} 0\n")
        output = self._wait(begun, until)
        shown, _, code = output.rpartition(f"\n{_END}")
        if code.strip() not in ("0", "130" if until else "0"):
            raise PageError(f"failed, with {code.strip() or self._bash.returncode}:\n{text}\n--- printed:\n{output}")
        return shown

    def close(self) -> None:
        """End the shell and whatever still runs in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()

    def _send(self, text: str) -> None:
        assert self._bash.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; whoever waits for its output is told
            self._bash.stdin.write(text.encode())
            self._bash.stdin.flush()

    def _wait(self, begun: int, until: str) -> str:
        deadline = time.monotonic() + _PATIENCE
        interrupted = False
        while True:
            ended = self._bash.poll() is not None
            output = self._transcript.read_bytes()[begun:].decode(errors="replace")
            if ended or (f"\n{_END}" in output and output.endswith("\n")):
                return output
            if until and not interrupted and re.search(until, output):
                interrupted = True
                for pid in _below(self._bash.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGINT)
            if time.monotonic() > deadline:
                raise PageError(f"not done after {_PATIENCE:g} s; printed:\n{output}")
            time.sleep(0.05)


def _below(pid: int) -> Iterator[int]:
    """Yield what runs below process `pid`, less the shell itself and what brings it to another machine."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if Path(f"/proc/{pid}/comm").read_text().strip() not in ("bash", "nsenter"):
            yield pid
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield from _below(int(child))


class Reader:
    """Follows pages on `machines`, the first of which is the one that the pages call so."""

    def __init__(self, machines: Sequence[Shell], fill: Fill | None = None, *, connected: Shell | None = None) -> None:
        """`fill` holds what stands in capitals in the pages, or how to find it in all that was printed so far.

        `connected` is a machine with a way out, where the others have none.
        """
        self._machines, self._fill, self._connected = machines, fill or {}, connected
        self.printed = ""
        self._last = ""

    def follow(self, steps: Sequence[Step]) -> None:
        """Do all `steps`, one after the other. Raises PageError that names the line of the page."""
        for step in steps:
            try:
                self._do(step)
            except PageError as error:
                raise PageError(f"line {step.line}, {step.heading}: {error}") from None

    def _do(self, step: Step) -> None:
        if step.kind == "see" and (missing := seen(self._filled(step.text), self._last)):
            raise PageError("the page shows what is not seen:\n" + "\n".join(missing) + f"\n--- printed:\n{self._last}")
        if step.kind not in ("type", "save"):
            return
        text = self._filled(step.text)
        if step.kind == "save":
            text = f"cat >{shlex.quote(step.file)} <<'END OF FILE'\n{text}\nEND OF FILE"
        outputs = []
        for number, machine in enumerate(self._on(step.where)):
            began = time.monotonic()
            outputs.append(machine.type(text, until=step.until))
            print(f"{time.monotonic() - began:6.1f} s  line {step.line:3}  {step.where if number == 0 else ''}: {text.splitlines()[0]}")
        self.printed += "".join(outputs)
        if step.kind == "type":
            self._last = "".join(outputs)

    def _on(self, where: str) -> Sequence[Shell]:
        first, *others = self._machines
        if where == "the connected machine":
            assert self._connected is not None
            return [self._connected]
        return {"the first machine": [first], "each of the others": others, "every machine": self._machines}[where]

    def _filled(self, text: str) -> str:
        for word, value in self._fill.items():
            if word in text:
                text = text.replace(word, value if isinstance(value, str) else value(self.printed))
        return text
