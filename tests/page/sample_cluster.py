"""A sample cluster for the tests of its page: four runs, a queue, three machines of a swarm, and a host of another launcher."""

from __future__ import annotations

from dataclasses import replace

from swarmtrain.errors import EngineError, RunNotFound
from swarmtrain.launchers.base import Launcher
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.queueing.queue_service import SchedulerStatus
from swarmtrain.view.dashboard.cluster_machines import ClusterMachine, MachineAllocation
from swarmtrain.view.dashboard.cluster_page import ClusterPage
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.queue_table import QueueRow, QueueTable
from swarmtrain.view.run_table import RunRow

NOW = 1795370400.0
LOCATION = "the swarm at manager-1"
GPU = "NVIDIA-GPU"
IDS = {name: letter * 12 for name, letter in (("demo", "a"), ("baseline", "b"), ("urgent", "c"), ("sweep", "d"))}
_GPU_IDS = tuple(f"GPU-{number}" for number in range(4))
_CLAIMS = {GPU: 4.0, "cores": 32.0}


def build_page() -> ClusterPage:
    """Return the page."""
    runs = (
        _build_run("baseline", "ben", "training", 2, 2, step=1200, steps=4000, loss=3.1416, gpus=8),
        _build_run("demo", "<b id='planted'>anna</b>", "queued", 0, 2, reason="0 of 2 nodes free; allocated to baseline"),
        _build_run("urgent", "cem", "queued", 0, 1, reason="waits for a free machine"),
        replace(_build_run("sweep", "ben", "training", 1, 1, step=7), location="its hosts"),
    )
    queue = (
        _build_entry("baseline", "normal", "running", nodes=2, hosts=("gpu-1", "gpu-2")),
        _build_entry("urgent", "high", "waiting", estimate=90.0, reason="waits for a free machine"),
        _build_entry("demo", "normal", "waiting", reason="0 of 2 nodes free; allocated to baseline", trained_seconds=60.0),
    )
    allocation = MachineAllocation("baseline", 4.0, (0, 1, 2, 3), 32.0)
    notebook = MachineAllocation("notebook", 1.0, (0,), 16.0, is_shared=True)
    machines = (
        ClusterMachine("gpu-1", LOCATION, "ready", _GPU_IDS, 4.0, 64.0, 32.0, (allocation,)),
        ClusterMachine(
            "gpu-2", LOCATION, "ready", _GPU_IDS, 3.0, 64.0, 48.0, (replace(allocation, gpus=2.0, gpu_numbers=(1, 3)), notebook)
        ),
        ClusterMachine(
            "gpu-3", LOCATION, "drained", ("",) * 4, 2.0, 64.0, 16.0, (MachineAllocation("urgent", 2.0, (), 16.0, is_saving=True),)
        ),
        ClusterMachine("lab-9", "its hosts", "", allocations=(MachineAllocation("sweep", 0.0),)),
    )
    scheduler = SchedulerStatus("running", "gpu-1", "registry/queue:1", "0.1.0")
    return ClusterPage(runs, QueueTable(scheduler, queue, NOW, ("high", "normal")), "", machines, (), NOW)


def _build_run(run: str, owner: str, state: str, running: int, nodes: int, **fields: object) -> RunRow:
    values = {"location": LOCATION, "running_nodes": running, "nodes": nodes, "created": NOW - 3600, **fields}
    return RunRow(run, IDS[run], owner, state, **values)  # type: ignore[arg-type]


def _build_entry(run: str, priority_class: str, state: str, nodes: int = 0, hosts: tuple[str, ...] = (), **fields: object) -> QueueRow:
    return QueueRow(run, IDS[run], "anna", priority_class, 0, state, nodes, 2, 2, _CLAIMS, hosts, NOW - 600, **fields)  # type: ignore[arg-type]


class FakeBackend:
    """What a ClusterReader does, without launchers: its runs are recorded on this machine."""

    def __init__(self, page: ClusterPage | None = None) -> None:
        self.page = page or build_page()
        self.is_away = False
        self.polls = 0
        self.opened: list[str] = []
        self.launchers: dict[str, Launcher] = {}

    def read_page(self) -> ClusterPage:
        if self.is_away:
            raise EngineError("no answer")
        self.polls += 1
        return self.page

    def open_run(self, name_or_id: str) -> RunDataSource:
        self.opened.append(name_or_id)
        name = next((run for run, run_id in IDS.items() if run_id == name_or_id), None)
        if name is None:
            raise RunNotFound("unknown run; existing runs: demo", place=f"run {name_or_id}", hint="swarmtrain history lists all known runs")
        return RunDataSource(RecordedRun(name, RunIdentity(name_or_id)), self.find_launcher(name_or_id))

    def find_launcher(self, run_id: str) -> Launcher | None:
        return self.launchers.get(run_id)
