"""Losses and gradient norms of many configs on this device, compared with those of the same model in float32 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from conftest import Machine, Row
from models import Sections, build_config, free_device_memory, merge_sections
from variants import ARCHITECTURES, BASE, VARIANTS, Variant
from workers import Worker

from swarmtrain.trainer.speed.session import open_session

_STEPS = 3
_LIMIT_SECONDS = 100.0
_SIMILAR = 0.1
"""Tolerance of the loss if the reference draws other random numbers."""
_NORM_FACTOR = 10.0
"""Tolerance of the gradient norm, as a multiple of the loss's tolerance."""
_references: dict[str, dict[str, list[float]]] = {}
"""Results on the CPU, by config."""


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_losses_equal_float32_on_the_cpu(row: Row, machine: Machine, worker: Worker, cpu_worker: Worker, variant: Variant) -> None:
    if variant.needs_gpu and not machine.is_cuda:
        pytest.skip("needs a GPU")
    base = merge_sections(BASE, {"transformer_architecture": ARCHITECTURES[machine.device_type]})
    reference_config, limit = merge_sections(base, variant.model), machine.scale_limit(_LIMIT_SECONDS)
    key = json.dumps(reference_config)
    if key not in _references:  # many variants have the same reference
        cpu_worker.start(train, sections=reference_config)
    worker.start(train, sections=merge_sections(base, variant.model, variant.numerics))
    if key not in _references:
        _references[key] = cpu_worker.wait(limit)
    results = worker.wait(limit)
    loss_error, norm_error = (_find_largest_relative_error(results[name], _references[key][name]) for name in ("losses", "norms"))
    row.values |= {"loss_error": loss_error, "norm_error": norm_error, "loss": results["losses"][-1]}
    if variant.tolerance is None:
        assert loss_error <= _SIMILAR
    else:
        assert loss_error <= variant.tolerance
        assert norm_error <= variant.tolerance * _NORM_FACTOR


def train(sections: Sections) -> dict[str, list[float]]:
    """Train a config for a few steps, and return its losses and gradient norms."""
    free_device_memory()
    with open_session(build_config(sections)) as session:
        results = [session.run_step(number) for number in range(1, _STEPS + 1)]
    return {"losses": [each.loss for each in results], "norms": [each.update.gradient_norm for each in results]}


def _find_largest_relative_error(values: Sequence[float], references: Sequence[float]) -> float:
    """Return the largest relative error; infinity if a value is NaN."""
    errors = [abs(value - reference) / max(abs(reference), 1e-12) for value, reference in zip(values, references, strict=True)]
    return max(error if error == error else float("inf") for error in errors)  # noqa: PLR0124  # NaN differs from itself
