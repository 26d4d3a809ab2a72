"""Tokens per second and model FLOPS utilization (MFU) of several configs, and of a loop of torch alone with the same model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch_loop
from conftest import Machine, Row
from models import COMPILE, DOCUMENTS, FLOAT8, MODEL_1B, SLICE_8B, TINY, Sections, build_config, free_device_memory, merge_sections
from workers import Worker

from swarmtrain.config import Config
from swarmtrain.trainer.metrics import throughput
from swarmtrain.trainer.speed.bench import run_benchmark
from swarmtrain.trainer.speed.session import open_session

_STEPS, _WARMUP_STEPS = 12, 5
_MFU_GOAL, _RATIO_GOAL = 0.5, 0.98
_LIMIT_SECONDS = 100.0
_LAYERS_8B = 32
_COMPILED, _DOCUMENTS = "1.2B, compiled", "1.2B, compiled, documents"
_LARGE_SLICE, _SMALL_SLICE = "8 layers of 8B, compiled", "4 layers of 8B, compiled"
_CONFIGS: Mapping[str, Sections] = {
    _COMPILED: merge_sections(MODEL_1B, COMPILE),
    "1.2B, eager": MODEL_1B,
    _DOCUMENTS: merge_sections(MODEL_1B, COMPILE, DOCUMENTS),
    "1.2B, compiled, float8": merge_sections(MODEL_1B, COMPILE, FLOAT8),
    _LARGE_SLICE: merge_sections(SLICE_8B, COMPILE),
    _SMALL_SLICE: merge_sections(SLICE_8B, COMPILE, {"transformer_architecture": {"num_layers": 4}}),
}
_Speeds = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def speeds() -> _Speeds:
    """What the tests of this module have measured, by the name of the row."""
    return {}


def test_torch_alone(row: Row, machine: Machine, worker: Worker, speeds: _Speeds) -> None:
    sections = MODEL_1B if machine.is_cuda else TINY
    config = build_config(sections)
    values = worker.call(
        torch_loop.measure,
        shape=sections["transformer_architecture"],
        batch_size=config.topology.samples_per_step,
        steps=_STEPS,
        warmup_steps=_WARMUP_STEPS,
        device_type=machine.device_type,
        compiled=machine.is_cuda,
        timeout=machine.scale_limit(_LIMIT_SECONDS),
    )
    worker.close()  # frees its memory
    values["tokens_per_second"] = _count_tokens(config) / values["step_seconds"]
    values |= _compute_mfu(config, values) if machine.is_cuda else {}
    row.values |= values
    speeds[row.name] = values
    assert values["last_loss"] < values["first_loss"]


def test_tiny_model(row: Row, machine: Machine, worker: Worker) -> None:
    row.name = "tiny model, eager"
    if machine.is_cuda:
        pytest.skip("is measured on a CPU")
    row.values |= worker.call(measure, sections=TINY, timeout=machine.scale_limit(_LIMIT_SECONDS))
    assert row.values["p10_seconds"] <= row.values["step_seconds"] <= row.values["p90_seconds"]


@pytest.mark.parametrize("name", _CONFIGS)
def test_speed(row: Row, machine: Machine, worker: Worker, speeds: _Speeds, name: str) -> None:
    if not machine.is_cuda:
        pytest.skip("needs a GPU")
    speeds[name] = worker.call(measure, sections=_CONFIGS[name], timeout=_LIMIT_SECONDS)
    if name == _COMPILED and "torch alone" in speeds:
        row.values["ratio"] = speeds["torch alone"]["step_seconds"] / speeds[name]["step_seconds"]
        reached = row.values["ratio"] >= _RATIO_GOAL and speeds[name].get("mfu", _MFU_GOAL) >= _MFU_GOAL
        row.check_goal(reached, f"MFU {_MFU_GOAL:.0%}, {_RATIO_GOAL} × torch alone")
    row.values |= speeds[name]
    assert row.values["p10_seconds"] <= row.values["step_seconds"] <= row.values["p90_seconds"]


def test_extrapolated_speed(row: Row, speeds: _Speeds) -> None:
    """Each of 32 layers takes as long as each of the four by which the two slices differ."""
    row.name = "8B, extrapolated"
    if not {_LARGE_SLICE, _SMALL_SLICE} <= speeds.keys():
        pytest.skip("needs the rows of two slices")
    large, small = speeds[_LARGE_SLICE], speeds[_SMALL_SLICE]
    layer_seconds, layer_parameters = ((large[name] - small[name]) / 4 for name in ("step_seconds", "parameters"))
    values = {
        "layer_ms": 1e3 * layer_seconds,
        "step_seconds": large["step_seconds"] + (_LAYERS_8B - 8) * layer_seconds,
        "parameters": round(large["parameters"] + (_LAYERS_8B - 8) * layer_parameters),
    }
    config = build_config(merge_sections(SLICE_8B, {"transformer_architecture": {"num_layers": _LAYERS_8B}}))
    tokens_per_second = _count_tokens(config) / values["step_seconds"]
    row.values |= values | _compute_mfu(config, {**values, "tokens_per_second": tokens_per_second})
    assert layer_seconds > 0


@pytest.mark.parametrize(("name", "mode"), [(_COMPILED, "prefer"), (_COMPILED, "require"), (_DOCUMENTS, "require")])
def test_deterministic_speed(row: Row, machine: Machine, name: str, mode: str) -> None:
    row.name = f"{name}, {mode}"
    if not machine.is_cuda:
        pytest.skip("needs a GPU")
    with Worker() as worker:  # determinism is a setting of the process
        row.values |= worker.call(
            measure, sections=merge_sections(_CONFIGS[name], {"trainer": {"deterministic": mode}}), timeout=_LIMIT_SECONDS
        )
    assert row.values["p10_seconds"] <= row.values["step_seconds"] <= row.values["p90_seconds"]


def measure(sections: Sections) -> dict[str, Any]:
    """Train a config for some steps, and return its speed and memory."""
    free_device_memory()
    start_time = time.perf_counter()
    config = build_config(sections)
    with open_session(config) as session:
        results = run_benchmark(session, steps=_STEPS, warmup_steps=_WARMUP_STEPS)
    seconds, memory = results["step_seconds"], results["memory"]
    tokens_per_second = _count_tokens(config) / seconds["median"]
    return {
        # Of the median step, as for torch alone: the mean contains steps in which the garbage collector runs.
        **({"mfu": results["mfu"] / results["tokens_per_second"] * tokens_per_second} if "mfu" in results else {}),
        "tokens_per_second": tokens_per_second,
        "step_seconds": seconds["median"],
        "p10_seconds": seconds["p10"],
        "p90_seconds": seconds["p90"],
        "parameters": results["parameters"],
        **{f"{phase}_ms": 1e3 * duration for phase, duration in results["phases"].items()},
        **({"peak_gib": memory["peak"] / 2**30} if "peak" in memory else {}),
        "total_seconds": time.perf_counter() - start_time,
    }


def _count_tokens(config: Config) -> int:
    """Return the number of tokens of a step."""
    return config.topology.samples_per_step * config.transformer_architecture.sequence_length


def _compute_mfu(config: Config, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the MFU, if the GPU's peak is known."""
    peak = throughput.find_peak_flops(torch.cuda.get_device_name(), config.transformer_architecture.precision)
    flops_per_token = throughput.compute_flops_per_token(config.transformer_architecture, values["parameters"])
    return {"mfu": values["tokens_per_second"] * flops_per_token / peak} if peak else {}
