"""init, plan, memory, generate, doctor, join: the commands before there is a run."""

from pathlib import Path
from typing import Annotated

import typer

from swarmtrain.cli.options import DEBUG, ConfigFile, Debug, Json, Name, OptionalConfigFile, Overrides


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (init, plan, memory, generate, doctor, join):
        app.command()(command)


def init(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="File to write.")] = Path("config.yml"),
    *,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="MODEL", help="For a model of the shape of gpt2, llama-3.2-1b, …", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write a commented config with every key and its default."""
    from swarmtrain.config.template import write_template
    from swarmtrain.view.console import say

    write_template(path, preset, force=force)
    say(f"wrote {path}\nnext: swarmtrain plan {path}")


def plan(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    name: Name = None,
    debug: Debug = False,
    json: Json = False,
) -> None:
    """Show who would run what, and why; with the run up, what a deploy would change. Nothing is changed."""
    from swarmtrain.config.load import load
    from swarmtrain.launchers import launcher, plan_for, run_name
    from swarmtrain.view import runs

    config = load(config_file, [*(DEBUG if debug else ()), *override])
    made = plan_for(config, run_name(config_file) if name is None else name, folder=Path.cwd())
    runs.show_plan(launcher(config.runner.runner_type), made, as_json=json)


def memory(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Ranks in all. Without it: what plan would start.", show_default=False)
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", metavar="SIZE", help="What a rank has, such as 80GiB: does it fit?", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Tell what memory each rank will need, by rehearsing a step that computes nothing; takes no GPU and no cluster."""
    from swarmtrain.config.load import load
    from swarmtrain.errors import EXIT_ERROR
    from swarmtrain.launchers import planned_ranks
    from swarmtrain.view import memory
    from swarmtrain.view.console import progress
    from swarmtrain.view.data import show

    config = load(config_file, override)
    device = None if device_memory is None else memory.size(device_memory)
    size = ranks or planned_ranks(config)
    with progress(f"rehearsing a step of {size} rank{'' if size == 1 else 's'}"):
        found = memory.ask(config, size, device)
    show(found, as_json=json)
    raise typer.Exit(0 if found.fits else EXIT_ERROR)


def generate(
    config_file: ConfigFile,
    override: Overrides = [],  # noqa: B006  # typer's way
    name: Name = None,
    output: Annotated[Path, typer.Option("--output", help="File to write; its configs go into generated/ beside it.")] = Path(
        "compose/generated.yml"
    ),
) -> None:
    """Write the file that `docker stack deploy` takes; with runner_type docker that of `docker compose`, with slurm that of `sbatch`."""
    from swarmtrain.config.load import load
    from swarmtrain.config.runner import RunnerType
    from swarmtrain.launchers import offline_plan, run_name
    from swarmtrain.render import compose, engine
    from swarmtrain.view.console import say

    made = offline_plan(load(config_file, override), run_name(config_file) if name is None else name, folder=Path.cwd())
    if made.config.runner.runner_type is RunnerType.slurm:
        from swarmtrain.launchers import slurm

        files = slurm.generate(made, output := output.with_suffix(".sbatch"))
        say(f"wrote {output}, and what it needs to {files}\nnext: sbatch {output}")
        return
    stack = engine.containers(made) if made.config.runner.runner_type is RunnerType.docker else compose.stack(made)
    compose.write(stack, output)
    say("\n".join([f"wrote {output}", *made.notes, f"next: {stack.command.format(file=output, name=stack.name)}"]))


def doctor(
    config_file: OptionalConfigFile = None,
    override: Overrides = [],  # noqa: B006  # typer's way
    name: Name = None,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Start a probe on every node, for some seconds.")] = True,
    json: Json = False,
) -> None:
    """Look for what would keep a run from working: the cluster as such, or all that CONFIG needs. Each finding names its fix."""
    from swarmtrain.config.load import load
    from swarmtrain.doctor import examine, examine_cluster
    from swarmtrain.errors import EXIT_ERROR
    from swarmtrain.launchers import launcher, plan_for, run_name
    from swarmtrain.view.console import progress
    from swarmtrain.view.data import show

    with progress("looking") as step:
        if config_file is None:
            report = examine_cluster(step)
        else:
            config = load(config_file, override)
            made = plan_for(config, run_name(config_file) if name is None else name, folder=Path.cwd())
            report = examine(launcher(config.runner.runner_type), made, step, probe=probe)
    show(report, as_json=json)
    raise typer.Exit(EXIT_ERROR if report.fatal else 0)


def join(
    config_file: OptionalConfigFile = None,
    override: Overrides = [],  # noqa: B006  # typer's way
    manager: Annotated[bool, typer.Option("--manager", help="As one more manager, which takes changes and votes.")] = False,
    json: Json = False,
) -> None:
    """Print what brings a new machine into the swarm, command by command; with CONFIG also its labels, mounts and GPUs."""
    from swarmtrain.config.load import load
    from swarmtrain.launchers.engine import Engine
    from swarmtrain.launchers.swarm.joining import joining
    from swarmtrain.view.data import show

    config = load(config_file, override) if config_file else None
    show(joining(Engine(), config, as_manager=manager), as_json=json)
