"""Arguments and options that several commands share, each spelled once."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option(
        "-o", "--override", metavar="KEY=VALUE", help="Override a value: -o trainer.train_iterations=100. Repeatable.", show_default=False
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run. Without it: the config file's name.", show_default=False)]
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run. Without it: the only one there is.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print what a script needs, as JSON.")]
