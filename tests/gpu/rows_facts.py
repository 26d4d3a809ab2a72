"""Facts about this machine: hardware, versions of libraries, and the speed of large copies and matrix products."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Machine, Row
from workers import Worker

from swarmtrain import process

_GPU_FIELDS = "name,driver_version,memory.total,power.limit,clocks.max.sm,temperature.gpu"
_COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**26}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
_REPETITIONS = 9


def test_versions(row: Row, machine: Machine, worker: Worker) -> None:
    row.values |= worker.call(collect_versions, timeout=machine.scale_limit(60))
    assert row.values.get("gpus", 0) == machine.gpu_count


def collect_versions() -> dict[str, Any]:
    values: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": len(os.sched_getaffinity(0))}
    values["triton"] = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "none"
    values["compiler"] = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "none")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        values |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        }
    return values


def test_nvidia_smi(row: Row) -> None:
    row.name = "nvidia-smi"
    if not shutil.which("nvidia-smi"):
        pytest.skip("is not installed")
    first, *_ = process.run_command(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"], timeout=20).splitlines()
    row.values |= dict(zip(_GPU_FIELDS.split(","), first.split(", "), strict=True))


def test_copy_in_device_memory(row: Row, machine: Machine, worker: Worker) -> None:
    row.values |= worker.call(measure_copy, device_type=machine.device_type, timeout=machine.scale_limit(60))
    assert row.values["tb_per_second"] > 0


def measure_copy(device_type: str) -> dict[str, float]:
    source = torch.ones(_COPY_BYTES[device_type] // 4, device=device_type)
    target = torch.empty_like(source)
    seconds = _measure_seconds(lambda: target.copy_(source), device_type)
    return {"tb_per_second": 2 * source.nbytes / seconds / 1e12}


def test_bfloat16_matrix_product(row: Row, machine: Machine, worker: Worker) -> None:
    row.values |= worker.call(measure_matrix_product, device_type=machine.device_type, timeout=machine.scale_limit(60))
    assert row.values["tflops"] > 0


def measure_matrix_product(device_type: str) -> dict[str, float]:
    size = _MATRIX_SIZE[device_type]
    left, right = (torch.randn(size, size, device=device_type, dtype=torch.bfloat16) for _ in range(2))
    seconds = _measure_seconds(lambda: left @ right, device_type)
    return {"size": size, "tflops": 2 * size**3 / seconds / 1e12}


def _measure_seconds(function: Callable[[], object], device_type: str) -> float:
    """Return the median duration of `function` in seconds."""
    durations = []
    for _ in range(_REPETITIONS + 2):
        start_time = time.perf_counter()
        function()
        if device_type == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start_time)
    return median(durations[2:])
