"""`swarmtrain queue`: the queue of a swarm that several people share."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli import shell_completion
from swarmtrain.cli.options import JsonOption, YesOption

app = typer.Typer(no_args_is_help=True)
QueuedRunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of the run.", show_default=False, autocompletion=shell_completion.complete_runs)
]


@app.command("up")
def start_scheduler(
    image: Annotated[
        str | None,
        typer.Option("--image", help="Image with swarmtrain. Default: a small one, built here for all managers.", show_default=False),
    ] = None,
    base_image: Annotated[
        str | None,
        typer.Option(
            "--base", help="Base image with Python 3.11 of the image that is built. Default: Python's official one.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Start the scheduler on a manager, or update it to this version. From then on, deploy queues runs."""
    from swarmtrain.operations import queue
    from swarmtrain.view.output import print_result

    if image and base_image:
        raise typer.BadParameter("--image and --base cannot be combined: --base is for an image that is built")
    print_result(queue.start_scheduler(image, base_image), as_json=json)


@app.command("down")
def remove_scheduler(yes: YesOption = False) -> None:
    """Remove the scheduler. Running runs continue; waiting ones wait until there is a scheduler again."""
    from swarmtrain.operations import queue

    queue.remove_scheduler(assume_yes=yes)


@app.command("status")
def show_queue(json: JsonOption = False) -> None:
    """Show the runs in the queue, in order: why each one waits, and when it may start."""
    from swarmtrain.operations import queue
    from swarmtrain.view.output import print_result

    print_result(queue.load_queue_table(), as_json=json)


@app.command("policy")
def store_policy(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="YAML file with the new policy. Without it: print the policy.", readable=False)
    ] = None,
) -> None:
    """Print the policy of the queue, priority classes and limits of owners, or store a new one for the whole swarm."""
    from swarmtrain.operations import queue

    if file is None:
        typer.echo(queue.load_policy_text(), nl=False)
    else:
        queue.store_policy(file)


@app.command("move")
def move_run(
    run: QueuedRunArgument,
    place: Annotated[
        int, typer.Argument(min=1, metavar="PLACE", help="New place among the waiting runs of its priority, 1 for the first.")
    ],
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Move a waiting run forward or back, among the waiting runs of its priority."""
    from swarmtrain.operations import queue
    from swarmtrain.view.output import print_result

    print_result(queue.move_run(run, place, assume_yes=yes), as_json=json)


@app.command("cancel")
def cancel_run(run: QueuedRunArgument, yes: YesOption = False) -> None:
    """Remove a waiting run from the queue. Checkpoints are kept."""
    from swarmtrain.operations import queue

    queue.cancel_run(run, assume_yes=yes)
