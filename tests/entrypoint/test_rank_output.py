"""Lines of ranks in the output of their node: whole, each with the number of its rank, whatever the ranks write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtrain.entrypoint.supervisor.rank_output import RankOutput
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.common.history_store import parse_log_line
from swarmtrain.protocol import INTERIM_SUFFIX


class Output:
    """The output of two ranks. `read` returns what was printed so far."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / "0.log", folder / "1.log"]
        self._target_path = folder / "printed"
        self.target = os.open(self._target_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.copier = RankOutput({str(path): (f"[rank {rank}] ", self.target) for rank, path in enumerate(self.paths)})
        self.copier.start()

    def write(self, rank: int, content: bytes) -> None:
        with self.paths[rank].open("ab") as file:
            file.write(content)

    def read(self) -> bytes:
        return self._target_path.read_bytes()

    def wait_for(self, content: bytes) -> None:
        end = time.monotonic() + 20
        while content not in self.read():
            assert time.monotonic() < end, self.read()[-500:]
            time.sleep(0.02)

    def stop(self) -> list[bytes]:
        self.copier.stop()
        return self.read().splitlines()


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    output = Output(tmp_path)
    yield output
    output.copier.stop()


def test_a_line_is_printed_when_it_is_complete(output: Output) -> None:
    output.write(0, b"one\ntw")
    output.wait_for(b"[rank 0] one\n")
    output.write(1, b"of another\n")
    output.wait_for(b"[rank 1] of another\n")
    output.write(0, b"o\n")
    output.wait_for(b"[rank 0] two\n")
    output.write(1, b"without an end")
    assert output.stop()[-1] == b"[rank 1] without an end"


def test_no_rank_swallows_the_lines_of_another_that_draws_a_progress_bar(output: Output) -> None:
    for step in range(12):
        output.write(0, f"\r{step:2} of 12".encode())
        output.write(1, f"line {step}\n".encode())
        time.sleep(0.02)
    output.write(0, b"\r\n")
    lines = output.stop()
    assert [line for line in lines if line.startswith(b"[rank 1] ")] == [f"[rank 1] line {step}".encode() for step in range(12)]
    bar = [line for line in lines if line.startswith(b"[rank 0] ") and not line.endswith(INTERIM_SUFFIX.encode())]
    assert bar == [b"[rank 0] 11 of 12"]


def test_carriage_returns_at_the_end_of_a_state_and_before_a_line_end(output: Output) -> None:
    for content in (b"one\r", b"two\r", b"three\r\n", b"four\r", b"\n", b"\r\r\n"):
        output.write(0, content)
        time.sleep(0.2)
    lines = [line for line in output.stop() if not line.endswith(INTERIM_SUFFIX.encode())]
    assert lines == [b"[rank 0] three", b"[rank 0] four", b"[rank 0] "]


def test_long_lines_and_bytes_that_are_no_text_survive(output: Output) -> None:
    long_line, bytes_line = (
        os.urandom(2**20).replace(b"\n", b"").replace(b"\r", b""),
        bytes(range(256)).replace(b"\n", b"").replace(b"\r", b""),
    )
    output.write(0, long_line + b"\n")
    output.write(1, bytes_line + b"\n")
    output.copier.stop()
    assert sorted(output.read().split(b"\n")) == sorted([b"", b"[rank 0] " + long_line, b"[rank 1] " + bytes_line])


def test_every_line_of_a_rank_that_writes_fast_is_printed_in_order(output: Output) -> None:
    def write_lines(rank: int) -> None:
        for line in range(5_000):
            output.write(rank, f"{line}\n".encode())

    threads = [threading.Thread(target=write_lines, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = output.stop()
    for rank in (0, 1):
        prefix = f"[rank {rank}] "
        assert [line for line in lines if line.startswith(prefix.encode())] == [f"{prefix}{line}".encode() for line in range(5_000)]


def test_a_progress_bar_is_printed_once_per_second_and_its_last_state_as_a_line(output: Output) -> None:
    end, step = time.monotonic() + 2.5, 0
    while time.monotonic() < end:
        step += 1
        output.write(0, f"\rstep {step}".encode())
        time.sleep(0.01)
    interim_lines = output.read().splitlines()
    assert 1 <= len(interim_lines) <= 4
    assert all(line.startswith(b"[rank 0] step ") and line.endswith(INTERIM_SUFFIX.encode()) for line in interim_lines)
    output.write(0, b"\rdone\nnext\n")
    assert output.stop()[-2:] == [b"[rank 0] done", b"[rank 0] next"]
    assert parse_log_line("node0", interim_lines[0].decode()) == LogLine("node0", interim_lines[0][9:-3].decode(), 0, is_interim=True)
    assert parse_log_line("node0", "[rank 0] done") == LogLine("node0", "done", 0)


def test_lines_are_printed_again_once_the_disk_is_no_longer_full(output: Output) -> None:
    full, file = os.open("/dev/full", os.O_WRONLY), os.dup(output.target)
    os.dup2(full, output.target)
    output.write(0, b"not printed\n")
    output.write(1, b"not printed either\n")
    time.sleep(0.5)
    os.dup2(file, output.target)
    output.write(0, b"printed\n")
    output.wait_for(b"[rank 0] printed\n")
    assert b"not printed" not in output.read()
    for descriptor in (full, file):
        os.close(descriptor)
