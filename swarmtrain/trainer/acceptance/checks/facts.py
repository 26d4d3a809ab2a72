"""Facts about this machine: hardware, versions of libraries, and the speed of large copies and matrix products."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist

from swarmtrain import process
from swarmtrain.errors import ProcessError
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.stages import StageContext

_GPU_FIELDS = "name,driver_version,memory.total,power.limit,clocks.max.sm,temperature.gpu"
_COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**26}
_MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
_REPETITIONS = 9


def run(context: StageContext) -> Iterator[Row]:
    """Yield versions, then the speed of a copy in device memory and of a matrix product."""
    yield Row("versions", values=_collect_versions(context))
    if shutil.which("nvidia-smi"):
        try:
            lines = process.run_command(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"], timeout=20)
            for line in lines.strip().splitlines():
                yield Row("nvidia-smi", values=dict(zip(_GPU_FIELDS.split(","), line.split(", "), strict=True)))
        except ProcessError as error:
            yield Row("nvidia-smi", Outcome.failed, reason=error.output.strip())
    yield _measure_copy(context)
    yield _measure_matrix_product(context)


def _collect_versions(context: StageContext) -> dict[str, object]:
    values: dict[str, object] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": len(os.sched_getaffinity(0))}
    values["triton"] = _find_version("triton")
    values["compiler"] = next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), "none")
    if context.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        values |= {
            "gpu": properties.name,
            "gpus": context.gpu_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]  # not typed in torch
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",  # type: ignore[no-untyped-call]
        }
    return values


def _find_version(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return "none"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _measure_copy(context: StageContext) -> Row:
    source = torch.ones(_COPY_BYTES[context.device_type] // 4, device=context.device_type)
    target = torch.empty_like(source)
    seconds = _measure_seconds(lambda: target.copy_(source), context)
    return Row("copy in device memory", values={"tb_per_second": 2 * source.nbytes / seconds / 1e12})


def _measure_matrix_product(context: StageContext) -> Row:
    size = _MATRIX_SIZE[context.device_type]
    left, right = (torch.randn(size, size, device=context.device_type, dtype=torch.bfloat16) for _ in range(2))
    seconds = _measure_seconds(lambda: left @ right, context)
    return Row("bfloat16 matrix product", values={"size": size, "tflops": 2 * size**3 / seconds / 1e12})


def _measure_seconds(function: Callable[[], object], context: StageContext) -> float:
    """Return the median duration of `function` in seconds."""
    durations = []
    for _ in range(_REPETITIONS + 2):
        start_time = time.perf_counter()
        function()
        if context.is_cuda:
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start_time)
    return median(durations[2:])
