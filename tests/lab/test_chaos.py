"""Whatever fault is injected, a run resumes by itself, and its result equals that of an undisturbed run.

Each row of the table in faults.py is a test for replicated and for sharded state, each with a disk that all nodes share and with a
disk per node. SWARMTRAIN_CHAOS=all runs every row; another value runs the rows whose name contains it; without a value the default
cases run.
The assertions use the audit files. In each case `swarmtrain why` names what caused the fault; with SWARMTRAIN_DOCS the events and tasks
are recorded for the unit tests.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import chaos_table
import image_cache
import pytest
from chaos_run import NODES, ROOT, STEPS, ChaosRun
from fault_suspects import SUSPECTS, find_suspect, write_recording
from faults import FAULTS, Fault
from run_audit import RunAudit, compute_largest_difference, find_problems

from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state

TOPOLOGIES = {"replicated": (), "sharded": ("topology.data_parallel_type=fsdp",)}
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
TABLE_FILE = PAGE if os.environ.get("SWARMTRAIN_DOCS") else ROOT / "build" / "chaos.md"
_SELECTED = os.environ.get("SWARMTRAIN_CHAOS", "")
_DISK_BYTES = 2**30
_FAULT_STEP = 60


@dataclass(frozen=True)
class ChaosCase:
    """A fault, how the run's state is distributed, and the disk on which it is saved."""

    fault: Fault
    state: str
    disk: str

    def __str__(self) -> str:
        return f"{self.fault.name}, {self.state}, {self.disk}"

    @property
    def is_selected(self) -> bool:
        if not _SELECTED:
            return (self.state, self.disk) in self.fault.default_cases
        return _SELECTED == "all" or _SELECTED in str(self)


CASES = [case for fault in FAULTS for state in fault.states for disk in fault.disks if (case := ChaosCase(fault, state, disk)).is_selected]


@dataclass(frozen=True)
class ChaosResult:
    """The result of a run with a fault."""

    case: ChaosCase
    pause_seconds: float
    """The longest time without a completed step, in seconds."""
    lost_steps: int
    world_sizes: tuple[int, ...]
    loss_difference: float

    def __str__(self) -> str:
        worlds = ", ".join(map(str, self.world_sizes))
        costs = f"{self.lost_steps} steps recomputed, {self.pause_seconds:.1f} s without a step; ranks of each world: {worlds}"
        return f"{self.case}: {costs}; losses differ by {self.loss_difference:.1e}"


@pytest.fixture(scope="session")
def lab(create_lab: Callable[[str], Lab], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab of three nodes whose shared disk is small enough to be filled."""
    disk = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)], check=True)
    lab = create_lab("chaos")
    lab.bring_up(len(NODES), shared_folder=disk, report_progress=print)
    image_cache.restore_registry(image_cache.find_shared_cache())
    image_cache.restore_images(lab, NODES, image_cache.find_shared_cache())
    yield lab
    lab.tear_down(report_progress=print)
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def results() -> Iterator[list[ChaosResult]]:
    """The results of the cases that were run. At the end they are merged into the table in TABLE_FILE."""
    results: list[ChaosResult] = []
    yield results
    new_cells: dict[str, chaos_table.Cells] = {}
    for row in results:
        new_cells.setdefault(row.case.fault.name, {})[row.case.state, row.case.disk] = chaos_table.format_cell(
            row.lost_steps, row.pause_seconds
        )
    TABLE_FILE.parent.mkdir(exist_ok=True)
    TABLE_FILE.write_text(chaos_table.update_table(TABLE_FILE.read_text() if TABLE_FILE.exists() else "", new_cells))


@pytest.fixture
def record_result(results: list[ChaosResult], capsys: pytest.CaptureFixture[str]) -> Callable[[ChaosResult], None]:
    """Return a function that prints a result at once, and adds it to the table."""

    def put(row: ChaosResult) -> None:
        results.append(row)
        with capsys.disabled():
            print(f"\n{row}", flush=True)

    return put


@pytest.fixture(scope="session")
def audit_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this machine that the lab's machines can write to. It is not on the disk that faults fill."""
    folder = tmp_path_factory.mktemp("audits")
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def start_run(lab: Lab, image: str, audit_root: Path) -> Iterator[Callable[..., ChaosRun]]:
    """Return a function that starts a run. Runs that a test leaves up are taken down."""
    runs: list[ChaosRun] = []

    def start(run: str, state: str, *extra_settings: str, disk: str = "shared") -> ChaosRun:
        runs.append(ChaosRun(lab, image, run, TOPOLOGIES[state], audit_root, own_disks=disk == "node-local"))
        runs[-1].start(*extra_settings)
        return runs[-1]

    yield start
    for scene in runs:
        scene.take_down()


@pytest.fixture(scope="session")
def undisturbed_audits() -> dict[tuple[str, ...], RunAudit]:
    """The audits of undisturbed runs by state and settings, as far as tests have requested them."""
    return {}


@pytest.fixture
def get_undisturbed_audit(
    start_run: Callable[..., ChaosRun], undisturbed_audits: dict[tuple[str, ...], RunAudit]
) -> Callable[..., RunAudit]:
    """Return a function that returns the audit of an undisturbed run with this state and these settings."""

    def get_audit(state: str, *settings: str) -> RunAudit:
        key = (state, *settings)
        if key not in undisturbed_audits:
            scene = start_run(f"undisturbed{len(undisturbed_audits)}", state, "runner.min_nodes=3", "runner.max_nodes=3", *settings)
            assert scene.wait_for_end() == 0
            undisturbed_audits[key] = scene.audit
        return undisturbed_audits[key]

    return get_audit


@pytest.mark.parametrize("state", sorted({case.state for case in CASES}))
def test_an_undisturbed_run_ends(state: str, get_undisturbed_audit: Callable[..., RunAudit]) -> None:
    story = get_undisturbed_audit(state)
    assert story.world_sizes == [len(NODES)]
    assert sorted(story.final_lines) == list(range(1, STEPS + 1))
    seen = [sample for lines in story.final_lines.values() for line in lines for sample in line.samples]
    assert len(seen) == len(set(seen)), "a sample was seen twice"


@pytest.mark.parametrize("case", CASES, ids=[str(case).replace(" ", "_") for case in CASES])
def test_a_run_survives_any_fault(
    case: ChaosCase,
    lab: Lab,
    start_run: Callable[..., ChaosRun],
    get_undisturbed_audit: Callable[..., RunAudit],
    record_result: Callable[[ChaosResult], None],
) -> None:
    calm = get_undisturbed_audit(case.state, *case.fault.settings)
    scene = start_run(f"run{CASES.index(case)}", case.state, *case.fault.settings, disk=case.disk)
    scene.wait_for_step(_FAULT_STEP)
    case.fault.inject(scene)
    assert scene.wait_for_end() == 0, "the run did not end well"
    suspect = find_suspect(scene.read_diagnosis())
    assert re.fullmatch(SUSPECTS[case.fault.name], suspect), f"`why` names {suspect or 'nobody'}"
    if os.environ.get("SWARMTRAIN_DOCS"):
        launcher = SwarmLauncher(lab.get_docker_host("node0"))
        write_recording(case.fault.name, launcher.read_events(scene.name), launcher.list_tasks(scene.name))
    story = scene.audit
    record_result(
        ChaosResult(case, scene.longest_pause, story.lost_steps, tuple(story.world_sizes), compute_largest_difference(story, calm))
    )
    assert find_problems(story, calm, tolerance=0.0 if set(story.world_sizes) == set(calm.world_sizes) else 1e-5) == []
    assert story.lost_steps <= case.fault.get_max_lost_steps(case.state)
    scene.take_down()
    _check_nothing_left(scene)


def _check_nothing_left(run: ChaosRun) -> None:
    assert cluster_state.read_stack_state(DockerEngine(run.lab.get_docker_host("node0")), run.name).is_empty
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if _contains(path, f"runs/{run.name}")] == []


def _contains(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False


def test_the_page_has_what_every_row_cost() -> None:
    assert list(chaos_table.find_violations(chaos_table.read_table(PAGE.read_text()))) == []
