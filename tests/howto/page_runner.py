"""Follows a page: types its blocks into a shell on each machine, saves its files, and checks the expected output."""

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

from page import PageStep, find_missing_lines

Substitutions = Mapping[str, str | Callable[[str], str]]
_END_MARKER = "--- end of block, exit code "
_BLOCK_TIMEOUT_SECONDS = 480.0  # for one block; less than pytest's timeout of a test


class PageError(AssertionError):
    """A step of a page does not do what the page says."""


class Shell:
    """A bash process that lives from a page's first block to its last, like a reader's terminal."""

    def __init__(self, folder: Path, transcript: Path, env: Mapping[str, str], *, prefix: Sequence[str] = ()) -> None:
        transcript.parent.mkdir(parents=True, exist_ok=True)
        self._transcript, self._blocks = transcript, 0
        argv = [*prefix, "bash", "--noprofile", "--norc"]
        with transcript.open("wb") as output:
            self._bash = subprocess.Popen(
                argv, cwd=folder, env=dict(env), stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._send_input("set -eo pipefail\n")

    def run_block(self, text: str, *, until_pattern: str = "") -> str:
        """Run `text` to its end, or until `until_pattern` matches, and return its output. Raises PageError if a command fails."""
        self._blocks += 1
        start = self._transcript.stat().st_size
        block = self._transcript.with_name(f"{self._transcript.stem}-{self._blocks}.sh")
        block.write_text(f"{text}\n")
        run = f". {shlex.quote(str(block))} </dev/null"
        end = f"printf '\\n{_END_MARKER}%s\\n'"
        self._send_input(f"set +e; {run}; {end} $?; set -e\n" if until_pattern else f"{run}; {end} 0\n")
        output = self._wait_for_output(start, until_pattern)
        shown, _, code = output.rpartition(f"\n{_END_MARKER}")
        if code.strip() not in ("0", "130" if until_pattern else "0"):
            raise PageError(f"failed, with {code.strip() or self._bash.returncode}:\n{text}\n--- printed:\n{output}")
        return shown

    def close(self) -> None:
        """End the shell and everything that still runs in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()

    def _send_input(self, text: str) -> None:
        assert self._bash.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the shell has ended; the reader of its output raises
            self._bash.stdin.write(text.encode())
            self._bash.stdin.flush()

    def _wait_for_output(self, start: int, until_pattern: str) -> str:
        deadline = time.monotonic() + _BLOCK_TIMEOUT_SECONDS
        interrupted = False
        while True:
            ended = self._bash.poll() is not None
            output = self._transcript.read_bytes()[start:].decode(errors="replace")
            if ended or (f"\n{_END_MARKER}" in output and output.endswith("\n")):
                return output
            if until_pattern and not interrupted and re.search(until_pattern, output):
                interrupted = True
                for pid in _iterate_descendants(self._bash.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGINT)
            if time.monotonic() > deadline:
                raise PageError(f"did not finish within {_BLOCK_TIMEOUT_SECONDS:g} s; printed:\n{output}")
            time.sleep(0.05)


def _iterate_descendants(pid: int) -> Iterator[int]:
    """Yield the pids of the processes below `pid`, except the shell itself and nsenter, which enters another machine."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if Path(f"/proc/{pid}/comm").read_text().strip() not in ("bash", "nsenter"):
            yield pid
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield from _iterate_descendants(int(child))


class PageRunner:
    """Follows pages on `machines`. The first of them is the one that the pages call the first machine."""

    def __init__(
        self, machines: Sequence[Shell], substitutions: Substitutions | None = None, *, connected_machine: Shell | None = None
    ) -> None:
        """Create a runner.

        `substitutions` has a value for each word in capitals in the pages, or a function that finds it in the output so far.
        `connected_machine` has internet access; the others have none.
        """
        self._machines, self._substitutions, self._connected_machine = machines, substitutions or {}, connected_machine
        self.output = ""
        self._last_output = ""

    def run_steps(self, steps: Sequence[PageStep]) -> None:
        """Do all `steps` in order. Raises PageError with the line number in the page."""
        for step in steps:
            try:
                self._run_step(step)
            except PageError as error:
                raise PageError(f"line {step.line}, {step.heading}: {error}") from None

    def _run_step(self, step: PageStep) -> None:
        if step.kind == "see" and (missing := find_missing_lines(self._substitute(step.text), self._last_output)):
            raise PageError("the page shows what is not seen:\n" + "\n".join(missing) + f"\n--- printed:\n{self._last_output}")
        if step.kind not in ("type", "save"):
            return
        text = self._substitute(step.text)
        if step.kind == "save":
            text = f"cat >{shlex.quote(step.file_name)} <<'END OF FILE'\n{text}\nEND OF FILE"
        outputs = []
        for number, machine in enumerate(self._select_machines(step.machine)):
            began = time.monotonic()
            outputs.append(machine.run_block(text, until_pattern=step.until_pattern))
            print(f"{time.monotonic() - began:6.1f} s  line {step.line:3}  {step.machine if number == 0 else ''}: {text.splitlines()[0]}")
        self.output += "".join(outputs)
        if step.kind == "type":
            self._last_output = "".join(outputs)

    def _select_machines(self, machine: str) -> Sequence[Shell]:
        first, *others = self._machines
        if machine == "the connected machine":
            assert self._connected_machine is not None
            return [self._connected_machine]
        return {"the first machine": [first], "each of the others": others, "every machine": self._machines}[machine]

    def _substitute(self, text: str) -> str:
        for word, value in self._substitutions.items():
            if word in text:
                text = text.replace(word, value if isinstance(value, str) else value(self.output))
        return text
