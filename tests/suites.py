"""Run test suites and print the time of each. `python tests/suites.py [--all] [NAME …]`; `fast` needs neither torch nor a lab.

Without --all it runs the gate: the suites that have no reason in SUITES to be left out, without the tests that are marked
`test_all_only`. With --all it runs everything, and randomized tests draw new examples from a seed that is printed.

Three suites run in parallel: that uses two cores fully. The output of a suite is printed when the suite has ended, or streamed if it is
the only one.

With CI=true a skipped test fails the run: a CI machine must be able to run every test.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.lab.base_image import get_cache_directory
from swarmtrain.lab.state import get_labs_folder

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Suite:
    """The tests of one pytest process: `paths` below tests/, a description, and why only `make test-all` runs them, if so."""

    paths: list[str]
    description: str
    test_all_only: str = ""
    writes_gigabytes: bool = False
    """Whether its tests and labs write to the disk even if those of the other suites write to memory: they need more than 10 GB."""


def list_test_files(folder: str, *, exclude: Sequence[str]) -> list[str]:
    """Return the test files of a folder, except those whose stem is in `exclude`."""
    return [f"{folder}/{path.name}" for path in sorted((ROOT / folder).glob("test_*.py")) if path.stem not in exclude]


_FAULT_MODULES = ["test_bad_images", "test_bad_nodes", "test_bad_swarm", "test_interruption", "test_plain_docker"]
# Pages of docs/how-to that train, and need no lab.
_TRAINING_PAGES = ["test_examples_page", "test_trainer_pages"]
_NEWER_ENGINE_TESTS = [
    "the_same_specs_as_docker_stack_deploy",
    "a_run_is_seen_changed_and_taken_down",
    "a_run_is_followed_to_its_outcome",
    "logs_are_one_stream_in_the_order_of_time",
    "a_deploy_that_cannot_work_prints_why_and_leaves_nothing",
]
_TRAINER_TESTS = list_test_files("trainer", exclude=["test_any_config"])
# In the order in which they start: the longest first, so that the last ones end at about the same time, and `lab` before the other
# suites that need the image, since it builds it for all.
SUITES = {
    "lab": Suite(
        list_test_files("lab", exclude=[*_FAULT_MODULES, "test_chaos", "test_contract"]),
        "the Swarm launcher, images, doctor and the lab itself on real engines; losses of runs in which containers are killed",
    ),
    "trainer": Suite(_TRAINER_TESTS[::2], "the trainer's exact claims, with 1 to 8 gloo processes: every second file of tests/trainer"),
    "trainer2": Suite(_TRAINER_TESTS[1::2], "the other files of tests/trainer"),
    "contract": Suite(
        ["contract", "lab/test_contract.py"],
        "the life of a run on five launchers: deploy, status, logs, secrets, down; and on the swarm, with `make test-all` on each of the "
        "six launchers, stop and resume, a killed node, a failed machine, a failed rank, scaling, interruption, and rejected changes",
    ),
    "entrypoint": Suite(["entrypoint"], "supervisor, coordinator and probe with real processes on this machine"),
    "fast": Suite(
        [
            "unit",
            "golden",
            "queueing",
            "architecture",
            "docs",
            "doctor",
            "mistakes",
            "page/test_page_data.py",
            "page/test_monitoring_files.py",
            "page/test_run_comparison.py",
        ],
        "everything that needs neither torch nor a lab, and bad input to every command",
    ),
    "launchers": Suite(
        ["launchers", "interruption", "page/test_server.py", "page/test_browser.py"],
        "local runs, hosts behind real sshds, a real Slurm; commands that are interrupted; the dashboard in a real browser",
    ),
    "configs": Suite(
        ["trainer/test_any_config.py"],
        "50 generated configs that complete a simulated step, 200 with `make test-all`, and invalid configs that are rejected",
    ),
    "howto": Suite(
        list_test_files("howto", exclude=_TRAINING_PAGES),
        "the commands of the tutorial and of how-to pages, typed one after the other",
        "the gate tests the features that each page uses",
        writes_gigabytes=True,
    ),
    "examples": Suite(
        [f"howto/{name}.py" for name in _TRAINING_PAGES],
        "the examples and the how-to pages that train",
        "trains each example to the result that its page shows",
    ),
    "chaos": Suite(
        ["lab/test_chaos.py"],
        "faults on a run of three nodes: no step is recomputed if a replica of each shard survives",
        "each row is a whole run; in the gate `contract` kills nodes, `entrypoint` kills and stalls ranks, `lab` kills a container",
    ),
    "faults": Suite(
        [f"lab/{name}.py" for name in _FAULT_MODULES],
        "mistakes and interruptions on a real swarm, and what each prints",
        "one mistake per test on a lab of its own; the gate has the same mistakes where they need no engine, in `fast`",
    ),
    "newer": Suite(
        [
            *(f"lab/test_swarm_launcher.py::test_{name}" for name in _NEWER_ENGINE_TESTS),
            "lab/test_overlay_subnet.py::test_doctor_names_a_resolver_and_machines_inside_the_subnet",
        ],
        "tests of `lab` that depend on the Docker API, with a newer engine",
        "downloads a second engine and repeats tests of `lab`",
    ),
}
_COUNT_PATTERN = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
_FAILED_PATTERN = re.compile("(FAILED|ERROR|SKIPPED) ")
# A line of the stacks that faulthandler writes when a test exceeds its timeout.
_HUNG_PATTERN = re.compile(r'File ".*?(?P<path>tests/\w+/test_\w+\.py)", line (?P<line>\d+) in (?P<name>\w+)')
_LINE_WIDTH = 160
_MEMORY_DISK = Path("/dev/shm")
_MIN_MEMORY_BYTES = 18 * 2**30
_PARALLEL_SUITES = 3
_TEST_ALL_TIMEOUT_SECONDS = 1500
"""Seconds after which a test of `make test-all` counts as hung."""
_PROCESSES: list[subprocess.Popen[str]] = []
_STOP_REQUESTED = threading.Event()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run test suites and print the time of each.")
    parser.add_argument("--all", action="store_true", help="run everything, not the gate alone")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"a suite: {', '.join(SUITES)}")
    options = parser.parse_args()
    include_all: bool = options.all
    names = options.names or [name for name, suite in SUITES.items() if include_all or not suite.test_all_only]
    if unknown := [name for name in names if name not in SUITES]:
        print(f"no such suite: {', '.join(unknown)}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGHUP):
        # A signal that is ignored here, because of nohup or a start in the background, would also be ignored by all child processes.
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: stop_suites())
    with keep_files_in_memory(), tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as shelf:
        os.environ["SWARMTRAIN_TEST_IMAGE_CACHE"] = shelf
        if include_all:
            seed = os.environ.setdefault("SWARMTRAIN_SEED", str(random.randrange(10**9)))  # noqa: S311
            print(f"randomized tests draw from seed {seed}; SWARMTRAIN_SEED={seed} make test-all repeats them")
        return run_suites(names, include_all=include_all)


@contextmanager
def keep_files_in_memory() -> Iterator[None]:
    """Keep the labs' disks and the tests' folders in memory, if there is enough: they write and remove many gigabytes."""
    overridden = {"SWARMTRAIN_LAB_DIR", "PYTEST_DEBUG_TEMPROOT"} & set(os.environ)
    if overridden or not _MEMORY_DISK.is_dir() or min(shutil.disk_usage(_MEMORY_DISK).free, _read_available_memory()) < _MIN_MEMORY_BYTES:
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
    with suppress(OSError):  # leftovers of a killed test are still a lab: swarmtrain lab down removes it
        for path in (*labs.glob("*/*"), *labs.glob("*"), labs, folder):
            if path.exists():
                path.rmdir()


def _read_available_memory() -> int:
    """Return the bytes of memory that are available to programs."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 0


def run_suites(names: list[str], *, include_all: bool) -> int:
    """Run the suites with these names and return the exit code."""
    started = time.monotonic()
    with ThreadPoolExecutor(_PARALLEL_SUITES) as pool:
        results = list(pool.map(lambda name: run_suite(name, include_all=include_all, stream_output=len(names) == 1), names))
    rows = [*(str(result) for result in results), f"{'all':12} {time.monotonic() - started:7.1f} s  {_PARALLEL_SUITES} side by side"]
    totals = {key: sum(result.counts.get(key, 0) for result in results) for key in ("passed", "failed", "skipped")}
    failed = sum(result.is_failed for result in results)
    print("\n" + "\n".join([*rows, *(line for result in results if result.is_failed for line in result.failure_lines)]))
    print(f"{totals['passed']} passed, {totals['failed'] or failed} failed, {totals['skipped']} skipped")
    return int(failed > 0)


def stop_suites() -> None:
    """Interrupt the running suites, so that their labs are taken down, and start no other."""
    _STOP_REQUESTED.set()
    for process in _PROCESSES:
        process.send_signal(signal.SIGINT)


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite: its exit code, its counts by word, its seconds, and a line for each test that failed or hung.

    `cpu_seconds`: of its processes, without those of a lab's engines.
    """

    name: str
    code: int
    counts: dict[str, int]
    seconds: float
    cpu_seconds: float
    failure_lines: list[str]

    @property
    def is_failed(self) -> bool:
        return self.code != 0 or self._is_skipped_in_ci

    @property
    def _is_skipped_in_ci(self) -> bool:
        return bool(self.counts.get("skipped")) and os.environ.get("CI") == "true"

    def __str__(self) -> str:
        outcome = "FAILED" if self.code else "FAILED: nothing may be skipped here" if self._is_skipped_in_ci else "ok"
        counts = ", ".join(f"{count} {word}" for word, count in self.counts.items())
        return f"{self.name:12} {self.seconds:7.1f} s  {self.cpu_seconds:7.1f} s of CPU  {counts:40} {outcome}"


def run_suite(name: str, *, include_all: bool, stream_output: bool) -> SuiteResult:
    """Run a suite, all of it with `include_all`, and print its output, streamed with `stream_output`.

    A suite that the gate leaves out runs completely if it is named.
    """
    started = time.monotonic()
    if _STOP_REQUESTED.is_set():
        return SuiteResult(name, 1, {}, 0.0, 0.0, [f"{name} was not started"])
    print(f"--- {name} begins", flush=True)
    suite = SUITES[name]
    markers = [] if include_all or suite.test_all_only else ["-m", "not test_all_only"]
    # `make test-all` has tests that last for 10 min on a busy machine, such as a day on a shared cluster.
    timeout = ["-o", f"faulthandler_timeout={_TEST_ALL_TIMEOUT_SECONDS}"] if include_all else []
    argv = [sys.executable, "-m", "pytest", "-q", "--durations=8", *timeout, *markers, *(str(ROOT / place) for place in suite.paths)]
    # The labs of two suites have separate registries, since both push images with the same names.
    # A shared temporary folder would not work: pytest makes it private when it starts, while another suite makes it accessible. The name is
    # short, since paths of sockets are.
    root = None if suite.writes_gigabytes else os.environ.get("PYTEST_DEBUG_TEMPROOT")
    folder = Path(root or tempfile.gettempdir()) / f"{'t' if root else f'tests-{os.getpid()}-'}{list(SUITES).index(name)}"
    folder.mkdir(exist_ok=True)
    labs = folder.with_name(f"{folder.name}-labs") if suite.writes_gigabytes else get_labs_folder() / name
    env = {**os.environ, "SWARMTRAIN_LAB_DIR": str(labs), "PYTEST_DEBUG_TEMPROOT": str(folder)}
    if name == "newer":
        env["SWARMTRAIN_TEST_ENGINE"] = fetch_newer_engine()
    process = subprocess.Popen(
        argv, cwd=ROOT.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    _PROCESSES.append(process)
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if stream_output:
            print(line, end="", flush=True)
    _, status, usage = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    shutil.rmtree(folder, ignore_errors=True)  # memory, for the suites that still run
    if not stream_output:
        print(f"\n--- {name}\n{''.join(lines)}", end="", flush=True)
    last = next((line for line in reversed(lines) if _COUNT_PATTERN.search(line)), "")
    counts: dict[str, int] = {}
    for number, word in _COUNT_PATTERN.findall(last):
        key = "failed" if word.startswith("error") else word
        counts[key] = counts.get(key, 0) + int(number)
    return SuiteResult(name, code, counts, time.monotonic() - started, usage.ru_utime + usage.ru_stime, list_failures(lines))


def list_failures(lines: list[str]) -> list[str]:
    """Return a short line for each test in a suite's output that did not pass; for a test that hung, where."""
    failed = [line.strip()[:_LINE_WIDTH] for line in lines if _FAILED_PATTERN.match(line)]
    hung = [f"HUNG {found['path']}:{found['line']} in {found['name']}" for line in lines if (found := _HUNG_PATTERN.search(line))]
    return failed or hung or [line.rstrip()[:_LINE_WIDTH] for line in lines[-3:]]


def fetch_newer_engine() -> str:
    """Return the directory of a Docker engine that is newer than the system's. It is downloaded if it is missing and the network allows."""
    folder = get_cache_directory() / "newer-engine"
    subprocess.run(["sh", ROOT.parent / "requirements" / "newer-engine.sh", folder], check=False)
    return str(folder / "bin")


if __name__ == "__main__":
    sys.exit(main())
