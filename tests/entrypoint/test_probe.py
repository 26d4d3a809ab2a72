"""The probe of one node: what it reports, and that it leaves nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any


def test_a_probe_reports_what_there_is_and_meets_the_others(small_run: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokens.bin").write_bytes(b"1234")
    small_run.start_coordinator()
    small_run.start_probe(mounts=(str(data),))
    assert small_run.wait_for_exit() == {"node0": 0, "coordinator": 0}
    [probe] = small_run.read_events("probe")
    [mount] = probe.data["mounts"]
    assert (mount["target"], mount["writable"], mount["visible_nodes"], mount["entries"]) == (str(data), True, ["node0"], 1)
    assert [path.name for path in data.iterdir()] == ["tokens.bin"], "its mark is gone"
    assert probe.data["problems"] == []
    assert abs(probe.data["clock"]) < 0.5
    assert probe.data["interface"] == "lo"
    assert probe.data["memory"] > 0
    [together] = small_run.read_events("collective")
    assert together.data["gloo"]["seconds"] > 0
    assert together.data["torch"].startswith("2.")
    assert [(event.data["status"], event.data["exit_code"]) for event in small_run.read_events("outcome")] == [("done", 0)]


def test_a_probe_exits_at_once_when_a_stop_is_requested_and_removes_its_mark(small_run: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    small_run.start_coordinator()
    probe = small_run.start_probe("nobody.invalid", mounts=(str(data),))
    end = time.monotonic() + 30
    while not list(data.iterdir()):
        assert time.monotonic() < end, small_run.format_transcript()
        time.sleep(0.05)
    probe.send_signal(signal.SIGTERM)
    assert probe.wait(10) == 143
    assert list(data.iterdir()) == []
