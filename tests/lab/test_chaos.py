"""Whatever happens to a run, it goes on by itself, and ends as if nothing had happened.

A row of the table in faults.py is a test with the whole state on each rank and with it divided among them, each with a disk that
all nodes share and with one of each node's own. With SWARMTRAIN_CHAOS=all every row is run, with some of its words those that have
them, and otherwise those that are marked.
What is asserted is read from the audit files.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import built
import chaos_table
import pytest
from audit import Story, largest_difference, problems
from faults import FAULTS, STATES, Fault
from scene import NODES, ROOT, STEPS, Scene

from swarmtrain.lab import Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe

TOPOLOGIES = {"replicated": (), "divided": ("topology.data_parallel_type=fsdp",)}
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
TABLE = PAGE if os.environ.get("SWARMTRAIN_DOCS") else ROOT / "build" / "chaos.md"
_CHOSEN = os.environ.get("SWARMTRAIN_CHAOS", "")
_DISK = 2**30
_STRIKE_AT = 60


@dataclass(frozen=True)
class Case:
    """A fault, who has the run's state, and on which disk it is saved."""

    fault: Fault
    state: str
    disk: str

    def __str__(self) -> str:
        return f"{self.fault.name}, {self.state}, {self.disk}"

    @property
    def wanted(self) -> bool:
        if not _CHOSEN:
            return (self.state, self.disk) in self.fault.usual
        return _CHOSEN == "all" or _CHOSEN in str(self)


CASES = [case for fault in FAULTS for state in STATES for disk in fault.disks if (case := Case(fault, state, disk)).wanted]


@dataclass(frozen=True)
class Row:
    """What became of a run."""

    case: Case
    pause: float
    """Seconds."""
    lost: int
    sizes: tuple[int, ...]
    difference: float

    def __str__(self) -> str:
        worlds = ", ".join(map(str, self.sizes))
        told = f"{self.lost} steps made again, {self.pause:.1f} s without a step; ranks of each world: {worlds}"
        return f"{self.case}: {told}; losses differ by {self.difference:.1e}"


@pytest.fixture(scope="session")
def lab(new_lab: Callable[[str], Lab], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab of three nodes whose shared disk can be full."""
    disk = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(disk)], check=True)
    lab = new_lab("chaos")
    lab.up(len(NODES), shared=disk, say=print)
    built.give_registry(built.shared())
    built.give(lab, NODES, built.shared())
    yield lab
    lab.down(say=print)
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def rows() -> Iterator[list[Row]]:
    """The rows that were run; at the end they are put into TABLE."""
    rows: list[Row] = []
    yield rows
    anew: dict[str, chaos_table.Cells] = {}
    for row in rows:
        anew.setdefault(row.case.fault.name, {})[row.case.state, row.case.disk] = chaos_table.cell(row.lost, row.pause)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(chaos_table.write(TABLE.read_text() if TABLE.exists() else "", anew))


@pytest.fixture
def table(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> Callable[[Row], None]:
    """Return a function that shows a row at once, and puts it into the table."""

    def put(row: Row) -> None:
        rows.append(row)
        with capsys.disabled():
            print(f"\n{row}", flush=True)

    return put


@pytest.fixture(scope="session")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this machine, which the lab's machines see too, and not on the disk that faults fill."""
    folder = tmp_path_factory.mktemp("audits")
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def begin(lab: Lab, image: str, audits: Path) -> Iterator[Callable[..., Scene]]:
    """Return a function that begins a run; what a test leaves of it is taken down."""
    scenes: list[Scene] = []

    def make(run: str, state: str, *more: str, disk: str = "shared") -> Scene:
        scenes.append(Scene(lab, image, run, TOPOLOGIES[state], audits, own_disks=disk == "own"))
        scenes[-1].begin(*more)
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.down()


@pytest.fixture(scope="session")
def stories() -> dict[str, Story]:
    """What undisturbed runs did, by their state, as far as any test has asked."""
    return {}


@pytest.fixture
def undisturbed(begin: Callable[..., Scene], stories: dict[str, Story]) -> Callable[[str], Story]:
    """Return a function that tells what a run with this state does to which nothing happens."""

    def tell(state: str) -> Story:
        if state not in stories:
            scene = begin(f"undisturbed-{state}", state, "runner.min_nodes=3", "runner.max_nodes=3")
            assert scene.end() == 0
            stories[state] = scene.story
        return stories[state]

    return tell


@pytest.mark.parametrize("state", sorted({case.state for case in CASES}))
def test_nothing_happens(state: str, undisturbed: Callable[[str], Story]) -> None:
    story = undisturbed(state)
    assert story.sizes == [len(NODES)]
    assert sorted(story.final) == list(range(1, STEPS + 1))
    seen = [sample for lines in story.final.values() for line in lines for sample in line.samples]
    assert len(seen) == len(set(seen)), "a sample was seen twice"


@pytest.mark.parametrize("case", CASES, ids=[str(case).replace(" ", "_") for case in CASES])
def test_whatever_happens(
    case: Case, begin: Callable[..., Scene], undisturbed: Callable[[str], Story], table: Callable[[Row], None]
) -> None:
    calm = undisturbed(case.state)
    scene = begin(f"run{CASES.index(case)}", case.state, disk=case.disk)
    scene.reach(_STRIKE_AT)
    case.fault.strike(scene)
    assert scene.end() == 0, "the run did not end well"
    story = scene.story
    table(Row(case, scene.longest_pause, story.lost, tuple(story.sizes), largest_difference(story, calm)))
    assert problems(story, calm, tolerance=0.0 if set(story.sizes) == set(calm.sizes) else 1e-5) == []
    assert story.lost <= case.fault.may_lose(case.state)
    scene.down()
    _nothing_left(scene)


def _nothing_left(scene: Scene) -> None:
    assert observe.observe(Engine(scene.lab.docker_host("node0")), scene.run).empty
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, f"runs/{scene.run}")] == []


def _names(path: Path, words: str) -> bool:
    try:
        return words.encode() in path.read_bytes()
    except OSError:
        return False


def test_the_page_has_what_every_row_cost() -> None:
    assert list(chaos_table.worse(chaos_table.read(PAGE.read_text()))) == []
