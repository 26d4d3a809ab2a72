"""training_code.py that assigns micro batches to replicas as the environment variable ASSIGNMENTS says, in turns of three steps.

ASSIGNMENTS: JSON list of lists, each with the number of micro batches of each replica. Turns are counted by steps, so a resumed run goes on
with the assignment of its step.
"""

from __future__ import annotations

import json
import os
from typing import Any

import training_code
from swarmtrain.trainer.health.micro_batch_assignment import MicroBatchReassigner

_TURN_STEPS = 3


def main() -> None:
    assignments = [tuple(each) for each in json.loads(os.environ["ASSIGNMENTS"])]

    def reassign(_reassigner: Any, _timings: Any, _counts: Any, step: int) -> tuple[int, ...]:
        return assignments[step // _TURN_STEPS % len(assignments)]

    MicroBatchReassigner.reassign = reassign  # type: ignore[method-assign,assignment]
    training_code.main()
