"""A probe of one node: what it tells, and what it leaves."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any


def test_a_probe_tells_what_there_is_and_meets_the_others(small_run: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokens.bin").write_bytes(b"1234")
    small_run.start_board()
    small_run.start_probe(mounts=(str(data),))
    assert small_run.finish() == {"node0": 0, "board": 0}
    [probe] = small_run.events("probe")
    [mount] = probe.data["mounts"]
    assert (mount["target"], mount["writable"], mount["seen"], mount["entries"]) == (str(data), True, ["node0"], 1)
    assert [path.name for path in data.iterdir()] == ["tokens.bin"], "its mark is gone"
    assert probe.data["problems"] == []
    assert abs(probe.data["clock"]) < 0.5
    assert probe.data["interface"] == "lo"
    assert probe.data["memory"] > 0
    [together] = small_run.events("together")
    assert together.data["gloo"]["seconds"] > 0
    assert together.data["torch"].startswith("2.")
    assert [(event.data["status"], event.data["exit_code"]) for event in small_run.events("verdict")] == [("done", 0)]


def test_a_probe_that_is_told_to_stop_leaves_at_once_and_takes_its_mark_away(small_run: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    small_run.start_board()
    probe = small_run.start_probe("nobody.invalid", mounts=(str(data),))
    end = time.monotonic() + 30
    while not list(data.iterdir()):
        assert time.monotonic() < end, small_run.transcript()
        time.sleep(0.05)
    probe.send_signal(signal.SIGTERM)
    assert probe.wait(10) == 143
    assert list(data.iterdir()) == []
