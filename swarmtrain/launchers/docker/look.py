"""What there is of a run on an engine: its containers, found by their labels, whoever made them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.engine import Engine, gone
from swarmtrain.wire import EXIT_PLANNED, LABEL_CONTAINER, LABEL_HOST, LABEL_NODE, LABEL_RUN, RENDEZVOUS

FIRST = "docker0"
"""How the engine is called as the place of a run's first node."""


@dataclass(frozen=True)
class Container:
    """A container of a run, as the engine has it."""

    id: str
    node: str
    """Of the run's node, or rendezvous."""
    digest: str
    """What it was made of."""
    image: str
    labels: dict[str, str]
    state: dict[str, Any]
    """In the engine's own words."""

    @property
    def source(self) -> str:
        """Where its log is asked for."""
        return f"/containers/{self.id}"

    @property
    def alive(self) -> bool:
        """Whether it runs, or is about to again."""
        return bool(self.state["Running"] or self.state["Restarting"])

    @property
    def done(self) -> bool:
        """Whether it has ended with success, once and for all."""
        return bool(self.state["Status"] == "exited" and self.state["ExitCode"] == 0)

    def task(self) -> TaskState:
        """Return how it stands."""
        status, code, host = self.state["Status"], self.state["ExitCode"], self.labels.get(LABEL_HOST, FIRST)
        if self.state["Restarting"]:
            return TaskState(self.node, host, "starting", f"starts again after: {_why(self.state)}", code)
        if status == "exited":
            state = "complete" if code == 0 else "shutdown" if code == EXIT_PLANNED else "failed"
            return TaskState(self.node, host, state, _why(self.state) if code else "", code)
        return TaskState(self.node, host, {"created": "new"}.get(status, status))


def _why(state: dict[str, Any]) -> str:
    if state["OOMKilled"]:
        return "the kernel had no memory left for it"
    return str(state["Error"] or f"exit code {state['ExitCode']}")


def runs(engine: Engine) -> list[str]:
    """Return the names of the runs that have containers, sorted. Raises EngineError."""
    found = _labelled(engine, LABEL_CONTAINER)
    return sorted({item["Labels"][LABEL_RUN] for item in found if LABEL_RUN in item["Labels"]})


def containers(engine: Engine, run: str) -> dict[str, Container]:
    """Return the containers of a run by node, nodes first. Raises EngineError."""
    found = {}
    for item in _labelled(engine, f"{LABEL_RUN}={run}"):
        if LABEL_CONTAINER not in item["Labels"]:
            continue  # another launcher's
        try:
            facts = engine.get(f"/containers/{item['Id']}/json")
        except EngineError as error:
            if gone(error):
                continue
            raise
        labels = facts["Config"]["Labels"]
        node = labels[LABEL_NODE]
        found[node] = Container(facts["Id"], node, labels[LABEL_CONTAINER], facts["Image"], labels, facts["State"])
    return dict(sorted(found.items(), key=lambda pair: (pair[0] == RENDEZVOUS, len(pair[0]), pair[0])))


def _labelled(engine: Engine, label: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.get("/containers/json", {"all": "1", "filters": json.dumps({"label": [label]})})
    return found
