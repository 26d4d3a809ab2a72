"""How far a run has come, as a bar on a terminal: how much of its steps is done, how it goes, how long the rest takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swarmtrain import wire
from swarmtrain.view.times import duration
from swarmtrain.wire import Event

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDTH = 40


def bar(progress: Mapping[str, Any], *, training: bool, loss: bool = False) -> RenderableType | None:
    """Return the bar of a progress event's data, with its `loss` if wished; None if it says nothing of steps."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    step, steps, left = (progress.get(name) for name in ("step", "steps", "eta_seconds"))
    if not steps or step is None:
        return None
    said = [f"{100 * step // steps:3} %"]
    if loss:
        said += [f"step {step:,} of {steps:,}"]
        said += [f"loss {progress['loss']:.4f}"] if progress.get("loss") is not None else []
        said += [f"{progress['tokens_per_second']:,.0f} tokens/s"] if progress.get("tokens_per_second") else []
    said += [f"{duration(left)} left"] if left is not None and training else []
    table = Table.grid(padding=(0, 2))
    table.add_row("", ProgressBar(total=steps, completed=step, width=_WIDTH), "  ".join(said))
    return table


@contextmanager
def below() -> Iterator[Callable[[Event], None]]:
    """Keep the bar of the newest progress that it is given below what is printed in the body, on a terminal; elsewhere do nothing."""
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        yield lambda event: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False), auto_refresh=False, transient=True) as live:

        def show(event: Event) -> None:
            if event.kind == wire.PROGRESS and (shown := bar(event.data, training=True, loss=True)):
                live.update(shown, refresh=True)

        yield show
