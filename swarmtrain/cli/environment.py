"""`swarmtrain env`: the same Python environment on every host of a run over SSH."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import ConfigFileArgument, JsonOption, OverridesOption


def register_commands(app: typer.Typer) -> None:
    """Register the command `env` on the Typer app `app`."""
    app.command(name="env")(create_environment)


def create_environment(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    *,
    requirements: Annotated[
        Path | None, typer.Option("--requirements", "-r", help="File of NAME==VERSION lines. Default: the packages installed here.")
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option("--wheels", metavar="DIR", help="Copy these wheels to the hosts, and install from them only.")
    ] = None,
    environment_path: Annotated[
        str | None,
        typer.Option(
            "--path",
            help="Path of the venv on every host. Default: PATH if runner.python is PATH/bin/python3; "
            "~/.local/share/swarmtrain/env if it is null.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[str, typer.Option("--python", help="Python interpreter on the hosts to create the venv with.")] = "python3",
    check: Annotated[bool, typer.Option("--check", help="Only verify the existing venv; install nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Create the same Python venv on every host of an `ssh` run, from pinned versions, and verify that ranks can communicate in it."""
    import os

    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.config.external_inputs import resolve_external_inputs
    from swarmtrain.errors import EXIT_ERROR
    from swarmtrain.launchers.ssh import python_environment
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_result

    runner = resolve_external_inputs(load_config_file(config_file, overrides), Path.cwd(), os.environ).runner
    interpreter = python_environment.resolve_interpreter(runner, environment_path, check_only=check)
    interrupt_hint = "" if check else "each host has either the complete old environment or the complete new one"
    with show_progress(f"{'verifying' if check else 'creating'} {interpreter}", interrupt_hint=interrupt_hint) as report_progress:
        if check:
            report = python_environment.check_environment(runner, interpreter, report_progress)
        else:
            report = python_environment.build_environment(
                runner, interpreter, requirements, wheels, host_interpreter=python, report_progress=report_progress
            )
    print_result(report, as_json=json)
    raise typer.Exit(0 if report.is_usable else EXIT_ERROR)
