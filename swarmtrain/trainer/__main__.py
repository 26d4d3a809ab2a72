"""Command line of the commands that need torch or numpy: `python -m swarmtrain.trainer COMMAND`.

bench       benchmark a config on this machine, interactively; also under torchrun
data        create and inspect token files; started by `swarmtrain data`
export, sample, embed, evaluate
            started by the `swarmtrain` commands of the same names, one process per rank: each process reads its request as JSON from
            standard input, and has access to the terminal
machine-check
            started by `swarmtrain doctor --train`: reads its request as JSON from standard input
memory      started by the `swarmtrain` command line, which never imports torch: reads its request from standard input as JSON, and writes
            the response to standard output as JSON, {"error": …} on failure
step-time   the same, started by the probe of `swarmtrain doctor --step-times` on each node
losses, speed
            the same, started by machine-check
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from swarmtrain.config import Config
from swarmtrain.errors import EXIT_OK, EXIT_USAGE, SwarmtrainError
from swarmtrain.trainer.cli_exit import handle_cli_errors


def estimate_memory(request: dict[str, Any]) -> dict[str, Any]:
    """Return the estimated memory in bytes of each simulated rank (one per pipeline rank), for the config in `request`.

    If the highest peak exceeds the request's `available_bytes`, the response also lists config changes that save memory, each with the
    resulting peak.
    """
    from swarmtrain.trainer.memory import estimate_memory, suggest_memory_savings

    config, world_size, available_bytes = Config.from_json(request["config"]), request["ranks"], request["available_bytes"]
    estimates = estimate_memory(config, world_size)
    response: dict[str, Any] = {"ranks": [estimate.to_dict() for estimate in estimates], "alternatives": []}
    if available_bytes is not None and max(estimate.peak for estimate in estimates) > available_bytes:
        for changes, changed_estimates in suggest_memory_savings(config, world_size):
            response["alternatives"].append({"changes": changes, "peak": max(estimate.peak for estimate in changed_estimates)})
    return response


def measure_step_time(request: dict[str, Any]) -> dict[str, Any]:
    """Return the times of a training step: see swarmtrain.trainer.speed.bench."""
    from swarmtrain.trainer.speed import bench

    return bench.measure_step_time(request)


def measure_losses(request: dict[str, Any]) -> dict[str, Any]:
    """Return the losses of a few steps of each config: see swarmtrain.trainer.speed.machine_check."""
    from swarmtrain.trainer.speed import machine_check

    return machine_check.measure_losses(request)


def measure_speed(request: dict[str, Any]) -> dict[str, Any]:
    """Return the step time of each config, and of a plain loop: see swarmtrain.trainer.speed.machine_check."""
    from swarmtrain.trainer.speed import machine_check

    return machine_check.measure_speed(request)


_COMMAND_MODULES = {
    "export": "swarmtrain.trainer.export.command",
    "sample": "swarmtrain.trainer.inference.sample_command",
    "embed": "swarmtrain.trainer.inference.embeddings",
    "evaluate": "swarmtrain.trainer.inference.evaluation",
    "machine-check": "swarmtrain.trainer.speed.machine_check",
}
REQUEST_HANDLERS = {"memory": estimate_memory, "step-time": measure_step_time, "losses": measure_losses, "speed": measure_speed}


@handle_cli_errors
def main(argv: Sequence[str]) -> int:
    """Run the command that `argv` names, and return its exit code."""
    command_name, arguments = (argv[0], argv[1:]) if argv else ("", argv)
    if command_name == "bench":
        from swarmtrain.trainer.speed import bench

        return bench.main(arguments)
    if command_name == "data":
        from swarmtrain.trainer.tokenize import command

        return command.main(arguments)
    if command_name in _COMMAND_MODULES and not arguments:
        return int(importlib.import_module(_COMMAND_MODULES[command_name]).main(json.load(sys.stdin)))
    if command_name not in REQUEST_HANDLERS or arguments:
        sys.stderr.write(
            f"usage: python -m swarmtrain.trainer bench CONFIG, or {'|'.join((*REQUEST_HANDLERS, *_COMMAND_MODULES))} < request.json\n"
        )
        return EXIT_USAGE
    try:
        response = REQUEST_HANDLERS[command_name](json.load(sys.stdin))
    except SwarmtrainError as error:
        response = {"error": {"message": error.message, "place": error.place, "hint": error.hint}}
    sys.stdout.write(json.dumps(response))
    return EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
