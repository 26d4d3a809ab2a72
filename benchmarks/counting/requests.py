"""The command line of the programs that count: a list of configs and world sizes as JSON, answered with a list of costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

from benchmarks.counting.operation_counter import OperationCosts
from swarmtrain.config import Config


def answer_requests(count_step_costs: Callable[[Config, int], tuple[OperationCosts, OperationCosts]]) -> None:
    """Call `count_step_costs` with the config and the world size of each request in the first argument, and print the results."""
    requests = json.loads(sys.argv[1])
    costs = [count_step_costs(Config.from_json(json.dumps(request["config"])), request["world_size"]) for request in requests]
    sys.stdout.write(json.dumps([[asdict(part) for part in parts] for parts in costs]) + "\n")
