"""The features in the contract, which launcher lacks one and why, and the page with the table of both.

A new launcher needs an entry in LAUNCHERS, a LaunchTarget, and a class with its `kind` that inherits the contract:
in tests/contract/test_engineless_launchers.py,
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

IN_A_CONTAINER = "Ranks run in containers"
NODE_DIES = "If a machine fails, the run continues on the other machines"
SCALE_DOWN = "`scale` removes a node without interrupting the others"
SCALE_UP = "`scale` adds a node without interrupting the others"
_FIXED_JOB_NODES = "no: the nodes of a job are fixed; all ranks save and exit, and a new job resumes"

_HEADER = """# Launchers

This page lists the features of each launcher (`runner.runner_type`). The table is generated from the tests in
`tests/contract` by `REFRESH=1 pytest tests/docs`; `make contract` runs all of these tests.

For each `yes`, a test runs the commands on the real platform: a swarm, one Docker engine, this machine, SSH hosts (with Docker engines
for `ssh_docker`), or a Slurm cluster. The platforms are created by [the lab](../how-to/lab.md). All tests use the config
`tests/contract/contract.yml` and change only `runner_type`. The config requests two nodes; the run continues on one of them if the
other one fails.

"""

LAUNCHERS: Mapping[str, Mapping[str, str]] = {
    "swarm": {},
    "docker": {NODE_DIES: "no: all nodes are on one machine"},
    "local": {
        IN_A_CONTAINER: "no: nodes are processes of this machine",
        NODE_DIES: "no: all nodes are on one machine",
    },
    "ssh": {IN_A_CONTAINER: "no: `ssh_docker` is the same with containers"},
    "ssh_docker": {},
    "slurm": {
        IN_A_CONTAINER: "not tested: the Apptainer command is only generated",
        SCALE_DOWN: _FIXED_JOB_NODES,
        SCALE_UP: _FIXED_JOB_NODES,
    },
}
"""Each launcher, and the table's text for each feature that is not a plain yes."""


def feature(name: str, *, gate: bool = True) -> Callable[[Test], Test]:
    """Mark a test with the feature that it asserts, a row of the table. Without `gate`, the gate runs it on the swarm only."""

    def decorate(test: Test) -> Test:
        test.feature, test.gate = name, gate  # type: ignore[attr-defined]
        return test

    return decorate


def list_features(contract: type) -> list[str]:
    """Return the features that a contract class asserts, in the order of its source."""
    return [test.feature for name in list_names_in_order(contract) if hasattr(test := getattr(contract, name), "feature")]


def list_names_in_order(contract: type) -> list[str]:
    """Return the attribute names of a class and its bases, the most basic class first."""
    return list(dict.fromkeys(name for each in reversed(inspect.getmro(contract)) for name in vars(each)))


def render_page(contract: type) -> str:
    """Return the page with the table of what `contract` asserts for each launcher."""
    rows = [["", *(f"`{kind}`" for kind in LAUNCHERS)], ["---"] * (len(LAUNCHERS) + 1)]
    rows += [[name, *(cannot.get(name, YES) for cannot in LAUNCHERS.values())] for name in list_features(contract)]
    return _HEADER + "".join(f"| {' | '.join(row)} |\n" for row in rows)
