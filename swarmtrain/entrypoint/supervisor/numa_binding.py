"""CPUs to which a rank is bound: those near its GPU, as torchrun's --numa-binding chooses them (torch.numa.binding).

`sysfs` is the mount point of the kernel's sysfs. Functions raise OSError if it lacks a file, and ValueError if the binding is impossible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def bind_to_gpu(mode: str, local_rank: int) -> None:
    """Bind this process to the CPUs near the GPU of `local_rank`, if it sees GPUs. `mode`: one of torchrun's modes."""
    from torch import cuda

    if cuda.is_available():
        gpus: list[Any] = [cuda.get_device_properties(index) for index in range(cuda.device_count())]  # torch's stub lacks the PCI address
        addresses = [f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0" for gpu in gpus]
        os.sched_setaffinity(0, choose_cpus(mode, local_rank, addresses, os.sched_getaffinity(0)))


def choose_cpus(mode: str, gpu: int, pci_addresses: list[str], allowed_cpus: set[int], sysfs: Path = Path("/sys")) -> set[int]:
    """Return the CPUs for the GPU with index `gpu`, of those that are in `allowed_cpus`.

    `pci_addresses`: PCI address of each GPU of this node, such as 0000:dc:00.0.
    """
    numa_nodes = [_read_numa_node(address, sysfs) for address in pci_addresses]
    node = numa_nodes[gpu]
    cpus = _read_cpus_of_node(node, sysfs) & allowed_cpus
    neighbours = [index for index, other in enumerate(numa_nodes) if other == node]
    match mode:
        case "node":
            chosen = cpus
        case "socket":
            chosen = _choose_socket(cpus, allowed_cpus, sysfs)
        case "exclusive":
            chosen = _choose_cores(cpus, neighbours.index(gpu), len(neighbours), sysfs)
        case "core-complex":
            caches = sorted(
                _group_by(cpus, lambda cpu: min(_read_cpus_of_last_cache(cpu, sysfs))).items(), key=lambda item: (-len(item[1]), item[0])
            )
            chosen = caches[neighbours.index(gpu) % len(caches)][1] if caches else set()
        case _:
            raise ValueError(f"unknown mode of CPU binding: {mode}")
    if not chosen:
        raise ValueError(f"no CPU near GPU {gpu} is available to this process")
    return chosen


def _choose_socket(cpus: set[int], allowed_cpus: set[int], sysfs: Path) -> set[int]:
    """Return the allowed CPUs of all NUMA nodes of the socket on which `cpus` are."""

    def read_socket(node_cpus: set[int]) -> int:
        return int((sysfs / f"devices/system/cpu/cpu{min(node_cpus)}/topology/physical_package_id").read_text())

    nodes = [_read_cpus_of_node(node, sysfs) & allowed_cpus for node in _parse_ranges((sysfs / "devices/system/node/possible").read_text())]
    return {cpu for node_cpus in nodes if node_cpus and cpus and read_socket(node_cpus) == read_socket(cpus) for cpu in node_cpus}


def _choose_cores(cpus: set[int], index: int, gpu_count: int, sysfs: Path) -> set[int]:
    """Divide the physical cores of `cpus` among GPUs, and return the CPUs of the share `index`. The first shares may be larger by one."""
    cores = [
        core_cpus
        for _, core_cpus in sorted(
            _group_by(
                cpus, lambda cpu: min(_parse_ranges((sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()))
            ).items()
        )
    ]
    share, extra = divmod(len(cores), gpu_count)
    if share == 0:
        raise ValueError(f"{gpu_count} GPUs cannot have a core each: their NUMA node has {len(cores)}")
    start = index * share + min(index, extra)
    return {cpu for core in cores[start : start + share + (index < extra)] for cpu in core}


def _group_by(cpus: Iterable[int], get_key: Callable[[int], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for cpu in cpus:
        groups.setdefault(get_key(cpu), set()).add(cpu)
    return groups


def _read_numa_node(pci_address: str, sysfs: Path) -> int:
    return max(0, int((sysfs / f"bus/pci/devices/{pci_address}/numa_node").read_text()))  # -1: the machine has one node


def _read_cpus_of_node(node: int, sysfs: Path) -> set[int]:
    return _parse_ranges((sysfs / f"devices/system/node/node{node}/cpulist").read_text())


def _read_cpus_of_last_cache(cpu: int, sysfs: Path) -> set[int]:
    """Return the CPUs that share the last cache of `cpu` that is not for instructions alone."""
    caches = [
        path
        for path in (sysfs / f"devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")
        if (path / "type").read_text().strip() in {"Unified", "Data"}
    ]
    return _parse_ranges((max(caches, key=lambda path: int((path / "level").read_text())) / "shared_cpu_list").read_text())


def _parse_ranges(text: str) -> set[int]:
    """Return the numbers in `text`, such as 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
