"""The commands for runs: deploy, ps, status, dashboard, report, logs, shell, history, why, scale, stop, down."""

import time
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import (
    DEBUG_OVERRIDES,
    LOCAL_OVERRIDES,
    ConfigFileArgument,
    DebugOption,
    JsonOption,
    OverridesOption,
    RunArgument,
    RunNameOption,
    RunOrAllArgument,
    TwoRunsArgument,
    YesOption,
)


def register_commands(app: typer.Typer) -> None:
    """Register the commands of this module on the Typer app `app`."""
    app.command("deploy")(deploy_run)
    app.command("ps")(list_runs)
    app.command("status")(show_status)
    app.command("dashboard")(open_dashboard)
    app.command("report")(write_report)
    app.command("logs")(show_logs)
    app.command("shell")(open_shell)
    app.command("history")(show_run_history)
    app.command("why")(diagnose_run)
    app.command("scale")(scale_run)
    app.command("stop")(stop_run)
    app.command("down")(remove_run)


def deploy_run(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    run_name: RunNameOption = None,
    *,
    debug: DebugOption = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Return when the run is up, or is in the queue of the swarm, without following its output."),
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="While other runs have reserved its GPUs, try again every 5 s instead of failing. Keeps no place in a queue."
        ),
    ] = False,
    attached_rank: Annotated[
        int | None,
        typer.Option(
            "--attach",
            min=0,
            metavar="RANK",
            help="Run all ranks on this machine (runner_type: local) with this rank attached to the terminal, as for a debugger.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Deploy a run and follow its output to the end. Ctrl-C detaches; the job continues."""
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.launchers.planner import derive_run_name, plan_run
    from swarmtrain.launchers.registry import create_launcher
    from swarmtrain.operations import runs

    config = load_config_file(
        config_file, [*(DEBUG_OVERRIDES if debug else ()), *overrides, *(LOCAL_OVERRIDES if attached_rank is not None else ())]
    )
    plan = plan_run(config, derive_run_name(config_file) if run_name is None else run_name, working_folder=Path.cwd())
    launcher = create_launcher(config.runner.runner_type)
    if attached_rank is not None:
        raise typer.Exit(runs.run_plan_attached(launcher, plan, attached_rank))
    if detach:
        runs.deploy_run(launcher, plan, assume_yes=yes, wait=wait)
    else:
        raise typer.Exit(runs.deploy_and_follow_run(launcher, plan, assume_yes=yes, as_json=json, wait=wait))


def list_runs(json: JsonOption = False) -> None:
    """List all runs, of all users: owner, nodes, reserved GPUs, state, step and age. `history` also lists the runs that are down."""
    from swarmtrain.view.output import print_result
    from swarmtrain.view.run_table import load_run_table

    print_result(load_run_table(), as_json=json)


def show_status(
    run: RunArgument = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every 2 s until the run ends.")] = False,
    json: JsonOption = False,
) -> None:
    """Show the status of a run: world, step, loss, speed, last checkpoint, restarts and their causes, and each node's resource usage."""
    from swarmtrain.launchers.run_discovery import find_run
    from swarmtrain.view.output import print_result
    from swarmtrain.view.run_state import load_status, show_live_status

    if watch and json:
        raise typer.BadParameter("--json and --watch cannot be combined")
    launcher, run_name = find_run(run)
    if watch:
        show_live_status(launcher, run_name)
    else:
        print_result(load_status(launcher, run_name), as_json=json)


def open_dashboard(
    run: RunOrAllArgument = None,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on. An address other than loopback requires a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8265,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the access token. Default: a random token, if one is required.", show_default=False),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the dashboard in this machine's browser.")] = False,
) -> None:
    """Serve a live dashboard of all runs, the queue and the machines, or of one run, and Prometheus metrics at /metrics.

    For a removed run, show the records kept on this machine.
    """
    from swarmtrain.view.dashboard.cluster_reader import ClusterReader
    from swarmtrain.view.dashboard.cluster_source import ClusterDataSource
    from swarmtrain.view.dashboard.data_source import open_data_source
    from swarmtrain.view.dashboard.server import serve_dashboard

    data_source = ClusterDataSource(ClusterReader()) if run is None else open_data_source(run)
    serve_dashboard(data_source, host=host, port=port, token_file=token_file, open_browser=open_browser)


def write_report(
    runs: TwoRunsArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write. Default: RUN.html, or RUN-RUN.html.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the dashboard of a run, or a comparison of two runs, to a single HTML file that needs no server and no network."""
    from swarmtrain.view.console import print_message
    from swarmtrain.view.dashboard.data_source import open_data_source
    from swarmtrain.view.dashboard.html_page import write_html_report

    sources = [open_data_source(run) for run in runs or (None,)]
    path = output or Path(f"{'-'.join(source.run for source in sources)}.html")
    write_html_report(sources, path, overwrite=force)
    print_message(f"wrote {path}")


def show_logs(
    run: RunArgument = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the run ends.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Print only the last N lines of each node.", show_default=False)
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Print only lines since then: 10m, 1h30m, or a date and time.", show_default=False)
    ] = None,
    node: Annotated[str | None, typer.Option(help="Print only this node's lines, named as in status: node0.", show_default=False)] = None,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Print only this rank's lines.", show_default=False)] = None,
    grep: Annotated[str | None, typer.Option(metavar="REGEX", help="Print only lines that match.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print each line as a JSON object: node, text, rank, time.")] = False,
) -> None:
    """Print the logs of all nodes as one stream, ordered by time. For a removed run, print the records kept on this machine.

    Of a progress bar, the last state is printed; with --follow, also the states before, at most one per second.
    """
    from swarmtrain.view.formatting import parse_time
    from swarmtrain.view.logs import LogFilter, compile_pattern, print_logs

    since_time = None if since is None else parse_time(since, time.time())
    print_logs(run, LogFilter(tail, since_time, node, rank, compile_pattern(grep)), follow=follow, as_json=json)


def open_shell(
    run: RunArgument = None,
    argv: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND]", help="Command to run, after RUN and --. Default: bash, or sh.", show_default=False),
    ] = None,
    *,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Rank. Default: 0.", show_default=False)] = None,
    node: Annotated[str | None, typer.Option("--node", help="Node, instead of a rank, such as node1.", show_default=False)] = None,
) -> None:
    """Open a shell, or run COMMAND, where a rank runs: in its container, or on its host. The rank continues."""
    from swarmtrain.launchers.run_discovery import find_run
    from swarmtrain.operations.shell import open_node_shell

    if rank is not None and node is not None:
        raise typer.BadParameter("--rank and --node cannot be combined")
    open_node_shell(*find_run(run), rank=rank, node=node, argv=argv or ())


def show_run_history(run: RunOrAllArgument = None, json: JsonOption = False) -> None:
    """Show the timeline of a run: worlds, failures, checkpoints, outcome. Without RUN: list the runs known on this machine."""
    from swarmtrain.view.run_state import show_history

    show_history(run, as_json=json)


def diagnose_run(run: RunArgument = None, json: JsonOption = False) -> None:
    """Diagnose why a run failed, on one screen: the first rank to fail, its cause, the other ranks, the likely fix."""
    from swarmtrain.view.run_state import show_diagnosis

    show_diagnosis(run, as_json=json)


def scale_run(
    run: RunArgument = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="New number of nodes.", show_default=False)] = None,
    *,
    added_hosts: Annotated[
        list[str], typer.Option("--add", metavar="HOST", help="Add a node on this host. Repeatable.", show_default=False)
    ] = [],  # noqa: B006  # Typer's convention for lists
    removed_hosts: Annotated[
        list[str], typer.Option("--without", metavar="HOST", help="Remove the node of this host. Repeatable.", show_default=False)
    ] = [],  # noqa: B006  # as above
    replaced_hosts: Annotated[
        list[str],
        typer.Option("--replace", metavar="HOST", help="Move the node of this host to another host. Repeatable.", show_default=False),
    ] = [],  # noqa: B006  # as above
    yes: YesOption = False,
) -> None:
    """Scale a run to more or fewer nodes, or change its hosts. It resumes from its newest checkpoint; the other nodes keep their hosts."""
    from swarmtrain.launchers.run_discovery import find_run
    from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
    from swarmtrain.operations import runs

    if not (nodes or added_hosts or removed_hosts or replaced_hosts):
        raise typer.BadParameter("pass --nodes, --add, --without or --replace")
    launcher, run_name = find_run(run)
    request = ScaleRequest(nodes, tuple(added_hosts), tuple(removed_hosts), tuple(replaced_hosts))
    runs.scale_run(launcher, plan_scaled_run(launcher, run_name, request), assume_yes=yes)


def stop_run(run: RunArgument = None, yes: YesOption = False) -> None:
    """Stop the ranks gracefully, after a checkpoint. The run is kept; deploy resumes it."""
    from swarmtrain.launchers.run_discovery import find_run
    from swarmtrain.operations import runs

    runs.stop_run(*find_run(run), assume_yes=yes)


def remove_run(run: RunArgument = None, yes: YesOption = False) -> None:
    """Remove a run and wait until it is gone. Checkpoints are kept."""
    from swarmtrain.operations import runs

    runs.remove_named_run(run, assume_yes=yes)
