"""`swarmtrain env`: check the Python of every host of a run over SSH."""

from pathlib import Path

import typer

from swarmtrain.cli.options import ConfigFileArgument, JsonOption, OverridesOption


def register_commands(app: typer.Typer) -> None:
    """Register the command `env` on the Typer app `app`."""
    app.command(name="env")(check_environment)


def check_environment(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    json: JsonOption = False,
) -> None:
    """Check the Python of every host of an `ssh` run: its versions, its GPUs, and whether ranks can communicate. Installs nothing."""
    import os

    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.config.external_inputs import resolve_external_inputs
    from swarmtrain.errors import EXIT_ERROR
    from swarmtrain.launchers.ssh import python_environment
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_result

    runner = resolve_external_inputs(load_config_file(config_file, overrides), Path.cwd(), os.environ).runner
    with show_progress("checking Python on the hosts") as report_progress:
        report = python_environment.check_environment(runner, report_progress)
    print_result(report, as_json=json)
    raise typer.Exit(0 if report.is_usable else EXIT_ERROR)
