"""The printed memory estimate of a config: the worst rank decides, and changes that would fit come first."""

from __future__ import annotations

from typing import Any

from swarmtrain.view.estimates.memory import MemoryEstimate

GIB = 2**30
RANKS: list[dict[str, Any]] = [
    {
        "rank": 0,
        "stages": [0],
        "startup_peak": GIB,
        "peak": 30 * GIB,
        "memory_by_category": {"parameters": 10 * GIB, "activations": 20 * GIB},
    },
    {"rank": 4, "stages": [1], "startup_peak": GIB, "peak": 75 * GIB, "memory_by_category": {"parameters": 10 * GIB, "logits": 65 * GIB}},
]
CHANGES: list[dict[str, Any]] = [
    {"changes": ["optimizer.zero=true"], "peak": 74 * GIB},
    {"changes": ["topology.micro_batch_size=1"], "peak": 40 * GIB},
    {"changes": ["topology.activation_checkpointing_type=every_layer"], "peak": 80 * GIB},
]


def test_the_worst_rank_decides_and_what_fits_comes_first() -> None:
    estimate = MemoryEstimate(8, RANKS, 80 * GIB, CHANGES)
    assert not estimate.fits
    assert (estimate.to_dict()["worst"], [change["fits"] for change in estimate.to_dict()["alternatives"]]) == (4, [False, True, False])
    assert str(estimate).splitlines()[-4:] == [
        "does not fit a device of 80.0 GiB, of which tensors can fill 72.0 GiB: 3.0 GiB too much",
        "peak with other settings:",
        "  -o topology.micro_batch_size=1  40.0 GiB  fits",
        "  -o optimizer.zero=true          74.0 GiB",
    ]


def test_with_nothing_to_compare_it_with_it_is_only_printed() -> None:
    estimate = MemoryEstimate(8, RANKS, None, [])
    assert estimate.fits
    assert str(estimate).splitlines()[1].split() == ["stage", "0", "stage", "1"]
