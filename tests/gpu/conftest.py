"""The table of runs on a GPU: each test is a row with measured values. `make gpu` runs it; `--device cpu` runs it with tiny models.

No suite contains these tests: pytest collects rows_*.py only if an argument names the file, or with `-o python_files='rows_*.py'`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from speed_section import format_values  # noqa: E402  # needs the path above
from stages import STAGES  # noqa: E402  # needs the path above
from workers import Worker  # noqa: E402  # needs the path above

from swarmtrain.errors import SwarmtrainError  # noqa: E402  # needs the path above

_CPU_LIMIT_FACTOR = 5.0
_CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
_MARKS = {"passed": "ok", "failed": "FAILED"}


@dataclass(frozen=True)
class Machine:
    """The device on which the rows are measured."""

    device_type: str
    """cuda or cpu."""
    gpu_count: int

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def scale_limit(self, seconds: float) -> float:
        """Return the time limit for what may take `seconds` on a GPU. On the CPU it is longer: that machine may be busy or slow."""
        return seconds if self.is_cuda else _CPU_LIMIT_FACTOR * seconds


@dataclass
class Row:
    """The values of a test, by name: numbers with their unit in the name, or text."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    outcome: str = "passed"
    """missed: a measurement did not reach its goal, and everything is correct."""
    reason: str = ""

    def check_goal(self, reached: bool, goal: str) -> None:
        """Mark the row as missed, with a description of the goal, unless it is reached."""
        if not reached:
            self.outcome, self.reason = "missed", f"goal: {goal}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cuda", "cpu"], default="cuda", help="where to train; cpu: tiny models")
    parser.addoption("--rows", type=Path, help="file to which each row is written as a JSON line")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = list(STAGES)
    if all(_get_stage(item.nodeid) in order for item in items):
        items.sort(key=lambda item: order.index(_get_stage(item.nodeid)))  # stable: the order within a module stays


def _get_stage(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).stem.removeprefix("rows_")


@pytest.fixture(scope="session")
def machine(pytestconfig: pytest.Config) -> Machine:
    from swarmtrain.trainer.speed.machine_check import detect_device

    try:
        return Machine(*detect_device(pytestconfig.getoption("--device")))
    except SwarmtrainError as error:
        pytest.exit(error.plain_text.strip(), returncode=1)


@pytest.fixture(scope="session", autouse=True)
def _empty_caches(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty caches, so that the times of compilation are comparable, outside the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in _CACHE_VARIABLES:
            patch.setenv(variable, str(tmp_path_factory.mktemp(variable)))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path[:2]))
        if not machine.is_cuda:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        yield


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A process that calls functions on the device."""
    with Worker() as device_worker:
        yield device_worker


@pytest.fixture(scope="module")
def cpu_worker() -> Iterator[Worker]:
    """A process that calls functions on the CPU."""
    with Worker({"CUDA_VISIBLE_DEVICES": ""}) as reference_worker:
        yield reference_worker


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """The row of this test, with the name of the test or of its parameters."""
    node = request.node
    name = node.callspec.id if hasattr(node, "callspec") else node.originalname.removeprefix("test_").replace("_", " ")
    values = Row(name)
    node.user_properties.append(("row", values))
    return values


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.excinfo is not None:
        report.user_properties.append(("reason", call.excinfo.exconly().removeprefix("Skipped: ").removeprefix("AssertionError: ")))
    return report


class RowPrinter:
    """Prints the row of each test when it ends, and writes it to the file of --rows."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._start_time = config, time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        is_last = report.when == "call" or (report.when == "setup" and not report.passed)
        if not is_last or "row" not in properties:
            return
        row: Row = properties["row"]  # type: ignore[assignment]  # of the fixture
        outcome = row.outcome if report.passed else report.outcome
        reason = row.reason if report.passed else str(properties.get("reason", ""))
        stage = _get_stage(report.nodeid)
        text = f"{_MARKS.get(outcome, outcome):8}{f'{stage}: {row.name}':52}{format_values(row.values)}".rstrip()
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line("\n".join([text, *(f"{'':8}{line}" for line in reason.splitlines())]))
        if path := self._config.getoption("--rows"):
            seconds = round(time.monotonic() - self._start_time, 1)
            record = {"stage": stage, "at_seconds": seconds, "name": row.name, "outcome": outcome, "values": row.values, "reason": reason}
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if "row" not in dict(report.user_properties):
            return None
        return (report.outcome if report.when == "call" or not report.passed else "", "", "")  # the row, not a dot


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RowPrinter(config))
    if path := config.getoption("--rows"):
        path.write_text("")
