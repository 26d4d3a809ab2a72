"""`swarmtrain demo`: the quickstart, from nothing to a trained model."""

from pathlib import Path
from typing import Annotated

import typer


def register_commands(app: typer.Typer) -> None:
    """Register the command `demo` on the Typer app `app`."""
    app.command("demo")(run_demo)


def run_demo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the demo; created if missing.")] = Path("swarmtrain-demo"),
    *,
    use_lab: Annotated[
        bool | None,
        typer.Option("--lab/--local", help="Fail if a lab cannot run here, or use local nodes. Default: a lab if possible."),
    ] = None,
    assume_yes: Annotated[bool, typer.Option("--yes", "-y", help="Install missing packages without asking.")] = False,
) -> None:
    """Train a small model on a swarm of three Docker engines on this machine; without root, on three local nodes."""
    from swarmtrain.operations import demo

    raise typer.Exit(demo.run_demo(folder, use_lab=use_lab, assume_yes=assume_yes))
