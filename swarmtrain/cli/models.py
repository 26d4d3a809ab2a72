"""export: what a run has made, for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import Json


class Dtype(StrEnum):
    """Numbers that a model's files can hold."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(export)


def export(
    source: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or the save_dir of a run: its newest.", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write. It must not be there.", show_default=False)],
    *,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Its numbers. Without it: as they are.", show_default=False)] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Most that one of its files has.")] = "5GiB",
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="Its tokenizer.json, to lie beside it.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint as a folder that Hugging Face's transformers load: config.json and safetensors."""
    from swarmtrain.launchers import verbs
    from swarmtrain.view import memory
    from swarmtrain.view.console import progress, say
    from swarmtrain.view.data import show_json

    question = {
        "source": str(source),
        "output": str(output),
        "dtype": dtype,
        "shard_bytes": memory.size(shard_size, "--shard-size"),
        "tokenizer": None if tokenizer is None else str(tokenizer),
    }
    with progress(f"writing {output}"):
        made = verbs.ask("export", question)
    if json:
        show_json(made)
    say(f"wrote {output}: {made['family']}, {made['parameters']:,} parameters, as of step {made['step']}")
