"""A node compares its GPUs with those that the plan assumes. The GPUs are those that a simulated nvidia-smi lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swarmtrain.entrypoint.gpu_count import count_usable_gpus, find_gpu_count_problem, find_unused_gpu_warnings

LISTING = "".join(f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: GPU-{number}a-4f)\n" for number in range(4))
MIG_LISTING = "GPU 0: NVIDIA A100 (UUID: GPU-0a)\n  MIG 3g.20gb     Device  0: (UUID: MIG-1)\n"


@pytest.fixture
def device_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of device files, and a PATH without nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


def write_nvidia_smi(folder: Path, listing: str, exit_code: int = 0) -> None:
    (folder / "listing").write_text(listing)
    lines = f'while IFS= read -r line; do echo "$line"; done < {folder}/listing'
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\n[ "$1" = -L ] || exit 2\n{lines}\nexit {exit_code}\n')
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("environ", "listing", "count"),
    [
        ({}, LISTING, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, LISTING, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-3a-4f"}, LISTING, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, LISTING, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, LISTING, 0),
        ({}, MIG_LISTING, None),
    ],
)
def test_the_usable_gpus_are_counted_as_cuda_counts_them(
    device_folder: Path, environ: dict[str, str], listing: str, count: int | None
) -> None:
    write_nvidia_smi(device_folder.parent, listing)
    assert count_usable_gpus(environ, device_folder) == (count, "")


def test_without_nvidia_smi_the_device_files_are_counted(device_folder: Path) -> None:
    assert count_usable_gpus({}, device_folder) == (0, " (no NVIDIA device or nvidia-smi in its container)")
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (device_folder / name).touch()
    assert count_usable_gpus({}, device_folder) == (2, "")
    (device_folder / "kfd").touch()  # GPUs of AMD
    assert count_usable_gpus({}, device_folder) == (None, "")


@pytest.mark.parametrize(
    ("assumed", "problem"),
    [
        (None, ""),
        ("4", ""),
        ("3+", ""),
        ("3", "finds 4 GPUs, but the slots of the plan assume 3: run swarmtrain doctor CONFIG"),
        ("8", "finds 4 GPUs, but the slots of the plan assume 8: "),
        ("8+", "finds 4 GPUs, but the slots of the plan assume 8: "),
    ],
)
def test_another_number_than_the_plan_assumes_is_a_problem(device_folder: Path, assumed: str | None, problem: str) -> None:
    write_nvidia_smi(device_folder.parent, LISTING)
    environ = {} if assumed is None else {"SWARMTRAIN_GPUS": assumed}
    assert find_gpu_count_problem(environ, device_folder).startswith(problem or "nothing" * bool(problem))
    assert bool(find_gpu_count_problem(environ, device_folder)) is bool(problem)
    assert find_gpu_count_problem({**environ, "SWARMTRAIN_SIMULATED_GPUS": "2"}, device_folder) == ""


def test_the_words_of_a_driver_that_fails_are_in_the_problem(device_folder: Path) -> None:
    write_nvidia_smi(device_folder.parent, "Failed to initialize NVML: Driver/library version mismatch\n", 18)
    assert find_gpu_count_problem({"SWARMTRAIN_GPUS": "4"}, device_folder).startswith(
        "finds 0 GPUs (nvidia-smi: Failed to initialize NVML: Driver/library version mismatch), but the slots of the plan assume 4"
    )


def test_hidden_gpus_are_reported(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"gpus/0000:0{number}:00.0").mkdir(parents=True)
        (tmp_path / f"gpus/0000:0{number}:00.0/information").write_text(f"GPU UUID: \t GPU-{number}\n")
    assert find_unused_gpu_warnings({"NVIDIA_VISIBLE_DEVICES": "all"}, tmp_path) == []
    [warning] = find_unused_gpu_warnings({"NVIDIA_VISIBLE_DEVICES": "void"}, tmp_path)
    assert warning.startswith("this machine has 2 GPUs, but the run uses none")


def test_a_node_with_other_gpus_than_planned_reports_both_numbers_and_ends_the_run(small_run: Any, device_folder: Path) -> None:
    write_nvidia_smi(device_folder.parent, LISTING)
    small_run.start_coordinator(min_nodes=1)
    environment = {"SWARMTRAIN_GPUS": "8", "PATH": f"{device_folder.parent}:/usr/bin:/bin"}
    small_run.start_node(0, "print('trained')", slots=8, node_range=(1, 1), environment=environment)
    small_run.wait_for_exit()
    assert "finds 4 GPUs, but the slots of the plan assume 8" in small_run.read_events("outcome")[0].data["reason"]
    assert "trained" not in small_run.read_output()
