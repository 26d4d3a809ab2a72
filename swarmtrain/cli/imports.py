"""import: other tools' files become a config."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import Json


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("import")(import_)


def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="What you have.", show_default=False, readable=False)],
    output: Annotated[Path | None, typer.Option("--output", help="File to write. Without it: standard output.", show_default=False)] = None,
    *,
    hostsfile: Annotated[
        Path | None, typer.Option("--hostsfile", help="Its hosts: lines such as 'gpu-1 slots=4'.", show_default=False)
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="scaling, accelerate, deepspeed, sbatch, compose or huggingface. Without it: by its content.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    json: Json = False,
) -> None:
    """Turn what another tool reads into a config: Scaling, accelerate, DeepSpeed, sbatch, compose, a model's config.json.

    What the config cannot hold is listed.
    """
    from swarmtrain import importers
    from swarmtrain.view.console import say
    from swarmtrain.view.data import show_json

    made = importers.load(source, hostsfile=hostsfile, form=importers.named(form))
    if output is not None:
        importers.write(made, output, force=force)
    if json:
        show_json(made.to_dict())
    elif output is None:
        typer.echo(made.yaml(), nl=False)
    say("\n".join(line for line in (made.report(), f"wrote {output}\nnext: swarmtrain plan {output}" if output else "") if line))
