"""`python -m benchmarks [NAME …] [--docs]`: run the benchmarks, print the table, write build/bench.json.

What was measured before stays in the file until it is measured again, so that one benchmark can be repeated alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from benchmarks import records
from benchmarks.measure import ROOT, Row
from benchmarks.page import page, table
from benchmarks.records import Record
from benchmarks.registry import BENCHMARKS, Benchmark
from swarmtrain.errors import EXIT_INTERRUPTED, SwarmtrainError

_FILE = ROOT / "build" / "bench.json"
_PAGE = ROOT / "docs" / "reference" / "speed.md"
_NAMES = [benchmark.name for benchmark in BENCHMARKS]


def main() -> int:
    """Run what the command line asks for and return the exit code."""
    parser = argparse.ArgumentParser(prog="make bench", description="; ".join(f"{each.name}: {each.what}" for each in BENCHMARKS))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(_NAMES)}; none: all")
    parser.add_argument("--docs", action="store_true", help="write docs/reference/speed.md from build/bench.json")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in _NAMES]:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    signal.signal(signal.SIGTERM, _interrupted)
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in arguments.names or not arguments.names]
    try:
        measured = [record for benchmark in chosen for record in _run(benchmark)]
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    sys.stdout.write(table(measured) + "\n")
    if arguments.docs:
        _PAGE.write_text(page(records.read(_FILE), _NAMES, _PAGE.read_text()))
        _tell(f"wrote {_PAGE.relative_to(ROOT)}")
    return 0


def _run(benchmark: Benchmark) -> list[Record]:
    """Run one benchmark; what it could not measure says why. The file has its rows as soon as it is done."""
    load, _, _ = os.getloadavg()
    _tell(f"{benchmark.name}: {benchmark.what} (load of the machine: {load:.1f})")
    rows: list[Row] = []
    try:
        rows.extend(benchmark.rows())
    except SwarmtrainError as error:
        why = " ".join(str(error).split())
        _tell(f"  not here: {why}")
        rows.append(Row(benchmark.name, benchmark.what, why_not=why))
    found = [records.record(row, load) for row in rows]
    records.write(_FILE, records.merged(records.read(_FILE), benchmark.name, found, _NAMES))
    return found


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _interrupted(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
