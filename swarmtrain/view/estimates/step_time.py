"""Text and JSON of the estimated time per step, for `swarmtrain plan`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from swarmtrain.planning.step_estimates import StepEstimate, StepEstimates
from swarmtrain.view.formatting import format_age


def format_estimates(estimates: StepEstimates) -> Iterator[str]:
    """Yield the lines for the user; none if there are no estimates, which is the case until doctor has measured training steps."""
    if not estimates.rows:
        return
    yield f"time per step, estimated from what doctor measured {_format_ages(estimates, time.time())}:"
    width = max(len(row.name) for row in estimates.rows)
    for row in estimates.rows:
        yield f"  {row.name.ljust(width)}  {_describe_row(row, estimates)}"
    for row in estimates.recommended:
        settings = " ".join(f"-o {key}={_format_value(value)}" for key, value in row.settings.items())
        yield f"  {row.name} would be faster{'' if row.is_exact else ', with other losses'}: {settings}"


def build_estimate_records(estimates: StepEstimates) -> dict[str, Any]:
    """Return the estimates in JSON-compatible form."""
    return {
        "rows": [
            {"name": row.name, "seconds": row.seconds, "network_seconds": row.network_seconds, "settings": dict(row.settings)}
            for row in estimates.rows
        ],
        "missing_reason": estimates.missing_reason,
        "recommended": [row.name for row in estimates.recommended],
        "exact_sum_seconds": estimates.exact_sum_seconds,
        "step_times_at": estimates.step_times_at,
        "links_at": estimates.links_at,
    }


def _format_ages(estimates: StepEstimates, now: float) -> str:
    ages = [format_age(now, estimates.step_times_at)]
    if estimates.links_at and estimates.links_at != estimates.step_times_at:
        ages.append(f"links {format_age(now, estimates.links_at)}")
    return ", ".join(ages)


def _describe_row(row: StepEstimate, estimates: StepEstimates) -> str:
    text = _format_seconds(row.seconds)
    if row.network_seconds:
        text += f", of which {_format_seconds(row.network_seconds)} network"
    if row.name == "ddp" and estimates.exact_sum_seconds:
        text += f" ({_format_seconds(estimates.exact_sum_seconds)} of it for exact sums)"
    text += "" if row.is_exact else "; not exact"
    return text if row.settings else f"{text}; as configured"


def _format_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
