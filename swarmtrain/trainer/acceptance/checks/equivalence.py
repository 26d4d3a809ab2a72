"""Losses and gradient norms of many configs on this device, compared with those of the same model in float32 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from swarmtrain.trainer.acceptance.checks.variants import ARCHITECTURES, BASE, VARIANTS, Variant
from swarmtrain.trainer.acceptance.models import merge_sections
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.session import Sections, build_config, free_device_memory, open_session
from swarmtrain.trainer.acceptance.stages import StageContext
from swarmtrain.trainer.acceptance.worker import run_items_in_workers

_STEPS = 3
_ITEM_SECONDS = 100.0
_SIMILAR = 0.1
"""Tolerance of the loss if the reference draws other random numbers."""
_NORM_FACTOR = 10.0
"""Tolerance of the gradient norm, as a multiple of the loss's tolerance."""


def run(context: StageContext) -> Iterator[Row]:
    """Yield a row for each variant, as far as the device supports it."""
    variants = {variant.name: variant for variant in VARIANTS if context.is_cuda or not variant.needs_gpu}
    base = merge_sections(BASE, {"transformer_architecture": ARCHITECTURES[context.device_type]})
    references = {name: merge_sections(base, variant.model) for name, variant in variants.items()}
    configs = {name: merge_sections(base, variant.model, variant.numerics) for name, variant in variants.items()}
    limit = context.scale_limit(_ITEM_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        reference_rows = pool.submit(_train_references, references, limit)
        device_rows = dict(zip(variants, run_items_in_workers(train, configs, timeout=limit), strict=True))
    for variant in VARIANTS:
        if variant.name in variants:
            yield _compare(variant, device_rows[variant.name], reference_rows.result()[variant.name])
        else:
            yield Row(variant.name, Outcome.skipped, reason="needs a GPU")


def _train_references(configs: Mapping[str, Sections], limit: float) -> dict[str, Row]:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    return dict(zip(configs, run_items_in_workers(train, configs, timeout=limit, env=env), strict=True))


def train(items: Mapping[str, Sections]) -> Iterator[Row]:
    """Train each of the configs `items` for a few steps, and yield its losses and gradient norms."""
    trained: dict[str, Row] = {}  # many variants have the same reference
    for name, sections in items.items():
        key = json.dumps(sections)
        if key not in trained:
            try:
                with open_session(build_config(sections)) as session:
                    results = [session.run_step(number) for number in range(1, _STEPS + 1)]
                values = {"losses": [each.loss for each in results], "norms": [each.update.gradient_norm for each in results]}
                trained[key] = Row(name, values=values)
            except Exception as error:  # noqa: BLE001  # the other configs are still checked
                trained[key] = Row.from_error(name, error)
            torch.compiler.reset()
            free_device_memory()
        yield replace(trained[key], name=name)


def _compare(variant: Variant, row: Row, reference: Row) -> Row:
    if row.outcome is Outcome.failed:
        return row
    if reference.outcome is Outcome.failed:
        return Row(variant.name, Outcome.failed, row.values, f"no reference\n{reference.reason}")
    loss_error, norm_error = (_find_largest_relative_error(row.values[name], reference.values[name]) for name in ("losses", "norms"))
    values = {"loss_error": loss_error, "norm_error": norm_error, "loss": row.values["losses"][-1]}
    if variant.tolerance is None:
        return Row.from_check(variant.name, loss_error <= _SIMILAR, values, f"loss may differ by {_SIMILAR}")
    reason = f"loss may differ by {variant.tolerance}, gradient norm by {variant.tolerance * _NORM_FACTOR:g}"
    return Row.from_check(variant.name, loss_error <= variant.tolerance and norm_error <= variant.tolerance * _NORM_FACTOR, values, reason)


def _find_largest_relative_error(values: Sequence[float], references: Sequence[float]) -> float:
    """Return the largest relative error; infinity if a value is NaN."""
    errors = [abs(value - reference) / max(abs(reference), 1e-12) for value, reference in zip(values, references, strict=True)]
    return max(error if error == error else float("inf") for error in errors)  # noqa: PLR0124  # NaN differs from itself
