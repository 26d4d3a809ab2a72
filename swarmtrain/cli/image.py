"""`swarmtrain image`: the image that the nodes run."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import Json

app = typer.Typer(no_args_is_help=True)
registry = typer.Typer(no_args_is_help=True)
app.add_typer(registry, name="registry", help="A registry in the swarm itself, if you have none.")

_SILENCE = 1800.0  # seconds that the engine may take over one step without a word: unpacking gigabytes


@app.command()
def build(
    tag: Annotated[str, typer.Option("--tag", "-t", help="Such as registry.lab:5000/swarmtrain:0.1.")],
    context: Annotated[
        Path, typer.Argument(help="The directory of your script; a Dockerfile or requirements there win over swarmtrain's own.")
    ] = Path(),
    base: Annotated[str | None, typer.Option("--base", help="The image to start from, with Python 3.11.")] = None,
    push: Annotated[bool, typer.Option("--push", help="Push it to the registry that the tag names.")] = False,
) -> None:
    """Build the image, without network once the wheels are here; print its tag."""
    from swarmtrain import images
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.view.console import progress

    engine = Engine(timeout=_SILENCE)
    with progress(f"building {tag}") as say:
        images.build(engine.client, context, tag, base=base, say=say)
        if push:
            images.push(engine.client, tag, say=say)
    typer.echo(tag)


@app.command()
def add(
    code: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of code; a .dockerignore in one is obeyed.")],
    to: Annotated[str, typer.Option("--to", metavar="IMAGE", help="The image to put them above.")],
    tag: Annotated[str, typer.Option("--tag", "-t", help="What to call the new image.")],
    push: Annotated[bool, typer.Option("--push", help="Push it to the registry that the tag names.")] = False,
) -> None:
    """Put directories above an image, beside the script, as a layer each: in seconds, and nothing else is pushed; print the tag."""
    from swarmtrain import images
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.view.console import progress

    engine = Engine(timeout=_SILENCE)
    with progress(f"building {tag}") as say:
        images.add(engine.client, code, to, tag, here=Path.cwd(), say=say)
        if push:
            images.push(engine.client, tag, say=say)
    typer.echo(tag)


@app.command()
def lock(folder: Annotated[Path, typer.Argument(help="The directory of requirements/image.txt.")] = Path()) -> None:
    """Write requirements/image.lock anew: the hashes of what image.txt pins, for all processors; print its path."""
    from swarmtrain.images.lock import renew
    from swarmtrain.view.console import progress

    with progress("locking requirements/image.txt") as say:
        typer.echo(renew(folder, say=say))


@app.command()
def push(tag: Annotated[str, typer.Argument(help="An image that the engine has.")]) -> None:
    """Push an image to the registry that its tag names; print what to pin it to."""
    from swarmtrain import images
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.view.console import progress

    engine = Engine(timeout=_SILENCE)
    with progress(f"pushing {tag}") as say:
        images.push(engine.client, tag, say=say)
    typer.echo(images.pin(engine, tag).reference)


@app.command()
def spread(
    image: Annotated[str, typer.Argument(help="An image that the engine has.")],
    to: Annotated[
        list[str],
        typer.Option("--to", metavar="ADDRESS", help="An engine, such as ssh://gpu-2. Repeatable. Without it: all nodes, by ssh."),
    ] = [],  # noqa: B006  # typer's way
) -> None:
    """Give an image to every node without a registry; print the tag by which a config names it."""
    from swarmtrain import images
    from swarmtrain.images.swarm import others
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.view.console import progress

    engine = Engine(timeout=_SILENCE)
    with progress(f"spreading {image}") as say:
        targets = {address: address for address in to} or others(engine)
        typer.echo(images.spread(engine.client, image, targets, lambda address: Engine(address, timeout=_SILENCE).client, say=say))


@registry.command()
def up(
    node: Annotated[
        str | None, typer.Option("--node", help="Where it runs. Without it: the node of the engine.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Its port on that node.")] = 5000,
    image: Annotated[str, typer.Option("--image", help="Another image of a registry.")] = "registry:2.8.3",
) -> None:
    """Start a registry on one node; print what the names of its images begin with, and what every engine must be told."""
    from swarmtrain.images import registry as registries
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.view.console import progress, say

    with progress("bringing a registry up", interrupted="swarmtrain image registry down removes what is left") as step:
        standing = registries.up(Engine(), node=node, port=port, image=image, say=step)
    say(str(standing))
    typer.echo(standing.address)


@registry.command()
def down(
    volume: Annotated[bool, typer.Option("--volume", help="Remove its images too. Without it they are there at the next up.")] = False,
) -> None:
    """Stop the registry; its images stay."""
    from swarmtrain.images import registry as registries
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.view.console import progress

    with progress("taking the registry down") as say:
        registries.down(Engine(), volume=volume, say=say)


@registry.command()
def status(json: Json = False) -> None:
    """Show how the registry stands, and whether the engine can use it."""
    from swarmtrain.images import registry as registries
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.view.data import show

    show(registries.status(Engine()), as_json=json)
