"""The memory that `swarmtrain memory` estimates, and the memory that training needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

from swarmtrain.trainer.acceptance.models import MODEL_1B, TINY, merge_sections
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.session import Sections, build_config, free_device_memory, open_session
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.acceptance.worker import StageFunction, run_items_in_workers

_STEPS = 3
_TOLERANCE = 0.1
_ITEM_SECONDS = 60.0
_FEW_LAYERS: Sections = {"transformer_architecture": {"num_layers": 8}, "topology": {"global_batch_size": 2, "micro_batch_size": 2}}
_VARIANTS: Mapping[str, Sections] = {
    "eager": {},
    "selective recomputation": {"topology": {"activation_checkpointing_type": "selective"}},
    "recomputation of every layer": {"topology": {"activation_checkpointing_type": "every_layer"}},
    "two micro batches": {"topology": {"global_batch_size": 4}},
    "float32": {"transformer_architecture": {"precision": "float32"}},
    "FSDP, one rank": {"topology": {"data_parallel_type": "fsdp"}},
}


def run(context: StageContext) -> Iterator[Row]:
    """Yield a row for each variant. On the CPU only the estimate can be made."""
    base = merge_sections(MODEL_1B, _FEW_LAYERS) if context.is_cuda else TINY
    configs = {name: merge_sections(base, variant) for name, variant in _VARIANTS.items()}
    limit = context.scale_limit(_ITEM_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        estimated = pool.submit(_run_items, estimate, configs, limit, {"CUDA_VISIBLE_DEVICES": ""})
        measured = _run_items(measure, configs, limit, {}) if context.is_cuda else []
        estimates = {row.name: row for row in estimated.result()}
    peaks = {row.name: row for row in measured}
    for name in configs:
        rows = [estimates[name], *([peaks[name]] if name in peaks else [])]
        if failed := next((row for row in rows if row.outcome is Outcome.failed), None):
            yield failed
        elif name in peaks:
            estimated_gib, measured_gib = estimates[name].values["gib"], peaks[name].values["gib"]
            ratio = estimated_gib / measured_gib
            values = {"estimated_gib": estimated_gib, "measured_gib": measured_gib, "ratio": ratio}
            yield Row.from_check(name, abs(ratio - 1) <= _TOLERANCE, values, f"differs by more than {_TOLERANCE:.0%}")
        else:
            yield Row(name, values={"estimated_gib": estimates[name].values["gib"]})


def _run_items(function: StageFunction, configs: Mapping[str, Sections], limit: float, env: Mapping[str, str]) -> list[Row]:
    return list(run_items_in_workers(function, configs, timeout=limit, env=env))


def measure(items: Mapping[str, Sections]) -> Iterator[Row]:
    """Train each config for a few steps, and yield the peak of the allocated memory, in GiB."""
    for name, sections in items.items():
        free_device_memory()
        try:
            _train(sections)
            yield Row(name, values={"gib": torch.cuda.max_memory_allocated() / 2**30})
        except Exception as error:  # noqa: BLE001  # the other variants are still measured
            yield Row.from_error(name, error)


def _train(sections: Sections) -> None:
    """Train a few steps. A function of its own, so that nothing refers to the session, and its memory is free, once it returns."""
    with open_session(build_config(sections)) as session:
        for number in range(1, _STEPS + 1):
            session.run_step(number)


def estimate(items: Mapping[str, Sections]) -> Iterator[Row]:
    """Yield the estimated peak of each config for one rank, in GiB."""
    from swarmtrain.trainer.memory import estimate_memory

    for name, sections in items.items():
        estimates = estimate_memory(build_config(sections), 1)
        yield Row(name, values={"gib": max(max(each.peak, each.startup_peak) for each in estimates) / 2**30})
