"""The command line: parse the arguments, call the operation, print the result. This package contains no other logic.

The command modules do not use `from __future__ import annotations`: with it, Typer would evaluate each annotation twice at every start.
"""

from __future__ import annotations

import errno
import os
import sys

import typer

from swarmtrain.errors import EXIT_ERROR, EXIT_INTERRUPTED, SwarmtrainError

HELP = """Distributed PyTorch training on the machines you already have, from one YAML file.

    swarmtrain demo                   train a small model on a swarm on this one machine

    swarmtrain init                   a config to start from, and its training script

    swarmtrain lab up --nodes 3       a real swarm on this one machine

    swarmtrain deploy config.yml      run it and follow it; Ctrl-C detaches, the job continues

    swarmtrain status                 nodes, step, loss, throughput

    swarmtrain why                    why it failed
"""


_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def build_app() -> typer.Typer:
    """Return the Typer app with all commands."""
    from swarmtrain.cli import config_import, configs, data, image, lab, models, queue, runs

    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},  # all commands inherit it
    )
    app.callback()(_declare_global_options)
    configs.register_commands(app)
    config_import.register_commands(app)
    runs.register_commands(app)
    models.register_commands(app)
    app.add_typer(queue.app, name="queue", help="Share a swarm: start a scheduler, and see and change the order of waiting runs.")
    app.add_typer(data.app, name="data", help="Tokenize text into token files, verify them, inspect samples.")
    app.add_typer(
        image.app, name="image", help="Build, push and distribute the Docker image of the nodes; add code layers; run a registry."
    )
    app.add_typer(lab.app, name="lab", help="Create a local test cluster of Docker engines on this Linux machine, and inject faults.")
    return app


def run_command_line() -> int:
    """Run the command line; return the exit code: 0 success, 1 swarmtrain error, 2 usage error, 3 job failed, 130 interrupted."""
    if os.environ.get("_SWARMTRAIN_COMPLETE") == "complete_bash":
        from swarmtrain.cli import shell_completion

        shell_completion.rejoin_override_words(os.environ)
    try:
        try:
            return int(build_app()(prog_name="swarmtrain", standalone_mode=False) or 0)
        finally:
            sys.stdout.flush()
    except SwarmtrainError as error:
        from swarmtrain.view.console import show_error

        show_error(error)
        return error.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe (`swarmtrain logs | head`): nothing more can be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:
        from swarmtrain.view.console import show_error

        show_error(_convert_os_error(error))
        return EXIT_ERROR
    except Exception as error:  # noqa: BLE001  # click's usage errors have no public base class in common with typer's copies of them
        return _show_usage_error(error)


def _convert_os_error(error: OSError) -> SwarmtrainError:
    """Return the error for a full disk or a deleted working folder, which any command may encounter. Re-raises other errors."""
    if error.errno in _DISK_FULL_ERRNOS:
        location = str(error.filename or "standard output")
        return SwarmtrainError((error.strerror or "").lower(), place=location, hint="run df -h to see which disk is full")
    try:
        os.getcwd()  # noqa: PTH109  # Path.cwd calls it
    except FileNotFoundError:
        return SwarmtrainError("was deleted, but the command is run from it", place="working folder", hint="change to an existing folder")
    raise error


def _show_usage_error(error: Exception) -> int:
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or code is None:
        raise error
    show()
    return int(code)


def _print_version(value: bool) -> None:
    if value:
        from swarmtrain import __version__

        typer.echo(f"swarmtrain {__version__}")
        raise typer.Exit


def _declare_global_options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass
