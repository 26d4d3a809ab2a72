"""What a launcher can, as the contract has it, what each cannot and why, and the table that is made of both.

A new launcher has an entry in LAUNCHERS, a Place, and a class with its kind that inherits the contract: in tests/contract/test_machines.py,
or in tests/lab/test_contract.py if it needs an engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "launchers.md"
YES = "yes"
Test = TypeVar("Test", bound=Callable[..., None])

IN_A_CONTAINER = "Ranks are in a container"
NODE_DIES = "A machine dies, and the others go on"
SCALE_DOWN = "`scale` takes a node away, and leaves the others alone"
SCALE_UP = "`scale` adds a node, and leaves the others alone"
_ONE_JOB = "no: a job's nodes are fixed; all save and leave, and a new job goes on"

_HEAD = """# Launchers

What a run can be brought to, by `runner.runner_type`, and what is the same everywhere. The table is made from the tests in
`tests/contract`; `REFRESH=1 pytest tests/docs` writes it, and `make contract` runs them all.

Each `yes` is asserted by a test that runs these commands on the real thing: a swarm of real engines, this machine, hosts behind real
sshds, with real engines for `pdsh_docker`, a real Slurm. The machines are those of [a lab](../how-to/lab.md). All run one config,
`tests/contract/contract.yml`, in which a test changes the word after `runner_type` and nothing else; it names two machines,
of which one is enough for the run to go on.

"""

LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    "swarm": {},
    "docker": {NODE_DIES: "no: there is one machine"},
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


def feature(name: str, *, gate: bool = True) -> Callable[[Test], Test]:
    """Say which feature a test asserts: its row in the table. Without `gate`, the gate runs it on the swarm alone."""

    def named(test: Test) -> Test:
        test.feature, test.gate = name, gate  # type: ignore[attr-defined]
        return test

    return named


def asserted(contract: type) -> list[str]:
    """Return the features that a class of tests asserts, in the order of its text."""
    return [test.feature for name in dir_in_order(contract) if hasattr(test := getattr(contract, name), "feature")]


def dir_in_order(contract: type) -> list[str]:
    """Return the names of a class and of those that it inherits from, the oldest first."""
    return list(dict.fromkeys(name for each in reversed(inspect.getmro(contract)) for name in vars(each)))


def page(contract: type) -> str:
    """Return the page: the table of what `contract` asserts, and what each launcher cannot."""
    rows = [["", *(f"`{kind}`" for kind in LAUNCHERS)], ["---"] * (len(LAUNCHERS) + 1)]
    rows += [[name, *(cannot.get(name, YES) for cannot in LAUNCHERS.values())] for name in asserted(contract)]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)
