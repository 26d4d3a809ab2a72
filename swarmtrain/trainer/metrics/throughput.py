"""Throughput in tokens per second, and FLOPs of a model, counted as in torchtitan and nanochat, so that results are comparable.

Each parameter of a matrix multiplication requires 2 FLOPs per token in the forward pass and 4 in the backward pass: 6 N for N such
parameters. Attention adds 12 × layers × width × sequence length, as if every token attended to the full sequence; causal attention needs
half of this. Recomputation (activation checkpointing) is not counted.
"""

from __future__ import annotations

import re
import time
from collections import deque

from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig

# Dense bfloat16 matrix TFLOPS (no sparsity, float32 accumulation) from the vendors' data sheets. The first name that the device's name
# contains is used, so a name that contains another name comes before it.
_PEAK_TFLOPS = {
    "MI355X": 2500.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI300A": 980.6,
    "MI250X": 191.5,  # one of its two dies: torch shows each die as a device
    "MI210": 181.0,
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71.0,
}
_LOW_PRECISIONS = (Precision.bfloat16, Precision.float16)
_WINDOW_STEPS = 50


def compute_flops_per_token(architecture: TransformerArchitectureConfig, parameter_count: int) -> int:
    """Return the FLOPs per token of a forward and backward pass of a model with `parameter_count` parameters in total."""
    lookup_parameters = 0 if architecture.has_tied_embeddings else architecture.vocab_size * architecture.hidden_size
    lookup_parameters += architecture.sequence_length * architecture.hidden_size if architecture.learned_positions else 0
    return (
        6 * (parameter_count - lookup_parameters)
        + 12 * architecture.num_layers * architecture.attention_width * architecture.sequence_length
    )


def find_peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the peak FLOPS of the device with the driver's name `device_name`; None if unknown.

    For float8, return the bfloat16 peak, as in other tools, so that the speed-up is visible in the MFU. For float32, return None, since
    the peak depends on whether TF32 is enabled.
    """
    if precision not in _LOW_PRECISIONS:
        return None
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS.items() if re.search(rf"\b{re.escape(name)}(?![0-9])", device_name)), None)


class Throughput:
    """Measures throughput, in tokens/s, as a moving average over the last 50 steps.

    The time for validation and checkpoints between steps is included.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=_WINDOW_STEPS + 1)

    def record_step(self, tokens: int) -> None:
        """Record that a step with `tokens` loss tokens has ended."""
        self._marks.append((time.monotonic(), self._marks[-1][1] + tokens))

    @property
    def tokens_per_second(self) -> float:
        """Loss tokens per second, summed over all ranks."""
        return (self._marks[-1][1] - self._marks[0][1]) / self._elapsed_seconds

    def estimate_seconds_left(self, steps_left: int) -> float:
        """Return the estimated time in seconds for the `steps_left` remaining steps."""
        return steps_left * self._elapsed_seconds / max(1, len(self._marks) - 1)

    @property
    def _elapsed_seconds(self) -> float:
        return max(1e-9, self._marks[-1][0] - self._marks[0][0])
