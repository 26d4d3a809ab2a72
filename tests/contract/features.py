"""What a launcher can, as the contract has it, what each cannot and why, and the table that is made of both.

A new launcher has an entry in LAUNCHERS, a Place, and a class with its kind that inherits the contract.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "launchers.md"
YES = "yes"
Test = TypeVar("Test", bound=Callable[..., None])

IN_A_CONTAINER = "Ranks are in a container"
NODE_DIES = "A machine dies, and the others go on"
SCALE_DOWN = "`scale` takes a node away, and leaves the others alone"
SCALE_UP = "`scale` adds a node, and leaves the others alone"
_ONE_JOB = "no: a job's nodes are fixed; all save and leave, and a new job goes on"

LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    "swarm": {},
    "local": {
        IN_A_CONTAINER: "no: nodes are processes of this machine",
        NODE_DIES: "no: there is one machine",
    },
    "pdsh": {IN_A_CONTAINER: "no: `pdsh_docker` is the same with containers"},
    "pdsh_docker": {},
    "slurm": {
        IN_A_CONTAINER: "rendered, not run: in apptainer",
        SCALE_DOWN: _ONE_JOB,
        SCALE_UP: _ONE_JOB,
    },
}
"""Each launcher, and the features of which there is something else to say than yes."""


def feature(name: str) -> Callable[[Test], Test]:
    """Say which feature a test asserts: its row in the table."""

    def named(test: Test) -> Test:
        test.feature = name  # type: ignore[attr-defined]
        return test

    return named


def asserted(contract: type) -> list[str]:
    """Return the features that a class of tests asserts, in the order of its text."""
    return [test.feature for name in dir_in_order(contract) if hasattr(test := getattr(contract, name), "feature")]


def dir_in_order(contract: type) -> list[str]:
    """Return the names of a class and of those that it inherits from, the oldest first."""
    return list(dict.fromkeys(name for each in reversed(inspect.getmro(contract)) for name in vars(each)))


def page(contract: type, head: str) -> str:
    """Return the page: `head`, and the table of what `contract` asserts."""
    rows: list[list[Any]] = [["", *(f"`{kind}`" for kind in LAUNCHERS)], ["---"] * (len(LAUNCHERS) + 1)]
    for name in asserted(contract):
        rows.append([name, *(cannot.get(name, YES) for cannot in LAUNCHERS.values())])
    return head + "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)
