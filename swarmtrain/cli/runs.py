"""deploy, status, logs, scale, stop, down: the commands that touch a run."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import DEBUG, ConfigFile, Debug, Json, Name, Overrides, Run


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (deploy, status, logs, scale, stop, down):
        app.command()(command)


def deploy(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    name: Name = None,
    *,
    debug: Debug = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the run is up, without following it.")] = False,
    json: Json = False,
) -> None:
    """Bring the run up and follow it to its end. Ctrl-C detaches; the job goes on."""
    from swarmtrain.config.load import load
    from swarmtrain.launchers import launcher, plan_for, run_name
    from swarmtrain.view import runs

    config = load(config_file, [*(DEBUG if debug else ()), *override])
    plan = plan_for(config, run_name(config_file) if name is None else name, folder=Path.cwd())
    place = launcher(config.runner.runner_type)
    runs.bring_up(place, plan)
    if not detach:
        raise typer.Exit(runs.follow_to_the_end(place, plan.run, as_json=json))


def status(run: Run = None, json: Json = False) -> None:
    """Show how a run stands: world, step, loss, speed, last checkpoint, and every service."""
    from swarmtrain.launchers import find_run
    from swarmtrain.view.data import show
    from swarmtrain.view.status import status as status_of

    place, found = find_run(run)
    show(status_of(found, place.events(found), place.tasks(found)), as_json=json)


def logs(
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Last lines of each node only.", show_default=False)] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="One rank only.", show_default=False)] = None,
) -> None:
    """Print the output of all nodes as one stream."""
    from swarmtrain.launchers import find_run
    from swarmtrain.view.console import say
    from swarmtrain.view.stream import show_line

    place, found = find_run(run)
    for line in place.logs(found, follow=follow, tail=tail, say=say):
        if rank in (None, line.rank):
            show_line(line)


def scale(
    run: Run = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes that the run shall have.", show_default=False)] = ...,  # type: ignore[assignment]
) -> None:
    """Add nodes to a run, or take some away. It goes on from its newest checkpoint."""
    from swarmtrain.launchers import find_run, scaled_plan
    from swarmtrain.view import runs

    place, found = find_run(run)
    runs.rescale(place, scaled_plan(place, found, nodes))


def stop(run: Run = None) -> None:
    """Ask the ranks to save and leave. The run stays; a deploy resumes it."""
    from swarmtrain.launchers import find_run
    from swarmtrain.view.console import progress

    place, found = find_run(run)
    with progress(f"stopping {found}", interrupted=f"swarmtrain stop {found} again waits for what still runs") as say:
        place.stop(found, say)


def down(run: Run = None) -> None:
    """Remove a run and return when nothing of it is left. Checkpoints stay."""
    from swarmtrain.launchers import find_run
    from swarmtrain.view.console import progress

    place, found = find_run(run)
    with progress(f"taking {found} down", interrupted=f"swarmtrain down {found} again removes what is left") as say:
        place.down(found, say)
