"""`swarmtrain lab`: a real swarm on this one machine, and its faults."""

import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli import completion
from swarmtrain.lab import DEFAULT_NAME

if TYPE_CHECKING:
    from swarmtrain.lab import Lab, NodeStatus

app = typer.Typer(no_args_is_help=True, help="A real swarm of Docker engines on this one Linux machine, and its faults.")

Name = Annotated[str, typer.Option("--name", help="Which lab; labs of different names do not meet.", autocompletion=completion.labs)]
Node = Annotated[str, typer.Argument(help="A node of the lab: node0 is the manager.", autocompletion=completion.nodes)]


def _say(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
def up(
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="How many machines.")] = 3,
    name: Name = DEFAULT_NAME,
    *,
    parts: Annotated[
        str, typer.Option("--with", metavar="LIST", help="What the machines have: swarm (engines in one), docker (in none), ssh, slurm.")
    ] = "swarm",
    bare: Annotated[bool, typer.Option("--bare", help="Form no swarm: machines with an engine each, as a shop delivers them.")] = False,
    shared: Annotated[Path | None, typer.Option("--shared", help="Directory that all nodes share. Without it: the lab's own.")] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", min=0, help="GPUs that each engine says it has: none are there, but they can be reserved.")
    ] = 0,
    engine: Annotated[Path | None, typer.Option("--engine", help="Directory with another dockerd and containerd.")] = None,
) -> None:
    """Bring up machines: a swarm of engines with a registry, unless --with or --bare says otherwise."""
    _lab(name).up(nodes, parts=[part.strip() for part in parts.split(",")], bare=bare, gpus=gpus, engine=engine, shared=shared, say=_say)


@app.command()
def down(
    name: Name = DEFAULT_NAME,
    keep_images: Annotated[bool, typer.Option("--keep-images", help="Leave the registry's images for the next lab.")] = False,
) -> None:
    """Remove the lab, its data, and its shared disk."""
    _lab(name).down(keep_images=keep_images, say=_say)


@app.command()
def status(name: Name = DEFAULT_NAME, as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False) -> None:
    """Show how each node stands."""
    found = _lab(name).status()
    typer.echo(json.dumps([asdict(node) for node in found], indent=2) if as_json else _table(found))


@app.command()
def kill(node: Node, name: Name = DEFAULT_NAME) -> None:
    """Take a node's power: its services and containers are gone, its disk stays."""
    _lab(name).kill(node, say=_say)


@app.command()
def start(node: Node, name: Name = DEFAULT_NAME) -> None:
    """Boot a node that was killed."""
    _lab(name).start(node, say=_say)


@app.command()
def cut(node: Node, name: Name = DEFAULT_NAME) -> None:
    """Cut a node's network; the machine lives on."""
    _lab(name).cut(node, say=_say)


@app.command()
def heal(node: Node, name: Name = DEFAULT_NAME) -> None:
    """Bring a node's network back, at full speed."""
    _lab(name).heal(node, say=_say)


@app.command()
def slow(node: Node, rate: Annotated[str, typer.Option("--rate", help="Such as 100mbit or 1gbit.")], name: Name = DEFAULT_NAME) -> None:
    """Hold a node's network to a rate, in both directions."""
    _lab(name).slow(node, rate, say=_say)


@app.command(context_settings={"allow_interspersed_args": False})
def enter(
    node: Node,
    command: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]...", help="What to run there. Without it: a shell.")] = None,
    name: Name = DEFAULT_NAME,
) -> None:
    """Run a command, or a shell, on a node, where docker means that node's own engine. Options come before NODE."""
    from swarmtrain import process

    lab = _lab(name)
    argv = command or [os.environ.get("SHELL", "/bin/sh")]
    process.become([*lab.enter(node, folder=Path.cwd()), *argv], env=lab.environment_on(node, os.environ))


@app.command()
def env(name: Name = DEFAULT_NAME) -> None:
    """Print what points docker, ssh, Slurm and swarmtrain at the lab: eval "$(swarmtrain lab env)"."""
    for key, value in _lab(name).env().items():
        typer.echo(f"export {key}={shlex.quote(value)}")


def _lab(name: str) -> "Lab":
    from swarmtrain.lab import Lab

    return Lab(name)


def _table(found: "list[NodeStatus]") -> str:
    rows = [("NODE", "STATE", "ROLE", "LINK", "ENGINE", "SERVICES", "ADDRESS", "PID")]
    for node in found:
        services = ",".join(node.services) or "-"
        rows.append(
            (node.node, node.state, node.role or "-", node.link or "-", node.engine or "-", services, node.address, str(node.pid or "-"))
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
