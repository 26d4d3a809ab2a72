"""deploy, status, dashboard, report, logs, history, why, scale, stop, down: the commands that touch a run."""

import time
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import DEBUG, HERE, ConfigFile, Debug, Json, Name, Overrides, Run, Yes


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (deploy, status, dashboard, report, logs, history, why, scale, stop, down):
        app.command()(command)


def deploy(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    name: Name = None,
    *,
    debug: Debug = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when the run is up, without following it.")] = False,
    attach: Annotated[
        int | None,
        typer.Option(
            "--attach",
            min=0,
            metavar="RANK",
            help="Run all ranks on this machine, that one in this terminal, as for a debugger; as with runner_type: local.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Bring the run up and follow it to its end. Ctrl-C detaches; the job goes on."""
    from swarmtrain.config.load import load
    from swarmtrain.launchers import launcher, plan_for, run_name
    from swarmtrain.view import runs

    config = load(config_file, [*(DEBUG if debug else ()), *override, *(HERE if attach is not None else ())])
    plan = plan_for(config, run_name(config_file) if name is None else name, folder=Path.cwd())
    place = launcher(config.runner.runner_type)
    if attach is not None:
        raise typer.Exit(runs.attach(place, plan, attach))
    runs.bring_up(place, plan, yes=yes)
    if not detach:
        raise typer.Exit(runs.follow_to_the_end(place, plan.run, as_json=json))


def status(
    run: Run = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every two seconds, until the run ends.")] = False,
    json: Json = False,
) -> None:
    """Show how a run stands: world, step, loss, speed, last checkpoint, restarts and why, and what every node uses."""
    from swarmtrain.launchers import find_run
    from swarmtrain.view.data import show
    from swarmtrain.view.look import look, show_watched

    if watch and json:
        raise typer.BadParameter("--json is one answer; --watch are many")
    place, found = find_run(run)
    if watch:
        show_watched(place, found)
    else:
        show(look(place, found), as_json=json)


def dashboard(
    run: Run = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Another than this machine's own loopback asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8265,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the token to ask for. Without it one is drawn where one is needed.", show_default=False
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser.")] = False,
) -> None:
    """Serve one page of a run, live, and its numbers for Prometheus at /metrics; of a run that is down, what was kept of it here."""
    from swarmtrain.view.page.server import serve
    from swarmtrain.view.page.source import source

    serve(source(run), host=host, port=port, token_file=token_file, open_it=open_it)


def report(
    run: Run = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write. Without it: RUN.html.", show_default=False)
    ] = None,
) -> None:
    """Write the dashboard's page of a run as one HTML file, which needs no server and no network."""
    from swarmtrain.view.console import say
    from swarmtrain.view.page.files import write
    from swarmtrain.view.page.source import source

    found = source(run)
    file = output or Path(f"{found.run}.html")
    write(found, file)
    say(f"wrote {file}")


def logs(
    run: Run = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Last lines of each node only.", show_default=False)] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Lines from then on: 10m, 1h30m, or a date and time.", show_default=False)
    ] = None,
    node: Annotated[str | None, typer.Option(help="One node only, as status calls it: node0.", show_default=False)] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="One rank only.", show_default=False)] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Lines that match it only.", show_default=False)] = None,
) -> None:
    """Print the output of all nodes as one stream in the order of time; of a run that is down, what was kept of it here."""
    from swarmtrain.view.logs import Choice, pattern, show_logs
    from swarmtrain.view.times import point_in_time

    when = None if since is None else point_in_time(since, time.time())
    show_logs(run, Choice(tail, when, node, rank, pattern(grep)), follow=follow)


def history(run: Run = None, json: Json = False) -> None:
    """Show what befell a run, with times: worlds, failures, checkpoints, how it ended. Without RUN: the runs known here."""
    from swarmtrain.view.look import show_history

    show_history(run, as_json=json)


def why(run: Run = None, json: Json = False) -> None:
    """Show why a run died, on one screen: which rank first, what killed it, what the others did, the likely fix."""
    from swarmtrain.view.look import show_why

    show_why(run, as_json=json)


def scale(
    run: Run = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes that the run shall have.", show_default=False)] = ...,  # type: ignore[assignment]
    yes: Yes = False,
) -> None:
    """Add nodes to a run, or take some away. It goes on from its newest checkpoint."""
    from swarmtrain.launchers import find_run, scaled_plan
    from swarmtrain.view import runs

    place, found = find_run(run)
    runs.rescale(place, scaled_plan(place, found, nodes), yes=yes)


def stop(run: Run = None) -> None:
    """Ask the ranks to save and leave. The run stays; a deploy resumes it."""
    from swarmtrain.launchers import find_run
    from swarmtrain.view import runs

    runs.stop(*find_run(run))


def down(run: Run = None) -> None:
    """Remove a run and return when nothing of it is left. Checkpoints stay."""
    from swarmtrain.launchers import find_run
    from swarmtrain.view import runs

    runs.take_down(*find_run(run))
