"""Benchmarks of commands that only read and write files: CPU time at startup, and as a function of the number of nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from benchmarks import third_party_tools
from benchmarks.measurement import (
    BUILD,
    ROOT,
    SWARMTRAIN_ARGV,
    BenchmarkRow,
    BenchmarkUnavailableError,
    Sample,
    format_time_per_item,
    measure_cpu_seconds,
    measure_in_turns,
    measure_wall_seconds,
)

_REPEATS = 9
_CPU_UNIT = "ms of CPU"
_QUICKSTART = "examples/quickstart.yml"
_STACK_FILE = BUILD / "stack" / "generated.yml"
_SUBCOMMANDS = ("init", "plan", "generate", "deploy", "status", "logs", "scale", "stop", "down", "image", "lab")
_NODE_COUNTS = (125, 250, 500, 1000)


def measure_help() -> Iterator[BenchmarkRow]:
    """Measure the CPU time, in ms, of `--help` of swarmtrain, its subcommands and other launchers.

    Shell completion incurs the same startup cost.
    """
    measure_swarmtrain = partial(_measure_cpu_milliseconds, [*SWARMTRAIN_ARGV, "--help"])
    for index, (requirement, program) in enumerate(
        ((third_party_tools.TORCHX, "torchx"), (third_party_tools.DSTACK, "dstack"), (third_party_tools.SKYPILOT, "sky"))
    ):
        name = "help" if index == 0 else f"help/{program}"
        baseline_description, limit = f"`{program} --help`, {requirement.replace('==', ' ')}", 130 if index == 0 else None
        build_row = partial(BenchmarkRow, name, "`swarmtrain --help`", _CPU_UNIT, baseline_description=baseline_description, limit=limit)
        try:
            argv = [str(third_party_tools.install_program(requirement, program)), "--help"]
            result, baseline = measure_in_turns(
                _REPEATS if index == 0 else 3, measure_swarmtrain, partial(_measure_cpu_milliseconds, argv, is_third_party=True)
            )
            yield build_row(result=result, baseline=baseline)
        except BenchmarkUnavailableError as error:
            yield build_row(result=measure_in_turns(_REPEATS, measure_swarmtrain)[0], note=str(error))
    samples = {
        name: measure_in_turns(3, partial(_measure_cpu_milliseconds, [*SWARMTRAIN_ARGV, name, "--help"]))[0] for name in _SUBCOMMANDS
    }
    slowest = max(samples, key=lambda name: samples[name].median)
    yield BenchmarkRow(
        "help/commands", "the slowest `--help` of a command", _CPU_UNIT, samples[slowest], note=f"`swarmtrain {slowest} --help`"
    )


def measure_generate() -> Iterator[BenchmarkRow]:
    """Measure the CPU time, in ms, of `generate` for three nodes, and of the equivalent command of another launcher."""
    measure_swarmtrain = partial(
        _measure_cpu_milliseconds, [*SWARMTRAIN_ARGV, "generate", _QUICKSTART, "-o", "runner.hosts=[a,b,c]", "--output", str(_STACK_FILE)]
    )
    baseline_description = "`torchx run --dryrun` of a job of 3 nodes"
    build_row = partial(
        BenchmarkRow, "generate", "`swarmtrain generate` for 3 nodes", _CPU_UNIT, baseline_description=baseline_description, limit=250
    )
    try:
        torchx = third_party_tools.install_program(third_party_tools.TORCHX, "torchx")
    except BenchmarkUnavailableError as error:
        yield build_row(result=measure_in_turns(_REPEATS, measure_swarmtrain)[0], note=str(error))
        return
    job = ["dist.ddp", "-j", "3x1", "--script", "training_code.py"]
    result, baseline = measure_in_turns(
        _REPEATS,
        measure_swarmtrain,
        partial(_measure_cpu_milliseconds, [str(torchx), "run", "--dryrun", "-s", "local_cwd", *job], is_third_party=True),
    )
    yield build_row(result=result, baseline=baseline)


def measure_generate_for_1000_nodes() -> Iterator[BenchmarkRow]:
    """Measure the wall time, in seconds, of `generate` for 1,000 nodes, and how its CPU time per node grows with the number of nodes."""
    argv = [
        *SWARMTRAIN_ARGV,
        "generate",
        _QUICKSTART,
        *(word for value in _build_host_overrides(1000) for word in ("-o", value)),
        "--output",
        str(_STACK_FILE),
    ]
    [duration_sample] = measure_in_turns(5, partial(measure_wall_seconds, argv))
    yield BenchmarkRow("generate-1000", "`swarmtrain generate` for 1,000 nodes", "s", duration_sample, limit=2)
    samples = dict(
        zip(_NODE_COUNTS, measure_in_turns(5, *(partial(_measure_generate_command_cpu, size) for size in _NODE_COUNTS)), strict=True)
    )
    pairs = zip(samples[1000].values, samples[250].values, strict=True)
    ratios = Sample.from_values([large / 1000 / (small / 250) for large, small in pairs])
    growth_text = ", ".join(format_time_per_item({size: sample.median for size, sample in samples.items()}))
    description = "CPU time per node for 1,000 nodes, relative to that for 250 nodes: 1 is linear"
    note = f"CPU time per node, by number of nodes: {growth_text}"
    yield BenchmarkRow("generate-1000/growth", description, "times", ratios, limit=1.3, note=note)


def _measure_cpu_milliseconds(argv: list[str], *, is_third_party: bool = False) -> float:
    return measure_cpu_seconds(argv, dict(third_party_tools.build_environment()) if is_third_party else None) * 1e3


def _build_host_overrides(host_count: int) -> list[str]:
    names = ", ".join(f"gpu-{index}" for index in range(host_count))
    return [f"runner.hosts=[{names}]", "runner.nodes=null", "runner.max_nodes=null"]


def _measure_generate_command_cpu(node_count: int) -> float:
    """Return the CPU seconds of plan and generate, without interpreter startup and without writing the file."""
    from swarmtrain.config.loader import load_config
    from swarmtrain.launchers.planner import plan_run_offline
    from swarmtrain.render import stack_document

    overrides = _build_host_overrides(node_count)
    started_at = time.process_time()
    plan = plan_run_offline(load_config(ROOT / _QUICKSTART, overrides), "bench", working_folder=ROOT)
    str(plan)
    stack_document.render_stack_yaml(stack_document.render_stack(plan))
    return time.process_time() - started_at
