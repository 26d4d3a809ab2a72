"""What one step of a large model costs: host synchronizations, kernels per layer, the time of each kind of kernel, and idle time."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from conftest import Machine, Row
from models import COMPILE, MODEL_1B, TINY, Sections, build_config, merge_sections
from torch.profiler import ProfilerActivity, profile
from workers import Worker

from swarmtrain.trainer.speed.session import TrainingSession, open_session

_WARMUP_STEPS = 3
_TOP_KERNELS = 15
_NAME_LENGTH = 70
_FAST_ATTENTION = "flash", "cudnn", "fmha"


_VARIANTS = {"eager": {}, "compiled": COMPILE}


@pytest.fixture(scope="module", params=_VARIANTS)
def step(request: pytest.FixtureRequest, machine: Machine) -> dict[str, Any]:
    """The costs of a step, by the name of the measurement, and the variant's name."""
    if not machine.is_cuda and request.param != "eager":
        return {"name": request.param}
    sections = merge_sections(MODEL_1B if machine.is_cuda else TINY, _VARIANTS[request.param])
    with Worker() as worker:
        costs: dict[str, Any] = worker.call(measure, sections=sections, timeout=machine.scale_limit(70))
    return {**costs, "name": request.param}


def test_host_synchronizations(row: Row, machine: Machine, step: dict[str, Any]) -> None:
    row.name = f"host synchronizations, {step['name']}"
    if not machine.is_cuda:
        pytest.skip("needs a GPU")
    row.values |= step["synchronizations"]
    assert row.values["count"] == 1, "a step should read the device once"


def test_kernels(row: Row, machine: Machine, step: dict[str, Any]) -> None:
    row.name = f"{'kernels' if machine.is_cuda else 'operations'}, {step['name']}"
    if "kernels" not in step:
        pytest.skip("needs a GPU")
    row.values |= step["kernels"]
    if machine.is_cuda:
        assert row.values["attention"], "attention uses none of the fast kernels"
    else:
        assert row.values["operations_per_layer"] > 0


def test_longest_kernels(row: Row, machine: Machine, step: dict[str, Any]) -> None:
    row.name = f"longest kernels, {step['name']}"
    if not machine.is_cuda:
        pytest.skip("needs a GPU")
    row.values |= step["longest"]
    assert len(row.values) == _TOP_KERNELS


def measure(sections: Sections) -> dict[str, dict[str, Any]]:
    """Return the host synchronizations of a step, and its kernels."""
    with open_session(build_config(sections)) as session:
        for number in range(1, _WARMUP_STEPS + 1):
            session.run_step(number)
        if session.runtime.device.type == "cuda":
            return {"synchronizations": _count_synchronizations(session), **_profile_step(session)}
        return _profile_step(session)


def _count_synchronizations(session: TrainingSession) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session.run_step(_WARMUP_STEPS + 1)
    torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{each.filename.rpartition('swarmtrain/')[2]}:{each.lineno}" for each in caught if "synchroniz" in str(each.message))
    return {"count": places.total(), "places": ", ".join(f"{place} ({count})" for place, count in places.items())}


def _profile_step(session: TrainingSession) -> dict[str, dict[str, Any]]:
    on_cuda = session.runtime.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities) as profiler:
        session.run_step(_WARMUP_STEPS + 2)
        if on_cuda:
            torch.cuda.synchronize()
    layers = session.runtime.config.transformer_architecture.num_layers
    if not on_cuda:
        operations = sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))
        return {"kernels": {"operations_per_layer": operations / layers}}
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation]
    spans = sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    duration = end - spans[0][0]
    attention = {_shorten_kernel_name(kernel.name) for kernel in kernels if any(text in kernel.name.lower() for text in _FAST_ATTENTION)}
    milliseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in kernels:
        milliseconds[_shorten_kernel_name(kernel.name)] += kernel.time_range.elapsed_us() / 1e3
        counts[_shorten_kernel_name(kernel.name)] += 1
    return {
        "kernels": {
            "kernels": len(kernels),
            "kernels_per_layer": len(kernels) / layers,
            "step_ms": duration / 1e3,
            "idle_percent": 100 * (1 - busy / duration),
            "attention": ", ".join(sorted(attention)),
        },
        "longest": {kernel: f"{spent:.2f} ms in {counts[kernel]}" for kernel, spent in milliseconds.most_common(_TOP_KERNELS)},
    }


def _shorten_kernel_name(kernel_name: str) -> str:
    return kernel_name.removeprefix("void ").replace("at::native::", "")[:_NAME_LENGTH]
