"""`swarmtrain env`: the same environment on every host of a run over SSH."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import ConfigFile, Json, Overrides


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="env")(env)


def env(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    *,
    requirements: Annotated[
        Path | None, typer.Option("--requirements", "-r", help="A list of NAME==VERSION. Without it: what is installed here.")
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option("--wheels", metavar="DIR", help="Copy these wheels to the hosts, and install from them alone.")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option("--path", help="Where it is, on every host. Without it: PATH of runner.python PATH/bin/python3.", show_default=False),
    ] = None,
    python: Annotated[str, typer.Option("--python", help="The interpreter on the hosts that it is made with.")] = "python3",
    check: Annotated[bool, typer.Option("--check", help="Install nothing: prove what is there.")] = False,
    json: Json = False,
) -> None:
    """Make the same venv on every host of a pdsh run, of pinned versions, and prove that ranks find each other in it."""
    import os

    from swarmtrain.config.hosts import settled
    from swarmtrain.config.load import load
    from swarmtrain.errors import EXIT_ERROR
    from swarmtrain.launchers.ssh import environment
    from swarmtrain.view.console import progress
    from swarmtrain.view.data import show

    runner = settled(load(config_file, override), Path.cwd(), os.environ).runner
    interpreter = environment.interpreter(runner, path, check=check)
    interrupted = "" if check else "each host has the old environment or the new one, whole"
    with progress(f"{'proving' if check else 'making'} {interpreter}", interrupted=interrupted) as say:
        if check:
            report = environment.check(runner, interpreter, say)
        else:
            report = environment.make(runner, interpreter, requirements, wheels, python=python, say=say)
    show(report, as_json=json)
    raise typer.Exit(0 if report.sound else EXIT_ERROR)
