"""`swarmtrain import`: convert other tools' configs."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import JsonOption


def register_commands(app: typer.Typer) -> None:
    """Register the command `import` on the Typer app `app`."""
    app.command("import")(import_config)


def import_config(
    source_file: Annotated[Path, typer.Argument(metavar="FILE", help="File to import.", show_default=False, readable=False)],
    output: Annotated[Path | None, typer.Option("--output", help="File to write. Default: standard output.", show_default=False)] = None,
    *,
    hostsfile: Annotated[
        Path | None, typer.Option("--hostsfile", help="Hostfile of the source, with lines such as 'gpu-1 slots=4'.", show_default=False)
    ] = None,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="Source format: scaling, accelerate, deepspeed, sbatch, compose or huggingface. Default: detected from the content.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="For scripts: value of a variable, overriding the script; 1=VALUE is its first argument. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    launch_line: Annotated[
        int | None,
        typer.Option(
            "--launch",
            metavar="LINE",
            help="For scripts: number of the line that starts training. Default: the only line that does.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    json: JsonOption = False,
) -> None:
    """Import a config from another tool: Scaling, accelerate, DeepSpeed, sbatch, compose, or a Hugging Face config.json.

    Settings that the config cannot express are listed. A script is refused if it is not certain what it starts.
    """
    from swarmtrain import importers
    from swarmtrain.view.console import print_message
    from swarmtrain.view.output import print_json

    imported = importers.import_config_file(
        source_file,
        hostsfile=hostsfile,
        source_format=importers.parse_source_format(format_name),
        settings=importers.parse_script_settings(tuple(settings or ()), launch_line),
    )
    if output is not None:
        importers.write_imported_config(imported, output, force=force)
    if json:
        print_json(imported.to_dict())
    elif output is None:
        typer.echo(imported.to_yaml(), nl=False)
    print_message(
        "\n".join(line for line in (imported.format_report(), f"wrote {output}\nnext: swarmtrain plan {output}" if output else "") if line)
    )
