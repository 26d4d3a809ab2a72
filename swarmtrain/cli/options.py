"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli import shell_completion

# readable=False: Typer would report an unreadable file as a usage error; we report it ourselves, with a hint.
ConfigFileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="Path of the YAML config.",
        show_default=False,
        readable=False,
        autocompletion=shell_completion.complete_config_files,
    ),
]
OptionalConfigFileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="Path of the YAML config. Without it: the swarm only.",
        show_default=False,
        readable=False,
        autocompletion=shell_completion.complete_config_files,
    ),
]
OverridesOption = Annotated[
    list[str],
    typer.Option(
        "-o",
        "--override",
        metavar="KEY=VALUE",
        help="Override a config value: -o trainer.train_iterations=100. Repeatable.",
        show_default=False,
        autocompletion=shell_completion.complete_overrides,
    ),
]
DebugOption = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Verbose torch and NCCL logs, and one CUDA kernel at a time (CUDA_LAUNCH_BLOCKING=1): slow, but with exact tracebacks.",
    ),
]
DEBUG_OVERRIDES = ("runner.env.TORCH_DISTRIBUTED_DEBUG=INFO", "runner.env.CUDA_LAUNCH_BLOCKING=1", "runner.nccl.debug=INFO")
"""Config overrides that the option --debug adds. Overrides from -o are applied later and take precedence.

Not DETAIL: with it, torch crashes DistributedDataParallel over gloo (see `_describe_debug_level` in plan.py).
"""
LOCAL_OVERRIDES = ("runner.runner_type=local",)
"""Config overrides that the option --attach adds. They take precedence over -o."""
RunNameOption = Annotated[str | None, typer.Option("--name", help="Name of the run. Default: the config file's name.", show_default=False)]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Name or id of the run. Default: your only run.",
        show_default=False,
        autocompletion=shell_completion.complete_runs,
    ),
]
RunOrAllArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="Name or id of the run. Default: all runs.", show_default=False, autocompletion=shell_completion.complete_runs
    ),
]
TwoRunsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN [RUN]]",
        help="Name or id of the run, or of two runs to compare. Default: your only run.",
        show_default=False,
        autocompletion=shell_completion.complete_runs,
    ),
]
YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask for confirmation before a restart, or before a change to somebody else's run.")
]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON for each result, for scripts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
