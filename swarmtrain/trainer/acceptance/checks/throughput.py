"""Tokens per second and model FLOPS utilization (MFU) of several configs, and of a loop of torch alone with the same model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from swarmtrain.trainer.acceptance.checks import torch_loop
from swarmtrain.trainer.acceptance.models import COMPILE, DOCUMENTS, FLOAT8, MODEL_1B, SLICE_8B, TINY, merge_sections
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.session import Sections, build_config, free_device_memory, open_session
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.acceptance.worker import run_items_in_workers, run_worker
from swarmtrain.trainer.metrics import flops
from swarmtrain.trainer.speed.bench import run_benchmark

_STEPS, _WARMUP_STEPS = 12, 5
_MFU_GOAL, _RATIO_GOAL = 0.5, 0.98
_HALF_SLICE: Sections = {"transformer_architecture": {"num_layers": 4}}
_ITEM_SECONDS = 100.0
_LAYERS_8B = 32
_TORCH_LOOP, _COMPILED, _DOCUMENTS = "torch alone", "1.2B, compiled", "1.2B, compiled, documents"
_LARGE_SLICE, _SMALL_SLICE = "8 layers of 8B, compiled", "4 layers of 8B, compiled"


def run(context: StageContext) -> Iterator[Row]:
    """Yield a row for each config; the first has a goal for its MFU, and one for its speed relative to torch alone."""
    base = MODEL_1B if context.is_cuda else TINY
    configs: dict[str, Sections] = {_COMPILED: merge_sections(base, COMPILE)} if context.is_cuda else {"tiny model, eager": base}
    if context.is_cuda:
        configs |= {
            "1.2B, eager": base,
            _DOCUMENTS: merge_sections(base, COMPILE, DOCUMENTS),
            "1.2B, compiled, float8": merge_sections(base, COMPILE, FLOAT8),
            _LARGE_SLICE: merge_sections(SLICE_8B, COMPILE),
            _SMALL_SLICE: merge_sections(SLICE_8B, COMPILE, _HALF_SLICE),
        }
    baseline = _measure_torch_loop(base, context)
    yield baseline
    rows: dict[str, Row] = {}
    for row in run_items_in_workers(measure, configs, timeout=context.scale_limit(_ITEM_SECONDS)):
        rows[row.name] = row
        yield _check_goals(row, baseline) if row.name == _COMPILED else row
    if context.is_cuda:
        yield from _extrapolate_to_8b(rows)
        # Determinism is a setting of the process, so it needs another one.
        deterministic = {
            f"{name}, {mode}": merge_sections(configs[name], {"trainer": {"deterministic": mode}})
            for mode, name in (("prefer", _COMPILED), ("require", _COMPILED), ("require", _DOCUMENTS))
        }
        yield from run_items_in_workers(measure, deterministic, timeout=_ITEM_SECONDS)


def measure(items: Mapping[str, Sections]) -> Iterator[Row]:
    """Train each of the configs `items` for some steps, and yield its speed and memory."""
    for name, sections in items.items():
        free_device_memory()
        try:
            yield Row(name, values=_measure_config(sections))
        except Exception as error:  # noqa: BLE001  # the other configs are still measured
            yield Row.from_error(name, error)
        torch.compiler.reset()


def _measure_config(sections: Sections) -> dict[str, float]:
    start_time = time.perf_counter()
    with open_session(build_config(sections)) as session:
        results = run_benchmark(session.runtime, session.model, session.optimizer, session.data, steps=_STEPS, warmup_steps=_WARMUP_STEPS)
        tokens = session.runtime.config.topology.samples_per_step * session.data.sequence_length
    seconds, memory = results["step_seconds"], results["memory"]
    tokens_per_second = tokens / seconds["median"]
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


def _measure_torch_loop(sections: Sections, context: StageContext) -> Row:
    config = build_config(sections)
    shape = dict(sections["transformer_architecture"])
    tokens = config.topology.samples_per_step * config.transformer_architecture.sequence_length
    arguments = {
        "shape": shape,
        "batch_size": config.topology.samples_per_step,
        "steps": _STEPS,
        "warmup_steps": _WARMUP_STEPS,
        "device_type": context.device_type,
        "compiled": context.is_cuda,
    }
    *_, row = run_worker(torch_loop.measure, arguments, timeout=context.scale_limit(_ITEM_SECONDS))
    if row.outcome is Outcome.failed:
        return replace(row, name=_TORCH_LOOP)
    tokens_per_second = tokens / row.values["step_seconds"]
    values = {"tokens_per_second": tokens_per_second, **row.values}
    if context.is_cuda and (peak := flops.find_peak_flops(torch.cuda.get_device_name(), config.transformer_architecture.precision)):
        flops_per_token = flops.compute_flops_per_token(config.transformer_architecture, row.values["parameters"])
        values["mfu"] = tokens_per_second * flops_per_token / peak
    return Row(_TORCH_LOOP, values=values)


def _check_goals(row: Row, baseline: Row) -> Row:
    if row.outcome is Outcome.failed or baseline.outcome is Outcome.failed:
        return row
    ratio, mfu = baseline.values["step_seconds"] / row.values["step_seconds"], row.values.get("mfu")
    reached = ratio >= _RATIO_GOAL and (mfu is None or mfu >= _MFU_GOAL)
    return Row.from_goal(row.name, reached, {"ratio": ratio, **row.values}, f"MFU {_MFU_GOAL:.0%}, {_RATIO_GOAL} × torch alone")


def _extrapolate_to_8b(rows: Mapping[str, Row]) -> Iterator[Row]:
    """Yield the MFU of 32 layers: each layer takes as long as each of the four by which the two slices differ."""
    large, small = rows[_LARGE_SLICE], rows[_SMALL_SLICE]
    if Outcome.failed in (large.outcome, small.outcome) or "mfu" not in large.values:
        return
    layer_seconds = (large.values["step_seconds"] - small.values["step_seconds"]) / 4
    layer_parameters = (large.values["parameters"] - small.values["parameters"]) / 4
    step_seconds = large.values["step_seconds"] + (_LAYERS_8B - 8) * layer_seconds
    full = merge_sections(SLICE_8B, {"transformer_architecture": {"num_layers": _LAYERS_8B}})
    config = build_config(full)
    architecture = config.transformer_architecture
    parameters = round(large.values["parameters"] + (_LAYERS_8B - 8) * layer_parameters)
    tokens = config.topology.samples_per_step * architecture.sequence_length
    flops_per_token = flops.compute_flops_per_token(architecture, parameters)
    peak = flops.find_peak_flops(torch.cuda.get_device_name(), architecture.precision) or float("nan")
    values = {"layer_ms": 1e3 * layer_seconds, "step_seconds": step_seconds, "mfu": tokens * flops_per_token / step_seconds / peak}
    yield Row("8B, extrapolated", values={**values, "parameters": parameters})
