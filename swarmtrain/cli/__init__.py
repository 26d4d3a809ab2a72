"""The command line: parse, call, print. Nothing here decides anything.

The modules of commands do without `from __future__ import annotations`: Typer would evaluate each annotation twice, at every start.
"""

from __future__ import annotations

import errno
import os
import sys

import typer

from swarmtrain.errors import EXIT_ERROR, EXIT_INTERRUPTED, SwarmtrainError

HELP = """Distributed PyTorch training on the machines you already have, from one YAML file.

    swarmtrain init config.yml        a commented config to start from

    swarmtrain lab up --nodes 3       a real swarm on this one machine

    swarmtrain deploy config.yml      run it and follow it; Ctrl-C detaches, the job goes on

    swarmtrain status                 how it stands

    swarmtrain why                    why it died
"""


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def build() -> typer.Typer:
    """Return the whole command line."""
    from swarmtrain.cli import configs, data, environment, image, imports, lab, models, runs

    app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(_root)
    configs.register(app)
    environment.register(app)
    imports.register(app)
    runs.register(app)
    models.register(app)
    app.add_typer(data.app, name="data", help="Token files: write them from text, check them, look at samples.")
    app.add_typer(image.app, name="image", help="What the nodes run: build it, put code above it, push it, spread it, keep a registry.")
    app.add_typer(lab.app, name="lab", help="A real swarm on this one Linux machine, and its faults.")
    return app


def run() -> int:
    """Run the command line; return 0 done, 1 our error, 2 usage, 3 the job failed, 130 interrupted."""
    if os.environ.get("_SWARMTRAIN_COMPLETE") == "complete_bash":
        from swarmtrain.cli import completion

        completion.rejoin(os.environ)
    try:
        try:
            return int(build()(prog_name="swarmtrain", standalone_mode=False) or 0)
        finally:
            sys.stdout.flush()
    except SwarmtrainError as error:
        from swarmtrain.view.console import show_error

        show_error(error)
        return error.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`swarmtrain logs | head`); nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        from swarmtrain.view.console import show_error

        place = str(error.filename or "standard output")
        show_error(SwarmtrainError((error.strerror or "").lower(), place=place, hint="df -h shows which disk is full"))
        return EXIT_ERROR
    except Exception as error:  # noqa: BLE001  # click's usage errors share no public base with typer's copies of them
        return _usage(error)


def _usage(error: Exception) -> int:
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or code is None:
        raise error
    show()
    return int(code)


def _version(value: bool) -> None:
    if value:
        from swarmtrain import __version__

        typer.echo(f"swarmtrain {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass
