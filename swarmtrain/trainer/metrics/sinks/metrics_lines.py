"""Metrics lines that sinks receive: those that a run logged before it was resumed, and generated samples in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SAMPLES_KEY = "generated"
"""Key of the list of generated samples in a metrics line."""
GeneratedSample = dict[str, str]
"""A text that a model has generated from a prompt, with the keys `prompt` and `text`."""


@dataclass(frozen=True)
class ResumeHistory:
    """Metrics lines of the steps up to and including `step`, the step from which the run resumes. Empty if the run has no metrics file."""

    step: int
    lines: Sequence[dict[str, Any]]

    @property
    def last_step_lines(self) -> list[dict[str, Any]]:
        """Metrics lines whose step is `step`."""
        return [line for line in self.lines if line["step"] == self.step]

    @property
    def last_step_metric_names(self) -> frozenset[str]:
        """Names of the metrics that were already logged for `step`."""
        return frozenset(name for line in self.last_step_lines for name in line)


def extract_samples(metrics_line: Mapping[str, Any]) -> Sequence[GeneratedSample]:
    """Return the generated samples in `metrics_line`.

    The result is empty if there are none, or if a custom script logs a number under the same key.
    """
    samples = metrics_line.get(SAMPLES_KEY)
    return samples if isinstance(samples, list) and all(isinstance(sample, dict) for sample in samples) else []
