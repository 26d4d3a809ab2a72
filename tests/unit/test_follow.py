"""Following a run on a terminal: printed lines scroll, and the progress bar stays below them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

SCRIPT = """
from swarmtrain.launchers.base import LogLine
from swarmtrain.view.update_printer import follow_updates
from swarmtrain.protocol import Event
numbers = {"steps": 200, "loss": 2.5, "tokens_per_second": 1234.5, "eta_seconds": 61}
progress = [Event("progress", {"step": step, **numbers}) for step in (50, 100)]
lines = [LogLine("node0", f"line {number}", rank=0) for number in range(3)]
end = Event("outcome", {"status": "done", "reason": "all is", "exit_code": 0})
follow_updates([lines[0], progress[0], lines[1], progress[1], lines[2], end])
"""


def test_a_bar_stays_below_what_is_printed() -> None:
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # the end of a pseudo-terminal
        pass
    assert program.wait() == 0, said.decode()
    os.close(ours)
    shown = said.decode()
    assert "step 100 of 200  loss 2.5000  1,234 tokens/s  1 min 01 s left" in shown
    assert shown.index("line 1") < shown.index(" 50 %") < shown.index("line 2") < shown.index("done: all is")
    assert "node0 rank 0" in shown


def test_without_a_terminal_there_are_lines_only() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, text=True)
    assert done.stdout.splitlines() == ["node0 rank 0 | line 0", "node0 rank 0 | line 1", "node0 rank 0 | line 2"]
    assert "%" not in done.stdout + done.stderr
