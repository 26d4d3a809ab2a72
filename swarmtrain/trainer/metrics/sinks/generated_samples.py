"""Samples that a model generated from prompts, among the metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SAMPLES_KEY = "generated"
"""Key of the list of samples in a metrics line."""
GeneratedSample = dict[str, str]
"""A `prompt` and the generated `text`."""


def extract_samples(values: Mapping[str, Any]) -> Sequence[GeneratedSample]:
    """Return the samples among `values`: empty if there are none, or if a script uses that name for a number."""
    samples = values.get(SAMPLES_KEY)
    return samples if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples) else []
