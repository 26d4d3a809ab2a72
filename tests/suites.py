"""Run the suites one after the other and print the time of each. `python tests/suites.py [NAME …]`; `fast` needs no torch and no lab.

With CI=true a skipped test fails the run: a machine that is to prove something must be able to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parent
_FAULTS = ["test_bad_images", "test_bad_nodes", "test_bad_swarm", "test_interruption", "test_plain_docker"]
SUITES = {
    "fast": ["unit", "golden", "architecture", "docs", "doctor", "mistakes"],
    "entrypoint": ["entrypoint"],
    "trainer": ["trainer"],
    "lab": [f"lab/{path.name}" for path in sorted((ROOT / "lab").glob("test_*.py")) if path.stem not in _FAULTS],
    "launchers": ["launchers", "interruption"],
    "faults": [f"lab/{name}.py" for name in _FAULTS],
    "howto": ["howto"],
}
# All of them take three quarters of an hour at most. On a machine so slow that this would not hold, the last suites are
# left out of a run of all, and said to be: each can be run by itself. Seconds from the start.
_LATEST_START = {"faults": 29 * 60.0, "howto": 28 * 60.0}
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_MEMORY_DISK = Path("/dev/shm")
_ENOUGH = 14 * 2**30


def main() -> int:
    names = sys.argv[1:] or list(SUITES)
    if unknown := [name for name in names if name not in SUITES]:
        print(f"no such suite: {', '.join(unknown)}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    with in_memory():
        return run_all(names)


@contextmanager
def in_memory() -> Iterator[None]:
    """Keep the labs' disks and the tests' folders in memory where there is enough: they write and remove many gigabytes."""
    given = {"SWARMTRAIN_LAB_DIR", "PYTEST_DEBUG_TEMPROOT"} & set(os.environ)
    if given or not _MEMORY_DISK.is_dir() or min(shutil.disk_usage(_MEMORY_DISK).free, _memory()) < _ENOUGH:
        yield
        return
    folder = Path(tempfile.mkdtemp(prefix="swarmtrain-", dir=_MEMORY_DISK))
    folder.chmod(0o755)
    labs, temporary = folder / "labs", folder / "tmp"
    temporary.mkdir()
    os.environ |= {"SWARMTRAIN_LAB_DIR": str(labs), "PYTEST_DEBUG_TEMPROOT": str(temporary)}
    print(f"the tests write to {folder}")
    yield
    shutil.rmtree(temporary, ignore_errors=True)
    with suppress(OSError):  # what a killed test left is a lab still: swarmtrain lab down removes it
        for path in (labs / "howto", labs, folder):
            if path.exists():
                path.rmdir()


def _memory() -> int:
    """Return the bytes of memory that programs can have."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


def run_all(names: list[str]) -> int:
    """Run the suites of these names and return the exit code."""
    rows, totals, failed = [], {"passed": 0, "failed": 0, "skipped": 0}, False
    begun = time.monotonic()
    for name in names:
        started = time.monotonic()
        if len(names) == len(SUITES) and started - begun > _LATEST_START.get(name, float("inf")):
            rows.append(f"{name:12} left out: the others took {(started - begun) / 60:.0f} min. make test SUITES={name}")
            continue
        code, counts = run(name)
        totals = {key: totals[key] + counts.get(key, 0) for key in totals}
        seconds = time.monotonic() - started
        skipped_in_ci = bool(counts.get("skipped")) and os.environ.get("CI") == "true"
        failed |= code != 0 or skipped_in_ci
        verdict = "FAILED" if code else "FAILED: nothing may be skipped here" if skipped_in_ci else "ok"
        rows.append(f"{name:12} {seconds:7.1f} s  {', '.join(f'{count} {word}' for word, count in counts.items()):40} {verdict}")
    print("\n" + "\n".join(rows))
    print(f"{totals['passed']} passed, {totals['failed'] + failed * (not totals['failed'])} failed, {totals['skipped']} skipped")
    return int(failed)


def run(name: str) -> tuple[int, dict[str, int]]:
    """Run a suite, showing its output as it comes, and return its exit code and counts."""
    folders = [str(ROOT / folder) for folder in SUITES[name] if (ROOT / folder).exists()]
    print(f"\n--- {name}", flush=True)
    argv = [sys.executable, "-m", "pytest", "-q", "--durations=5", *folders]
    process = subprocess.Popen(argv, cwd=ROOT.parent, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        last = line if _COUNT.search(line) else last
    counts: dict[str, int] = {}
    for number, word in _COUNT.findall(last):
        key = "failed" if word.startswith("error") else word
        counts[key] = counts.get(key, 0) + int(number)
    return process.wait(), counts


if __name__ == "__main__":
    sys.exit(main())
