"""Arguments and options that several commands share, each spelled once."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli import completion

# Typer would call a file that may not be read a mistake of the command line; ours to say, with a hint.
ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="The YAML file.", show_default=False, readable=False, autocompletion=completion.configs),
]
OptionalConfigFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="The YAML file. Without it: the swarm as such.",
        show_default=False,
        readable=False,
        autocompletion=completion.configs,
    ),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "-o",
        "--override",
        metavar="KEY=VALUE",
        help="Override a value: -o trainer.train_iterations=100. Repeatable.",
        show_default=False,
        autocompletion=completion.overrides,
    ),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Have torch and NCCL tell more, and CUDA run one kernel at a time: slow, but tracebacks are true."),
]
DEBUG = ("runner.env.TORCH_DISTRIBUTED_DEBUG=DETAIL", 'runner.env.CUDA_LAUNCH_BLOCKING="1"', "runner.nccl.debug=INFO")
"""The overrides that --debug stands for; what -o says comes later, and wins."""
HERE = ("runner.runner_type=local",)
"""What --attach stands for, whatever -o says."""
Name = Annotated[str | None, typer.Option("--name", help="Name of the run. Without it: the config file's name.", show_default=False)]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="Name of the run. Without it: the only one there is.", show_default=False, autocompletion=completion.runs
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Restart what runs without asking.")]
Json = Annotated[bool, typer.Option("--json", help="Print what a script needs, as JSON.")]
