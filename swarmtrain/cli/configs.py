"""The commands that need no existing run: demo, init, schema, plan, memory, generate, doctor, join, notify-test, env."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmtrain.cli.options import (
    DEBUG_OVERRIDES,
    ConfigFileArgument,
    DebugOption,
    JsonOption,
    OptionalConfigFileArgument,
    OverridesOption,
    RunNameOption,
)

if TYPE_CHECKING:
    from swarmtrain.planning.plan import Plan

_STEP_TIME_SECONDS = 5.0
"""For about how long doctor --step-times measures training steps on each node."""


class DeviceChoice(StrEnum):
    """Where doctor --train trains."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


def register_commands(app: typer.Typer) -> None:
    """Register the commands of this module on the Typer app `app`."""
    app.command("demo")(run_demo)
    app.command("init")(create_config)
    app.command("schema")(print_schema)
    app.command("plan")(show_plan)
    app.command("memory")(estimate_memory)
    app.command("generate")(generate_deployment_file)
    app.command("doctor")(check_cluster)
    app.command("join")(print_join_commands)
    app.command("notify-test")(send_test_notifications)
    app.command("env")(check_environment)


def run_demo(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the demo; created if missing.")] = Path("swarmtrain-demo"),
    *,
    use_lab: Annotated[
        bool | None,
        typer.Option("--lab/--local", help="Fail if a lab cannot run here, or use local nodes. Default: a lab if possible."),
    ] = None,
    assume_yes: Annotated[bool, typer.Option("--yes", "-y", help="Install missing packages without asking.")] = False,
) -> None:
    """Train a small model on a swarm of three Docker engines on this machine; without root, on three local nodes."""
    from swarmtrain.operations import demo

    raise typer.Exit(demo.run_demo(folder, use_lab=use_lab, assume_yes=assume_yes))


def create_config(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="File to write.")] = Path("config.yml"),
    *,
    script: Annotated[
        Path | None, typer.Option("--script", metavar="FILE", help="Your training script, instead of training_code.py.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="MODEL", help="Architecture preset: gpt2, llama-3.2-1b, …", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Write every key with its default and its description.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write a config with the keys that are usually set first, its JSON schema, and training_code.py if it is missing."""
    from swarmtrain.config.starter_files import write_starter_files
    from swarmtrain.view.console import print_message

    written = write_starter_files(config_file, script=script, preset=preset, full=full, force=force)
    print_message(f"wrote {', '.join(map(str, written))}\nnext: swarmtrain plan {config_file}")


def print_schema() -> None:
    """Print the JSON schema of a config, for the completion of an editor."""
    from swarmtrain.config.json_schema import render_json_schema

    typer.echo(render_json_schema(), nl=False)


def show_plan(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    run_name: RunNameOption = None,
    debug: DebugOption = False,
    json: JsonOption = False,
) -> None:
    """Show which ranks each node would run, and why (dry run). For a deployed run, show what deploy would change. Changes nothing."""
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.launchers.planner import derive_run_name, plan_run
    from swarmtrain.launchers.registry import create_launcher
    from swarmtrain.operations import runs

    config = load_config_file(config_file, [*(DEBUG_OVERRIDES if debug else ()), *overrides])
    run_plan = plan_run(config, derive_run_name(config_file) if run_name is None else run_name, working_folder=Path.cwd())
    runs.show_plan(create_launcher(config.runner.runner_type), run_plan, as_json=json)


def estimate_memory(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Number of ranks. Default: as many as plan would start.", show_default=False)
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory", metavar="SIZE", help="Memory per rank, such as 80GiB: checks whether the run fits.", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Estimate the memory of each rank, by simulating a step without computing it. Needs no GPU and no cluster."""
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.errors import EXIT_ERROR
    from swarmtrain.launchers.planner import count_planned_ranks
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.estimates import memory
    from swarmtrain.view.output import print_result

    config = load_config_file(config_file, overrides)
    device_bytes = None if device_memory is None else memory.parse_size(device_memory)
    world_size = ranks or count_planned_ranks(config)
    with show_progress(f"simulating a step of {world_size} rank{'' if world_size == 1 else 's'}"):
        estimate = memory.estimate_memory(config, world_size, device_bytes)
    print_result(estimate, as_json=json)
    raise typer.Exit(0 if estimate.fits else EXIT_ERROR)


def generate_deployment_file(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    run_name: RunNameOption = None,
    output: Annotated[
        Path, typer.Option("--output", help="File to write, or - for stdout; its configs are written to generated/ next to it.")
    ] = Path("compose/generated.yml"),
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not query a swarm: without runner.hosts, write placeholders HOST0, HOST1, … to replace.")
    ] = False,
) -> None:
    """Write the stack file for `docker stack deploy`; for runner_type docker a file for `docker compose`, for slurm one for `sbatch`."""
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.launchers.common.stack_file import STDOUT_PATH, write_deployment_text
    from swarmtrain.launchers.planner import derive_run_name, plan_run_offline
    from swarmtrain.launchers.registry import load_launcher_class
    from swarmtrain.view.console import print_message

    config = load_config_file(config_file, overrides)
    run_name = derive_run_name(config_file) if run_name is None else run_name
    run_plan = plan_run_offline(config, run_name, working_folder=Path.cwd(), use_placeholders=offline)
    launcher_class = load_launcher_class(config.runner.runner_type)
    if output == STDOUT_PATH:
        text, message = write_deployment_text(launcher_class, run_plan)
        typer.echo(text, nl=False)
    else:
        message = launcher_class.write_deployment_file(run_plan, output)
    print_message(message)


def check_cluster(
    config_file: OptionalConfigFileArgument = None,
    *,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    run_name: RunNameOption = None,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Start a probe on every node for a few seconds.")] = True,
    step_times: Annotated[
        bool,
        typer.Option("--step-times", help="Also measure training steps on every node, so that plan can estimate the time per step."),
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Instead, train on this machine's GPUs: losses against a CPU's, speed against a plain loop.")
    ] = False,
    device: Annotated[DeviceChoice, typer.Option("--device", help="With --train: where to train. cpu: tiny models.")] = DeviceChoice.auto,
    json: JsonOption = False,
) -> None:
    """Check the cluster, or everything that CONFIG needs, for problems. Each finding includes its fix."""
    if train:
        raise typer.Exit(_run_machine_check(config_file, device, as_json=json))
    if step_times and (config_file is None or not probe):
        raise typer.BadParameter("needs CONFIG and the probe", param_hint="--step-times")
    if device is not DeviceChoice.auto:
        raise typer.BadParameter("needs --train", param_hint="--device")
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.doctor import examine_cluster, examine_cluster_without_plan, examine_plan
    from swarmtrain.errors import EXIT_ERROR, PlanError
    from swarmtrain.launchers.planner import derive_run_name, plan_run
    from swarmtrain.launchers.registry import create_launcher
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_result

    with show_progress("checking") as report_progress:
        if config_file is None:
            report = examine_cluster(create_launcher("swarm"), report_progress)
        else:
            config = load_config_file(config_file, overrides)
            launcher = create_launcher(config.runner.runner_type)
            run_name = derive_run_name(config_file) if run_name is None else run_name
            try:
                run_plan = plan_run(config, run_name, working_folder=Path.cwd(), min_nodes=0)
            except PlanError as error:
                report = examine_cluster_without_plan(launcher, error, report_progress)
            else:
                seconds = _check_step_times(run_plan) if step_times else 0.0
                report = examine_plan(launcher, run_plan, report_progress, probe=probe, step_time_seconds=seconds)
    print_result(report, as_json=json)
    raise typer.Exit(EXIT_ERROR if report.fatal_count else 0)


def _check_step_times(plan: "Plan") -> float:
    """Return for about how many seconds to measure training steps of `plan`. Raises SwarmtrainError if they cannot be measured."""
    from swarmtrain.errors import SwarmtrainError
    from swarmtrain.planning.step_estimates import explain_unmeasurable_steps

    if not plan.config.runner.capabilities.has_managers:
        raise SwarmtrainError("needs a swarm: only there does doctor start a probe on the nodes", place="--step-times")
    if reason := explain_unmeasurable_steps(plan):
        raise SwarmtrainError(reason, place="--step-times", hint="run doctor without it")
    return _STEP_TIME_SECONDS


def _run_machine_check(config_file: Path | None, device: DeviceChoice, *, as_json: bool) -> int:
    """Check training on this machine, and return the exit code."""
    from swarmtrain.launchers.common.trainer_subprocess import run_trainer_ranks

    if config_file is not None:
        raise typer.BadParameter("--train checks this machine, without a config", param_hint="CONFIG")
    return run_trainer_ranks("machine-check", {"device": device, "json": as_json})


def print_join_commands(
    config_file: OptionalConfigFileArgument = None,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    as_manager: Annotated[bool, typer.Option("--manager", help="Join as a manager.")] = False,
    json: JsonOption = False,
) -> None:
    """Print the commands that join a new machine to the swarm; with CONFIG also its labels, mounts and GPUs."""
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.launchers.common.docker_engine import DockerEngine
    from swarmtrain.launchers.swarm.join_script import build_join_script
    from swarmtrain.view.output import print_result

    config = load_config_file(config_file, overrides) if config_file else None
    print_result(build_join_script(DockerEngine(), config, as_manager=as_manager), as_json=json)


def send_test_notifications(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
) -> None:
    """Send a test notification to each channel in the section notify of a config, from this machine."""
    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.operations import notifications

    for line in notifications.send_test_notifications(load_config_file(config_file, overrides), Path.cwd()):
        typer.echo(line)


def check_environment(
    config_file: ConfigFileArgument,
    overrides: OverridesOption = [],  # noqa: B006  # Typer's convention for lists
    json: JsonOption = False,
) -> None:
    """Check the Python of every host of an `ssh` run: its versions, its GPUs, and whether ranks can communicate. Installs nothing."""
    import os

    from swarmtrain.cli.config_loading import load_config_file
    from swarmtrain.config.external_inputs import resolve_external_inputs
    from swarmtrain.errors import EXIT_ERROR
    from swarmtrain.launchers.ssh import python_environment
    from swarmtrain.view.console import show_progress
    from swarmtrain.view.output import print_result

    runner = resolve_external_inputs(load_config_file(config_file, overrides), Path.cwd(), os.environ).runner
    with show_progress("checking Python on the hosts") as report_progress:
        report = python_environment.check_environment(runner, report_progress)
    print_result(report, as_json=json)
    raise typer.Exit(0 if report.is_usable else EXIT_ERROR)
