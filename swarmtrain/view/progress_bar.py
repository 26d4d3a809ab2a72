"""Progress bar of a run on a terminal: completed steps, metrics, and estimated time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swarmtrain import protocol
from swarmtrain.protocol import Event
from swarmtrain.view.formatting import format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR_WIDTH = 40


def render_progress_bar(progress: Mapping[str, Any], *, show_time_left: bool, show_metrics: bool = False) -> RenderableType | None:
    """Return the progress bar for the data of a progress event; None if the step or the total number of steps is missing.

    With `show_time_left`, include the time left; with `show_metrics`, the step and metrics.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    step, steps, seconds_left = (progress.get(name) for name in ("step", "steps", "eta_seconds"))
    if not steps or step is None:
        return None
    labels = [f"{100 * step // steps:3} %"]
    if show_metrics:
        labels += [f"step {step:,} of {steps:,}"]
        labels += [f"loss {progress['loss']:.4f}"] if progress.get("loss") is not None else []
        labels += [f"{progress['tokens_per_second']:,.0f} tokens/s"] if progress.get("tokens_per_second") else []
    labels += [f"{format_duration(seconds_left)} left"] if seconds_left is not None and show_time_left else []
    table = Table.grid(padding=(0, 2))
    table.add_row("", ProgressBar(total=steps, completed=step, width=_BAR_WIDTH), "  ".join(labels))
    return table


@contextmanager
def show_progress_bar() -> Iterator[Callable[[Event], None]]:
    """Show a progress bar of the newest progress event below the output of the `with` block, on a terminal; elsewhere do nothing.

    Yields a function that updates the bar if it is called with a progress event.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda event: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False), auto_refresh=False, transient=True) as live:

        def update_bar(event: Event) -> None:
            if event.kind == protocol.EVENT_PROGRESS and (
                rendered := render_progress_bar(event.data, show_time_left=True, show_metrics=True)
            ):
                live.update(rendered, refresh=True)

        yield update_bar
