"""The CPUs to which a rank is bound are those that torchrun's --numa-binding chooses, on machines of every shape."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from coordinator_thread import serve_coordinator

from swarmtrain.entrypoint.supervisor.numa_binding import choose_cpus
from swarmtrain.protocol import EVENT_FAILURE, NodeEnv

torch_binding = pytest.importorskip("torch.numa.binding")


@dataclass
class SimulatedMachine:
    """The part of sysfs that describes sockets, NUMA nodes, cores, caches and GPUs of a machine, below `sysfs`."""

    sysfs: Path
    numa_nodes_of_gpus: list[int]
    cpus: set[int]


def write_file(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def build_machine(
    sysfs: Path, *, sockets: int, nodes_per_socket: int, cores_per_node: int, cores_per_cache: int, gpus: list[int]
) -> SimulatedMachine:
    """Write sysfs of a machine with two threads per core, the second numbered after all first ones, as Linux does."""
    cores = sockets * nodes_per_socket * cores_per_node
    for node in range(sockets * nodes_per_socket):
        first = node * cores_per_node
        last = first + cores_per_node - 1
        write_file(sysfs / f"devices/system/node/node{node}/cpulist", f"{first}-{last},{first + cores}-{last + cores}")
        for core in range(first, last + 1):
            cache_first = first + (core - first) // cores_per_cache * cores_per_cache
            cache_last = min(cache_first + cores_per_cache - 1, last)
            shared = f"{cache_first}-{cache_last},{cache_first + cores}-{cache_last + cores}"
            for cpu in (core, core + cores):
                folder = sysfs / f"devices/system/cpu/cpu{cpu}"
                write_file(folder / "topology/thread_siblings_list", f"{core},{core + cores}")
                write_file(folder / "topology/physical_package_id", node // nodes_per_socket)
                for index, (kind, level, cpus) in enumerate(
                    [("Data", 1, f"{core},{core + cores}"), ("Instruction", 4, "0"), ("Unified", 3, shared)]
                ):
                    for name, value in (("type", kind), ("level", level), ("shared_cpu_list", cpus)):
                        write_file(folder / f"cache/index{index}/{name}", value)
    write_file(sysfs / "devices/system/node/possible", f"0-{sockets * nodes_per_socket - 1}")
    for index, node in enumerate(gpus):
        write_file(sysfs / f"bus/pci/devices/0000:{index:02x}:00.0/numa_node", node)
    return SimulatedMachine(sysfs, gpus, set(range(2 * cores)))


def choose_as_torch(machine: SimulatedMachine, mode: str, gpu: int, allowed_cpus: set[int], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the choice of torch, whose files are those of the simulated machine."""

    def relocate(path: str) -> str:
        return path.replace("/sys/", f"{machine.sysfs}/", 1) if str(path).startswith("/sys/") else path

    def get_properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=index, pci_device_id=0)

    listdir = os.listdir
    with monkeypatch.context() as patch:
        patch.setattr(torch_binding, "open", lambda path: Path(relocate(path)).open(), raising=False)  # noqa: SIM115  # torch closes it
        patch.setattr(torch_binding.os, "listdir", lambda path: listdir(relocate(path)))
        patch.setattr(torch_binding.os, "sched_getaffinity", lambda _: allowed_cpus)
        patch.setattr(torch_binding.torch.cuda, "device_count", lambda: len(machine.numa_nodes_of_gpus))
        patch.setattr(torch_binding.torch.cuda, "get_device_properties", get_properties)
        options = torch_binding.NumaOptions(torch_binding.AffinityMode(mode))
        chosen = torch_binding._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options)
        assert isinstance(chosen, set)
        return chosen


@pytest.mark.parametrize("mode", ["node", "socket", "exclusive", "core-complex"])
@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_that_of_torch(mode: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)  # noqa: S311
    sockets, nodes_per_socket = draw.choice([(1, 1), (2, 1), (2, 2), (1, 4)])
    cores_per_node = draw.choice([4, 6, 9, 16])
    numa_nodes = sockets * nodes_per_socket
    gpus = [draw.randrange(numa_nodes) for _ in range(draw.randint(1, 4))]
    if numa_nodes == 1:
        gpus = [-1] * len(gpus)  # the kernel knows of no node then
    machine = build_machine(
        tmp_path,
        sockets=sockets,
        nodes_per_socket=nodes_per_socket,
        cores_per_node=cores_per_node,
        cores_per_cache=draw.choice([2, 4]),
        gpus=gpus,
    )
    allowed_cpus = machine.cpus if seed % 2 else machine.cpus - {draw.choice(sorted(machine.cpus))}
    addresses = [f"0000:{index:02x}:00.0" for index in range(len(gpus))]
    for gpu in range(len(gpus)):
        expected = choose_as_torch(machine, mode, gpu, allowed_cpus, monkeypatch)
        assert choose_cpus(mode, gpu, addresses, allowed_cpus, tmp_path) == expected


def test_a_binding_that_is_impossible_is_an_error(tmp_path: Path) -> None:
    machine = build_machine(tmp_path, sockets=1, nodes_per_socket=1, cores_per_node=2, cores_per_cache=2, gpus=[0, 0, 0])
    addresses = [f"0000:{index:02x}:00.0" for index in range(3)]
    with pytest.raises(ValueError, match="3 GPUs cannot have a core each: their NUMA node has 2"):
        choose_cpus("exclusive", 0, addresses, machine.cpus, tmp_path)
    with pytest.raises(ValueError, match="no CPU near GPU 1 is available"):
        choose_cpus("node", 1, addresses, set(), tmp_path)
    with pytest.raises(FileNotFoundError):
        choose_cpus("node", 0, ["0000:ff:00.0"], machine.cpus, tmp_path)


def test_a_binding_that_is_impossible_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')")
    program = (
        "from swarmtrain.entrypoint.supervisor import rank_process\n"
        "def bind_to_gpu(mode, local_rank): raise ValueError(f'no CPU near GPU {local_rank}: {mode}')\n"
        "rank_process.bind_to_gpu = bind_to_gpu\n"
        "rank_process.run_rank('socket')\n"
    )
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "SWARMTRAIN_WORLD": "b-1/1", "SWARMTRAIN_RANK_STORE": "127.0.0.1:1"}
    with serve_coordinator() as served:
        env = NodeEnv("r", "node0", 1, 1, 1, served.address, "", str(tmp_path), str(script), (), {}, 5.0, str(tmp_path), (), "", "socket")
        variables = {**os.environ, **env.to_env(), **ranks}
        result = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert [event.data["error"] for event in served.list_events(EVENT_FAILURE)] == ["ValueError: no CPU near GPU 0: socket"]
