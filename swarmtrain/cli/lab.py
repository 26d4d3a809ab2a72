"""`swarmtrain lab`: a local test cluster on this machine, with fault injection."""

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli import shell_completion
from swarmtrain.lab import DEFAULT_NAME

if TYPE_CHECKING:
    from swarmtrain.lab import Lab, NodeStatus

app = typer.Typer(no_args_is_help=True, help="Create a local test cluster of Docker engines on this Linux machine, and inject faults.")

LabNameOption = Annotated[
    str,
    typer.Option(
        "--name", help="Name of the lab. Labs with different names are independent.", autocompletion=shell_completion.complete_labs
    ),
]
LabNodeArgument = Annotated[
    str, typer.Argument(help="Node of the lab; node0 is the manager.", autocompletion=shell_completion.complete_lab_nodes)
]

_ENGINE_TIMEOUT_SECONDS = 1800.0  # seconds without progress from the engine in one step: it may be unpacking gigabytes


def _print_progress(line: str) -> None:
    typer.echo(line, err=True)


@app.command("up")
def start_lab(
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="Number of nodes.")] = 3,
    lab_name: LabNameOption = DEFAULT_NAME,
    *,
    components: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="LIST",
            help="Software of the nodes: swarm (engines in one swarm), docker (engines without a swarm), ssh, slurm.",
        ),
    ] = "swarm",
    bare: Annotated[bool, typer.Option("--bare", help="Do not form a swarm: separate machines, each with its own engine.")] = False,
    shared_folder: Annotated[Path | None, typer.Option("--shared", help="Directory that all nodes share. Default: the lab's own.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="Number of fake GPUs per engine: they can be reserved, but do not exist.")] = 0,
    engine_folder: Annotated[Path | None, typer.Option("--engine", help="Directory with another dockerd and containerd.")] = None,
) -> None:
    """Start a local test cluster: a swarm of Docker engines with a registry, unless --with or --bare says otherwise."""
    _open_lab(lab_name).bring_up(
        nodes,
        components=[part.strip() for part in components.split(",")],
        bare=bare,
        gpus=gpus,
        engine_folder=engine_folder,
        shared_folder=shared_folder,
        report_progress=_print_progress,
    )


@app.command("down")
def remove_lab(
    lab_name: LabNameOption = DEFAULT_NAME,
    keep_images: Annotated[bool, typer.Option("--keep-images", help="Keep the registry's images for the next lab.")] = False,
) -> None:
    """Remove the lab, its data and its shared disk."""
    _open_lab(lab_name).tear_down(keep_images=keep_images, report_progress=_print_progress)


@app.command("status")
def show_lab_status(
    lab_name: LabNameOption = DEFAULT_NAME,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")] = False,
) -> None:
    """Show the state of each node."""
    node_statuses = _open_lab(lab_name).get_status()
    typer.echo(json.dumps([asdict(node) for node in node_statuses], indent=2) if as_json else _format_node_table(node_statuses))


@app.command("power-off")
def power_off_node(node: LabNodeArgument, lab_name: LabNameOption = DEFAULT_NAME) -> None:
    """Power off a node: its services and containers are lost, its disk is kept."""
    _open_lab(lab_name).power_off_node(node, report_progress=_print_progress)


@app.command("power-on")
def power_on_node(node: LabNodeArgument, lab_name: LabNameOption = DEFAULT_NAME) -> None:
    """Power on a node that was powered off."""
    _open_lab(lab_name).power_on_node(node, report_progress=_print_progress)


@app.command("partition")
def partition_node(node: LabNodeArgument, lab_name: LabNameOption = DEFAULT_NAME) -> None:
    """Disconnect a node from the network (partition). The machine keeps running."""
    _open_lab(lab_name).partition_node(node, report_progress=_print_progress)


@app.command("reconnect")
def reconnect_node(node: LabNodeArgument, lab_name: LabNameOption = DEFAULT_NAME) -> None:
    """Reconnect a node to the network, without a bandwidth limit."""
    _open_lab(lab_name).reconnect_node(node, report_progress=_print_progress)


@app.command("throttle")
def throttle_node(
    node: LabNodeArgument,
    rate: Annotated[str, typer.Option("--rate", help="Bandwidth limit, such as 100mbit or 1gbit.")],
    lab_name: LabNameOption = DEFAULT_NAME,
) -> None:
    """Limit a node's network bandwidth, in both directions."""
    _open_lab(lab_name).limit_node_bandwidth(node, rate, report_progress=_print_progress)


@app.command("enter", context_settings={"allow_interspersed_args": False})
def run_command_on_node(
    node: LabNodeArgument,
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Command to run. Default: a shell.")] = None,
    lab_name: LabNameOption = DEFAULT_NAME,
) -> None:
    """Run a command or a shell on a node. There, docker uses the engine of that node. Options come before NODE."""
    from swarmtrain import process

    lab = _open_lab(lab_name)
    argv = command or [os.environ.get("SHELL", "/bin/sh")]
    process.exec_command([*lab.build_enter_command(node, start_folder=Path.cwd()), *argv], env=lab.build_node_environment(node, os.environ))


@app.command("env")
def print_environment(lab_name: LabNameOption = DEFAULT_NAME) -> None:
    """Print the environment variables that make docker, ssh, Slurm and swarmtrain use the lab: eval "$(swarmtrain lab env)"."""
    for key, value in _open_lab(lab_name).build_client_environment().items():
        typer.echo(f"export {key}={shlex.quote(value)}")


@app.command("base-image")
def create_base_image(
    with_compiler: Annotated[
        bool, typer.Option("--compiler", help="With a C++ compiler, which a torch that supports GPUs needs for compilation.")
    ] = False,
) -> None:
    """Create a base image from Debian packages in the engine that docker uses, which need not reach Docker Hub; print its name."""
    from swarmtrain.lab import base_image
    from swarmtrain.launchers.common.docker_engine import DockerEngine

    client = DockerEngine(timeout=_ENGINE_TIMEOUT_SECONDS).client
    typer.echo(base_image.create_base_image(client, _print_progress, with_compiler=with_compiler))


def _open_lab(name: str) -> "Lab":
    from swarmtrain.lab import Lab

    return Lab(name)


def _format_node_table(node_statuses: "list[NodeStatus]") -> str:
    rows = [("NODE", "STATE", "ROLE", "LINK", "ENGINE", "SERVICES", "ADDRESS", "PID")]
    for node in node_statuses:
        services = ",".join(node.services) or "-"
        rows.append(
            (node.node, node.state, node.role or "-", node.link or "-", node.engine or "-", services, node.address, str(node.pid or "-"))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
