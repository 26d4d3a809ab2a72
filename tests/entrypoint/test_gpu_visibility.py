"""The GPUs that Swarm assigned to a container, from its environment, and those of the machine, from the driver's folder in /proc."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.entrypoint.assigned_gpus import build_gpu_environment
from swarmtrain.entrypoint.gpu_count import list_machine_gpus


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"DOCKER_RESOURCE_NVIDIA-GPU": "GPU-b,GPU-a"}, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}),
        ({"DOCKER_RESOURCE_NVIDIA-GPU": "GPU-b", "CUDA_VISIBLE_DEVICES": "0"}, {}),
        ({"DOCKER_RESOURCE_NVIDIA-GPU": "2"}, {}),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, {}),
    ],
    ids=["named", "the user's own word", "a number of them", "not reserved"],
)
def test_ranks_are_kept_to_the_gpus_that_swarm_gave(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert build_gpu_environment(environ) == expected


def test_the_machines_gpus_are_read_from_its_driver(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / "gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 52\nGPU UUID: \t GPU-{number}\nBus Type: PCIe\n")
    assert list_machine_gpus(tmp_path) == ["GPU-1", "GPU-2"]
    assert list_machine_gpus(tmp_path / "nowhere") == []
