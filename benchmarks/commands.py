"""Commands that only read and write files: what they cost in CPU time, as they start and as a run grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from benchmarks import others
from benchmarks.measure import BUILD, ROOT, SWARMTRAIN, Row, Sample, Unavailable, cpu_seconds, growth, in_turns, wall_seconds

_RUNS = 9
_CPU = "ms of CPU"
_QUICKSTART = "examples/quickstart.yml"
_STACK = BUILD / "stack" / "generated.yml"
_SUBCOMMANDS = ("init", "plan", "generate", "deploy", "status", "logs", "scale", "stop", "down", "image", "lab")
_SIZES = (125, 250, 500, 1000)


def help_time() -> Iterator[Row]:
    """`--help`, which every use of the shell's completion waits for too."""
    ours = partial(_milliseconds, [*SWARMTRAIN, "--help"])
    for index, (requirement, program) in enumerate(((others.TORCHX, "torchx"), (others.DSTACK, "dstack"), (others.SKYPILOT, "sky"))):
        name = "help" if index == 0 else f"help/{program}"
        other_is, limit = f"`{program} --help`, {requirement.replace('==', ' ')}", 130 if index == 0 else None
        row = partial(Row, name, "`swarmtrain --help`", _CPU, other_is=other_is, limit=limit)
        try:
            argv = [str(others.install(requirement, program)), "--help"]
            mine, theirs = in_turns(_RUNS if index == 0 else 3, ours, partial(_milliseconds, argv, foreign=True))
            yield row(ours=mine, other=theirs)
        except Unavailable as error:
            yield row(ours=in_turns(_RUNS, ours)[0], note=str(error))
    worst = {name: in_turns(3, partial(_milliseconds, [*SWARMTRAIN, name, "--help"]))[0] for name in _SUBCOMMANDS}
    slowest = max(worst, key=lambda name: worst[name].median)
    yield Row("help/commands", "the slowest `--help` of a command", _CPU, worst[slowest], note=f"`swarmtrain {slowest} --help`")


def generate_time() -> Iterator[Row]:
    """`generate` for three nodes, against the same of another launcher."""
    ours = partial(_milliseconds, [*SWARMTRAIN, "generate", _QUICKSTART, "-o", "runner.hosts=[a,b,c]", "--output", str(_STACK)])
    other_is = "`torchx run --dryrun` of a job of 3 nodes"
    row = partial(Row, "generate", "`swarmtrain generate` for 3 nodes", _CPU, other_is=other_is, limit=250)
    try:
        torchx = others.install(others.TORCHX, "torchx")
    except Unavailable as error:
        yield row(ours=in_turns(_RUNS, ours)[0], note=str(error))
        return
    job = ["dist.ddp", "-j", "3x1", "--script", "training_code.py"]
    mine, theirs = in_turns(_RUNS, ours, partial(_milliseconds, [str(torchx), "run", "--dryrun", "-s", "local_cwd", *job], foreign=True))
    yield row(ours=mine, other=theirs)


def generate_many() -> Iterator[Row]:
    """`generate` for 1,000 nodes, and what a node costs as there are more of them."""
    argv = [*SWARMTRAIN, "generate", _QUICKSTART, *(word for value in _hosts(1000) for word in ("-o", value)), "--output", str(_STACK)]
    [whole] = in_turns(5, partial(wall_seconds, argv))
    yield Row("generate-1000", "`swarmtrain generate` for 1,000 nodes", "s", whole, limit=2)
    samples = dict(zip(_SIZES, in_turns(5, *(partial(_generate, size) for size in _SIZES)), strict=True))
    pairs = zip(samples[1000].values, samples[250].values, strict=True)
    ratios = Sample.of([large / 1000 / (small / 250) for large, small in pairs])
    each = ", ".join(growth({size: sample.median for size, sample in samples.items()}))
    what = "CPU time for each of 1,000 nodes, in terms of that for each of 250: 1 is linear"
    yield Row("generate-1000/growth", what, "times", ratios, limit=1.3, note=f"a node costs, with {each}")


def _milliseconds(argv: list[str], *, foreign: bool = False) -> float:
    return cpu_seconds(argv, dict(others.environment()) if foreign else None) * 1e3


def _hosts(count: int) -> list[str]:
    names = ", ".join(f"gpu-{index}" for index in range(count))
    return [f"runner.hosts=[{names}]", "runner.nodes=null", "runner.max_nodes=null"]


def _generate(count: int) -> float:
    """Return the CPU time, in seconds, of all that plan and generate do but for the interpreter's start and the writing."""
    from swarmtrain.config.load import load
    from swarmtrain.launchers import offline_plan
    from swarmtrain.render import compose

    overrides = _hosts(count)
    begun = time.process_time()
    plan = offline_plan(load(ROOT / _QUICKSTART, overrides), "bench", folder=ROOT)
    str(plan)
    compose.to_yaml(compose.stack(plan))
    return time.process_time() - begun
