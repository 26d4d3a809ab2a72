"""What one step of a large model costs: host synchronizations, kernels per layer, the time of each kind of kernel, and idle time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from swarmtrain.trainer.acceptance.models import COMPILE, MODEL_1B, TINY, merge_sections
from swarmtrain.trainer.acceptance.rows import Row
from swarmtrain.trainer.acceptance.session import TrainingSession, build_config, open_session
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.acceptance.worker import run_worker

_WARMUP_STEPS = 3
_TOP_KERNELS = 15
_NAME_LENGTH = 70
_FAST_ATTENTION = "flash", "cudnn", "fmha"


def run(context: StageContext) -> Iterator[Row]:
    """Yield the costs of a step of the eager model, then of the compiled one."""
    base = MODEL_1B if context.is_cuda else TINY
    for name, sections in {"eager": base, **({"compiled": merge_sections(base, COMPILE)} if context.is_cuda else {})}.items():
        yield from run_worker(measure, {"name": name, "sections": sections}, timeout=context.scale_limit(70))


def measure(name: str, sections: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the host synchronizations of a step, then its kernels."""
    with open_session(build_config(sections)) as session:
        for number in range(1, _WARMUP_STEPS + 1):
            session.run_step(number)
        if session.runtime.device.type == "cuda":
            yield _count_synchronizations(name, session)
        yield from _profile_step(name, session)


def _count_synchronizations(name: str, session: TrainingSession) -> Row:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.run_step(_WARMUP_STEPS + 1)
    torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{each.filename.rpartition('swarmtrain/')[2]}:{each.lineno}" for each in caught if "synchroniz" in str(each.message))
    values = {"count": places.total(), "places": ", ".join(f"{place} ({count})" for place, count in places.items())}
    return Row.from_check(f"host synchronizations, {name}", places.total() == 1, values, "a step should read the device once")


def _profile_step(name: str, session: TrainingSession) -> Iterator[Row]:
    on_cuda = session.runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        session.run_step(_WARMUP_STEPS + 2)
        if on_cuda:
            torch.cuda.synchronize()
    layers = session.runtime.config.transformer_architecture.num_layers
    if not on_cuda:
        operations = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
        yield Row(f"operations, {name}", values={"per_layer": operations / layers})
        return
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation]
    spans = sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    duration = end - spans[0][0]
    attention = sorted(
        {_shorten_kernel_name(kernel.name) for kernel in kernels if any(text in kernel.name.lower() for text in _FAST_ATTENTION)}
    )
    values = {
        "kernels": len(kernels),
        "kernels_per_layer": len(kernels) / layers,
        "step_ms": duration / 1e3,
        "idle_percent": 100 * (1 - busy / duration),
        "attention": ", ".join(attention),
    }
    yield Row.from_check(f"kernels, {name}", bool(attention), values, "attention uses none of the fast kernels")
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in kernels:
        seconds[_shorten_kernel_name(kernel.name)] += kernel.time_range.elapsed_us() / 1e3
        counts[_shorten_kernel_name(kernel.name)] += 1
    top = {kernel: f"{milliseconds:.2f} ms in {counts[kernel]}" for kernel, milliseconds in seconds.most_common(_TOP_KERNELS)}
    yield Row(f"longest kernels, {name}", values=top)


def _shorten_kernel_name(kernel_name: str) -> str:
    return kernel_name.removeprefix("void ").replace("at::native::", "")[:_NAME_LENGTH]
