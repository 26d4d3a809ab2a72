"""Draw learning-curves.svg: validation losses of data parallelism, PowerSGD and DiLoCo at equal tokens.

The data are those of `make bench ONLY=curves`. Needs matplotlib.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[2]
CURVES_FILE = ROOT / "build" / "bench" / "learning-curves.json"
PICTURE = Path(__file__).with_name("learning-curves.svg")
LABELS = {"ddp": "data parallelism", "powersgd": "PowerSGD", "diloco": "DiLoCo, two learners"}
COLORS = {"ddp": "#4b5563", "powersgd": "#2456c8", "diloco": "#b8400e"}


def main() -> int:
    if not CURVES_FILE.exists():
        sys.stderr.write(f"error: {CURVES_FILE.relative_to(ROOT)} does not exist\nhint: make bench ONLY=curves\n")
        return 1
    mpl.rcParams["svg.hashsalt"] = PICTURE.name  # the same picture from the same data
    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(11, 4), gridspec_kw={"width_ratios": [3, 2]})
    for name, curves in json.loads(CURVES_FILE.read_text()).items():
        steps = sorted(map(int, curves[0]))
        losses = [[curve[str(step)] for curve in curves] for step in steps]
        for axes in (whole, end):
            axes.plot(steps, [statistics.fmean(each) for each in losses], color=COLORS[name], label=LABELS[name], linewidth=1.6)
            axes.fill_between(
                steps, [min(each) for each in losses], [max(each) for each in losses], color=COLORS[name], alpha=0.2, linewidth=0
            )
            axes.grid(color="#e5e7eb")
            axes.set_xlabel("step")
    whole.set_ylabel("validation loss, nats per byte")
    whole.legend(frameon=False)
    end.set_xlim(0.6 * steps[-1], steps[-1])
    end.set_ylim(min(losses[-1]) - 0.02, min(losses[-1]) + 0.2)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
