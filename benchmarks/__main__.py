"""`python -m benchmarks [NAME …] [--docs]`: run the benchmarks, print the table, write build/bench.json.

The file keeps the earlier results of benchmarks that are not selected. `--docs` also writes docs/reference/speed.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from benchmarks import records
from benchmarks.measurement import ROOT, BenchmarkRow
from benchmarks.records import Record
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.speed_page import render_page, render_table
from swarmtrain.errors import EXIT_INTERRUPTED, SwarmtrainError

_RECORDS_FILE = ROOT / "build" / "bench.json"
_SPEED_PAGE = ROOT / "docs" / "reference" / "speed.md"
_BENCHMARK_NAMES = [benchmark.name for benchmark in BENCHMARKS]


def main() -> int:
    """Run the benchmarks that the command line selects, and return the exit code."""
    parser = argparse.ArgumentParser(prog="make bench", description="; ".join(f"{each.name}: {each.description}" for each in BENCHMARKS))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(_BENCHMARK_NAMES)}; none: all")
    parser.add_argument("--docs", action="store_true", help="write docs/reference/speed.md from build/bench.json")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in _BENCHMARK_NAMES]:
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(_BENCHMARK_NAMES)}")
    signal.signal(signal.SIGTERM, _raise_interrupt)
    selected = [benchmark for benchmark in BENCHMARKS if benchmark.name in arguments.names or not arguments.names]
    try:
        new_records = [record for benchmark in selected for record in _run_benchmark(benchmark)]
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    sys.stdout.write(render_table(new_records) + "\n")
    if arguments.docs:
        _SPEED_PAGE.write_text(render_page(records.read_records(_RECORDS_FILE), _BENCHMARK_NAMES, _SPEED_PAGE.read_text()))
        _print_progress(f"wrote {_SPEED_PAGE.relative_to(ROOT)}")
    return 0


def _run_benchmark(benchmark: Benchmark) -> list[Record]:
    """Run `benchmark`, write its rows to build/bench.json, and return them. A benchmark that cannot run yields a row with the reason."""
    load, _, _ = os.getloadavg()
    _print_progress(f"{benchmark.name}: {benchmark.description} (load of the machine: {load:.1f})")
    rows: list[BenchmarkRow] = []
    try:
        rows.extend(benchmark.measure_rows())
    except SwarmtrainError as error:
        reason = " ".join(str(error).split())
        _print_progress(f"  skipped: {reason}")
        rows.append(BenchmarkRow(benchmark.name, benchmark.description, skip_reason=reason))
    new_records = [records.build_record(row, load) for row in rows]
    records.write_records(
        _RECORDS_FILE, records.merge_records(records.read_records(_RECORDS_FILE), benchmark.name, new_records, _BENCHMARK_NAMES)
    )
    return new_records


def _print_progress(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _raise_interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
