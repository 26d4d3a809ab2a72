"""`swarmtrain image`: the image that the nodes run."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)

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
