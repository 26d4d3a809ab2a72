"""Faults that are planted in simulated GPUs reach the coordinator, which quarantines the node if its hardware is faulty."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from simulated_gpus import FIELDS, SimulatedGpus

from swarmtrain.entrypoint.gpu_health import GpuHealthMonitor, find_present_faults
from swarmtrain.entrypoint.gpu_query import GpuQuery, GpuSample
from swarmtrain.entrypoint.kernel_log import KernelLog
from swarmtrain.launchers.base import TaskState
from swarmtrain.process import start_process
from swarmtrain.protocol import Event
from swarmtrain.view.status import build_status
from swarmtrain.view.why import diagnose_failure

ROOT = Path(__file__).parents[2]
_SAMPLES_PER_HOUR = 360


@dataclass(frozen=True)
class PlantedFault:
    """A fault that `plant` causes, and what the coordinator publishes about it."""

    name: str
    plant: Callable[[SimulatedGpus], None]
    message: str
    is_hardware: bool = True


FAULTS = [
    PlantedFault(
        "off-the-bus",
        lambda gpus: gpus.log_xid(79, "pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        "GPU 1 (0000:1b:00): Xid 79, the GPU has fallen off the bus: pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    ),
    PlantedFault("double-bit", lambda gpus: gpus.log_xid(48, "pid=77, An uncorrectable double bit error"), "Xid 48, double bit ECC error"),
    PlantedFault("row-remapper", lambda gpus: gpus.log_xid(64, "pid=77, Row Remapper Error"), "Xid 64, a memory page could not be retired"),
    PlantedFault("nvlink", lambda gpus: gpus.log_xid(74, "pid=77, NVLink: fatal error detected on link 2"), "Xid 74, NVLink error"),
    PlantedFault("uncontained", lambda gpus: gpus.log_xid(95, "pid=77, Uncontained"), "Xid 95, uncontained uncorrectable memory error"),
    PlantedFault("gsp", lambda gpus: gpus.log_xid(119, "pid=77, Timeout after 6s of waiting for RPC response"), "Xid 119, the GPU system"),
    PlantedFault(
        "ecc", lambda gpus: gpus.set_value("ecc.errors.uncorrected.volatile.total", "2"), "GPU 1 (0000:1b:00): 2 uncorrected ECC errors"
    ),
    PlantedFault("remap-failure", lambda gpus: gpus.write(remap_failure="Yes"), "GPU 1 (0000:1b:00): a faulty memory row could not be"),
    PlantedFault(
        "lost",
        lambda gpus: gpus.fail("Unable to determine the device handle for GPU0000:1B:00.0: GPU is lost. Reboot the system"),
        "nvidia-smi: Unable to determine the device handle for GPU0000:1B:00.0: GPU is lost.",
    ),
    PlantedFault("missing", SimulatedGpus.remove_gpu, "GPU 1 (0000:1b:00): nvidia-smi no longer lists it (1 GPUs, 2 before)"),
    PlantedFault(
        "too-hot",
        lambda gpus: gpus.set_value("clocks_event_reasons.active", "0x0000000000000048"),
        "GPU 1 (0000:1b:00): clocks are reduced: hardware",
        is_hardware=False,
    ),
    PlantedFault(
        "power-brake",
        lambda gpus: gpus.set_value("clocks_event_reasons.active", "0x0000000000000080"),
        "clocks are reduced: power brake",
        is_hardware=False,
    ),
    PlantedFault(
        "narrow-link", lambda gpus: gpus.set_value("pcie.link.width.current", "8"), "its PCIe link has 8 of 16 lanes", is_hardware=False
    ),
    PlantedFault("page-retirement", lambda gpus: gpus.set_value("retired_pages.pending", "Yes"), "a memory page", is_hardware=False),
    PlantedFault("application", lambda gpus: gpus.log_xid(31, "pid=77, MMU Fault"), "Xid 31, illegal memory access", is_hardware=False),
]  # fmt: skip
_DETECTION_SECONDS = 30.0
# What the supervisor does: it registers the node, sends heartbeats, and starts the reporter with its default interval.
_NODE = """
import sys, time
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.entrypoint.resource_usage import UsageReporter
coordinator = CoordinatorClient(sys.argv[1])
coordinator.register_node(sys.argv[2])
UsageReporter(coordinator, sys.argv[2]).start()
while True:
    coordinator.send_heartbeat(sys.argv[2])
    time.sleep(1)
"""


@pytest.fixture(scope="module")
def planted_run(shared_run: Any) -> tuple[Any, float]:
    """A coordinator, a node for each fault, and one healthy node. Return the run, and the time at which all faults were planted."""
    run = shared_run
    run.start_coordinator(min_nodes=2)
    names = [*(fault.name for fault in FAULTS), "healthy"]
    machines = {name: SimulatedGpus(run.folder / name) for name in names}
    address = f"127.0.0.1:{run.coordinator_port}"
    run.wait_for_event("coordinator")
    for name, gpus in machines.items():
        argv = [sys.executable, "-c", _NODE, address, name]
        run.nodes[name] = start_process(
            argv, env={**gpus.environment, "PYTHONPATH": str(ROOT)}, cwd=ROOT, stderr=subprocess.DEVNULL, die_with_parent=True
        )
    run.wait_for_event("usage", condition=lambda event: event.data["nodes"].keys() >= set(names))
    assert run.read_events("gpu_fault") == []
    planted_at = time.time()
    for fault in FAULTS:
        fault.plant(machines[fault.name])
    return run, planted_at


@pytest.mark.test_all_only("waits for several samples of each fault; the gate has the faulty GPU of a node that trains")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_planted_fault_reaches_the_coordinator_within_30_s(planted_run: tuple[Any, float], fault: PlantedFault) -> None:
    run, planted_at = planted_run
    event = run.wait_for_event("gpu_fault", timeout=60, condition=lambda event: event.data["node"] == fault.name)
    assert fault.message in event.data["message"]
    assert event.data["is_hardware"] is fault.is_hardware
    assert event.data["hint"]
    assert event.time - planted_at < _DETECTION_SECONDS
    if fault.is_hardware:
        quarantined = run.wait_for_event("quarantined", timeout=5, condition=lambda event: event.data["node"] == fault.name)
        assert quarantined.data["reason"] == f"faulty: {event.data['message']}"


@pytest.mark.test_all_only("waits for several samples of each fault; the gate has the faulty GPU of a node that trains")
def test_each_fault_is_reported_once_and_nodes_that_are_only_slow_keep_training(planted_run: tuple[Any, float]) -> None:
    run, planted_at = planted_run
    time.sleep(max(0.0, planted_at + 45 - time.time()))  # each node has sent its report several times
    counts = {name: sum(event.data["node"] == name for event in run.read_events("gpu_fault")) for name in run.nodes}
    # Heat has two of the clock event reasons.
    assert counts == {**{fault.name: 1 for fault in FAULTS}, "too-hot": 2, "healthy": 0}
    hardware = {fault.name for fault in FAULTS if fault.is_hardware}
    assert {event.data["node"] for event in run.read_events("quarantined")} == hardware


def test_an_hour_of_normal_samples_has_no_finding() -> None:
    """Idle clocks, the software power cap, narrow links of idle GPUs, 88 °C, and corrected errors are normal."""
    generator, monitor = random.Random(7), GpuHealthMonitor()  # noqa: S311  # simulated values, not secrets
    found = []
    for step in range(_SAMPLES_PER_HOUR):
        is_idle = step % 60 < 10  # a validation, or a checkpoint
        gpus = tuple(
            {name: default.format(number=number) for name, default in FIELDS.items()}
            | {
                "utilization.gpu": "0" if is_idle else str(generator.randint(60, 100)),
                "memory.used": str(generator.randint(50_000, 81_000)),
                "temperature.gpu": str(generator.randint(34, 88)),
                "power.draw": f"{generator.uniform(70, 702):.2f}",
                "clocks_event_reasons.active": "0x0000000000000001" if is_idle else generator.choice(["0x0", "0x4", "0x2", "0x10"]),
                "pcie.link.width.current": "8" if is_idle else "16",
                "remapped_rows.pending": "No",
                "remapped_rows.failure": "No",
            }
            for number in range(8)
        )
        if step % 50 == 49:  # one hot second; and a sample that nvidia-smi did not finish in time
            gpus[0]["clocks_event_reasons.active"] = "0x0000000000000020"
            found += monitor.find_new_faults(GpuSample(gpus), [])
            gpus = ()
        lines = ["usb 1-1: new device", "NVRM: loading NVIDIA UNIX x86_64 Kernel Module", "NVRM: Xid (PCI:0000:f1:00): 79, of another run"]
        found += monitor.find_new_faults(GpuSample(gpus), lines)
    assert found == []


def list_present_faults() -> list[tuple[str, bool]]:
    faults = find_present_faults(GpuQuery().read_sample(), KernelLog(os.environ, from_start=True).read_new_lines())
    return [(str(fault), fault.is_hardware) for fault in faults]


def test_a_probe_finds_what_is_wrong_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimulatedGpus(tmp_path / "gpus")
    for name, value in gpus.environment.items():
        monkeypatch.setenv(name, value)
    assert list_present_faults() == []
    gpus.log_xid(79, "GPU has fallen off the bus.")
    gpus.values[1] |= {"ecc.errors.uncorrected.volatile.total": "3", "clocks_event_reasons.active": "0x20"}
    gpus.write(remap_failure="Yes", remap_pending="Yes")
    assert list_present_faults() == [
        ("GPU 1 (0000:1b:00): Xid 79, the GPU has fallen off the bus: GPU has fallen off the bus.", True),
        ("GPU 1 (0000:1b:00): 3 uncorrected ECC errors since the driver was loaded", False),
        ("GPU 1 (0000:1b:00): a faulty memory row could not be remapped", True),
        ("GPU 1 (0000:1b:00): a remapped memory row is not in use yet: the GPU must be reset", False),
        ("GPU 1 (0000:1b:00): clocks are reduced: software thermal slowdown (SW Thermal Slowdown), 61 °C", False),
    ]
    gpus.fail("No devices were found")
    assert list_present_faults() == [("nvidia-smi: No devices were found", True)]


def test_the_kernel_log_is_read_from_its_end_across_a_rotation(tmp_path: Path) -> None:
    file = tmp_path / "kern.log"
    environ = {"SWARMTRAIN_KERNEL_LOG": str(file)}
    assert KernelLog(environ).read_new_lines() == []
    file.write_text("old\n")
    log = KernelLog(environ)
    with file.open("a") as out:
        out.write("one\nhal")
    assert log.read_new_lines() == ["one"]
    with file.open("a") as out:
        out.write("f\nlast of the old file\n")
    file.rename(tmp_path / "kern.log.1")
    file.write_text("first of the new file\n")
    assert log.read_new_lines() == ["half", "last of the old file", "first of the new file"]
    assert log.read_new_lines() == []


@pytest.mark.test_all_only("the gate quarantines another bad machine, in test_runs.py")
def test_a_node_with_a_faulty_gpu_is_quarantined_and_training_continues_on_the_others(small_run: Any, tmp_path: Path) -> None:
    machines = [SimulatedGpus(tmp_path / f"machine{number}") for number in range(3)]
    small_run.start_coordinator()
    for number, gpus in enumerate(machines):
        small_run.start_training_node(number, slots=1, node_range=(2, 3), environment={"SWARMTRAIN_GPUS": "1+", **gpus.environment})
    first = small_run.wait_for_event("world", condition=lambda event: event.data["nodes"] == 3)
    small_run.wait_for_event("progress", condition=lambda event: event.time > first.time + 1)
    machines[2].log_xid(79, "pid=77, GPU has fallen off the bus.")
    out = small_run.wait_for_event("quarantined", timeout=60)
    assert out.data["node"] == "node2"
    smaller = small_run.wait_for_event("world", condition=lambda event: event.time > out.time and event.data["nodes"] == 2)
    assert sorted(smaller.data["ranks"]) == ["node0", "node1"]
    small_run.wait_for_event("progress", condition=lambda event: event.time > smaller.time + 2)
    assert small_run.nodes["node2"].poll() is None
    events: list[Event] = small_run.read_events()
    assert [event for event in events if event.kind == "failure"] == [], "its ranks have saved, and no restart is charged"
    tasks = [TaskState(f"node{number}", f"gpu-{number}", "running") for number in range(3)]
    why = str(diagnose_failure("small", events, tasks, []))
    assert "first   node2 on gpu-2" in why
    assert "error   GPU 1 (0000:1b:00): Xid 79, the GPU has fallen off the bus" in why
    status = str(build_status("small", events, tasks, time.time()))
    assert "node2 was quarantined: faulty: GPU 1 (0000:1b:00): Xid 79" in status
    assert "GPU         node2: GPU 1 (0000:1b:00): Xid 79, the GPU has fallen off the bus" in status
    (small_run.folder / "enough").touch()
    assert small_run.wait_for_exit() == {"node0": 0, "node1": 0, "node2": 0, "coordinator": 0}
