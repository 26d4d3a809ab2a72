"""Texts that a model has generated from prompts (generated samples), as part of a metrics line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SAMPLES_KEY = "generated"
"""Key of the list of generated samples in a metrics line."""
GeneratedSample = dict[str, str]
"""A generated sample, with the keys `prompt` and `text`."""


def extract_samples(metrics_line: Mapping[str, Any]) -> Sequence[GeneratedSample]:
    """Return the generated samples in `metrics_line`.

    The result is empty if there are none, or if a custom script logs a number under the same key.
    """
    samples = metrics_line.get(SAMPLES_KEY)
    return samples if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples) else []
