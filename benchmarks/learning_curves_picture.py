"""Draw the learning curves of `make bench ONLY=curves`: `python -m benchmarks.learning_curves_picture CURVES PICTURE`. Needs matplotlib."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib as mpl  # type: ignore[import-not-found]  # the benchmark installs it

mpl.use("svg")
from matplotlib import pyplot

_STYLES = {
    "ddp": ("data parallelism", "#4b5563", "-"),
    "powersgd": ("PowerSGD, rank 16", "#2456c8", "-"),
    "powersgd-4": ("PowerSGD, rank 4", "#7aa5ff", "-"),
    "diloco": ("DiLoCo, two learners", "#b8400e", "-"),
    "ddp-muon": ("data parallelism, Muon", "#4b5563", "--"),
    "diloco-muon": ("DiLoCo, two learners, Muon", "#b8400e", "--"),
}
"""Label, colour and line style of each method."""
_ENLARGED_FROM = 0.6
"""Part of the steps after which the second plot begins."""
_ENLARGED_HEIGHT = 0.2
"""Height of the second plot, in nats."""


def main() -> None:
    """Draw the validation losses by step: the mean of all seeds, and the range between the lowest and the highest."""
    curves_file, picture = map(Path, sys.argv[1:])
    mpl.rcParams["svg.hashsalt"] = picture.name  # equal data give equal pictures
    figure, (whole, enlarged) = pyplot.subplots(1, 2, figsize=(11, 4), gridspec_kw={"width_ratios": [3, 2]})
    lowest = float("inf")
    for name, curves in json.loads(curves_file.read_text()).items():
        steps = sorted(map(int, curves[0]))
        losses = [[curve[str(step)] for curve in curves] for step in steps]
        lowest = min(lowest, *losses[-1])
        label, color, style = _STYLES[name]
        for axes in (whole, enlarged):
            axes.plot(steps, [statistics.fmean(each) for each in losses], style, color=color, label=label, linewidth=1.6)
            axes.fill_between(steps, [*map(min, losses)], [*map(max, losses)], color=color, alpha=0.2, linewidth=0)
            axes.grid(color="#e5e7eb")
            axes.set_xlabel("step")
        enlarged.set_xlim(_ENLARGED_FROM * steps[-1], steps[-1])
    enlarged.set_ylim(lowest - _ENLARGED_HEIGHT / 10, lowest + _ENLARGED_HEIGHT)
    whole.set_ylabel("validation loss, nats per byte")
    whole.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
