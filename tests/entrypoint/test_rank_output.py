"""Lines of ranks in the output of their node: whole, each with the number of its rank, whatever the ranks write."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmtrain.entrypoint.supervisor.rank_output import RankOutput


class Output:
    """The output of two ranks. `read` returns what was printed so far."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder / "0.log", folder / "1.log"]
        self._target_path = folder / "printed"
        self._target = os.open(self._target_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.copier = RankOutput({str(path): (f"[rank {rank}] ", self._target) for rank, path in enumerate(self.paths)})
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
    assert [line for line in lines if line.startswith(b"[rank 0] ")] == [b"[rank 0] 11 of 12"]


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
        for line in range(20_000):
            output.write(rank, f"{line}\n".encode())

    threads = [threading.Thread(target=write_lines, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = output.stop()
    for rank in (0, 1):
        prefix = f"[rank {rank}] "
        assert [line for line in lines if line.startswith(prefix.encode())] == [f"{prefix}{line}".encode() for line in range(20_000)]
