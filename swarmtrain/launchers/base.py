"""The interface that every launcher implements, and its data types.

A launcher reads an inventory, carries out a plan, and reports what happens as a stream of updates. It prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.config.schema.runner_types import Capabilities
from swarmtrain.planning.inventory import Inventory
from swarmtrain.planning.placement import Placement
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import Event
from swarmtrain.protocol.run_identity import RunIdentity

if TYPE_CHECKING:
    from swarmtrain.planning.step_estimates import ClusterMeasurement

ProgressReporter = Callable[[str], None]
"""Function that shows one progress message to the user."""


@dataclass(frozen=True)
class Finding:
    """Problem found by a check: the affected component or setting (`place`), a message, and a `hint`.

    The hint is the command or change that fixes the problem. A `fatal` problem prevents a run from working.
    """

    place: str
    message: str
    hint: str | None = None
    fatal: bool = True
    why: str = ""
    """Why the problem matters, if the message does not say so."""
    host: str = ""
    """Host that the problem makes unusable, while other hosts can run the run; empty if the problem does not concern one host only."""


@dataclass(frozen=True)
class CheckResult:
    """Result of one check: its name, its expectation, and its findings."""

    check: str
    expectation: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class ClusterReport:
    """What the managers of a cluster report about it, and what follows from that for a plan."""

    check_results: tuple[CheckResult, ...]
    node_ids: Mapping[str, str]
    """Id of the machine of each planned node, by the name of the node."""
    machine_addresses: Mapping[str, str]
    """Address that each machine advertises, by its host name."""
    subnets: tuple[str, ...]
    """Subnets of the cluster's networks, in CIDR notation."""
    image: str = ""
    """The plan's image with the digest from its registry; empty if it is unknown."""
    lacks_free_gpus: bool = False
    """Whether the plan reserves GPUs that a run has reserved already."""


def exclude_unusable_hosts(plan: Plan, findings: Iterable[Finding]) -> Plan:
    """Return `plan` in which the nodes on hosts with a fatal finding are missing."""
    fatal = [finding for finding in findings if finding.fatal and finding.host]
    return plan.exclude_hosts({finding.host: (f"refused ({finding.message})", finding.hint or "") for finding in fatal})


@dataclass(frozen=True)
class LogLine:
    """One line of a run's output. `rank` is None if no rank wrote the line; `time` is in seconds since the epoch."""

    node: str
    text: str
    rank: int | None = None
    time: float = 0.0
    is_interim: bool = False
    """Whether a later line replaces this one: it is a state of a progress bar."""


QUEUED_STATE = "queued"
"""State of a service that waits for the scheduler of a queue."""


@dataclass(frozen=True)
class TaskExit:
    """Exit of a service's container or process that nobody had requested, at `time`, in seconds since the epoch."""

    node: str
    time: float
    exit_code: int | None
    reason: str


@dataclass(frozen=True)
class TaskState:
    """State of one service of a run: a node or the rendezvous.

    `state` is a Swarm task state (pending, running, failed, …) or QUEUED_STATE; `reason` is the message of the component that reported it.
    """

    node: str
    host: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    gpus: tuple[str, ...] = ()
    """The GPUs reserved by the service: their ids, or the number of GPUs of each kind."""
    exits: tuple[TaskExit, ...] = ()
    """Unrequested exits of the service's containers, oldest first, as far back as the engine keeps them."""
    machine_problem: str = ""
    """Why the machine of a pending service cannot start it: down, drained or paused; empty if it can, or if that is unknown."""


OVERVIEW_EVENTS = 100
"""Number of last lines of a coordinator's log that an overview of its run contains."""


@dataclass(frozen=True)
class RunOverview:
    """Overview of an existing run: its identity, the states of its tasks, and its last events."""

    run: str
    identity: RunIdentity
    tasks: tuple[TaskState, ...]
    last_events: tuple[Event, ...]
    error: str = ""
    """Reason why the tasks or events cannot be read, such as a host that does not answer; empty if they were read."""
    note: str = ""
    """What else users should know about the run, such as a malformed label."""


@dataclass(frozen=True)
class NodeCommand:
    """Command on this machine that runs a program inside a node of a run, for example `docker exec`.

    `env` is added to the environment of this process; `cwd` is the working folder, on this machine.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."


RunUpdate = Event | LogLine | TaskState


class Change(Protocol):
    """A change that `deploy_run` would make to a run. str() returns a description of the change and its cause."""

    @property
    def interrupts_run(self) -> bool:
        """Whether the change interrupts running processes or containers."""
        ...


@dataclass(frozen=True)
class Action:
    """A change to one object of a run, and its cause. Implements Change for launchers that need no further fields."""

    verb: str
    name: str
    cause: str
    interrupts_run: bool = False
    """Whether the change interrupts running processes or containers."""

    def __str__(self) -> str:
        return f"{self.verb} {self.name}: {self.cause}"


class Launcher(Protocol):
    """Interface of the launchers. Each launcher deploys and removes runs on one backend (Swarm, Slurm, SSH, …).

    Its methods deliberately raise only SwarmtrainErrors.
    """

    capabilities: ClassVar[Capabilities]

    @staticmethod
    def write_deployment_file(plan: Plan, output: Path) -> str:
        """Write to `output` the deployment file of `plan`, which starts the run without swarmtrain. Used by `swarmtrain generate`.

        Return text for the user: the path of the file, and the command that starts the run. Needs no connection
        to the engine, cluster or hosts on which the run would be deployed.
        """
        ...

    @property
    def location(self) -> str:
        """Description of the backend on which the launcher makes changes, for example the engine and its address.

        Shown to the user before a change.
        """
        ...

    def read_inventory(self, runner: RunnerConfig) -> Inventory:
        """Return the inventory: the machines that `runner` may use, in the order of use."""
        ...

    def check_plan(self, plan: Plan) -> list[Finding]:
        """Return the problems that would prevent `plan` from working. Only fast checks are run."""
        ...

    def plan_changes(self, plan: Plan) -> Sequence[Change]:
        """Return the changes that `deploy_run` would make, in order. Empty if the run matches the plan."""
        ...

    def deploy_run(self, plan: Plan, report_progress: ProgressReporter) -> None:
        """Make the run match `plan`: create, change and remove only the objects that differ. An existing run keeps its identity.

        A first deploy that fails or is interrupted removes the objects that it created, except those that another command has changed
        since. Raises ResourcesReserved, before anything is changed, if GPUs that the run reserves are not free.

        `deploy_run`, `stop_run` and `tear_down_run` of one run are serialized by a lock, also across machines: a concurrent
        command waits, and reports the holder of the lock. The lock is held during changes only, not while
        containers start: a deploy that waits for containers fails if another command changes the run.
        """
        ...

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        """Return the config (with its hosts) and the cargo (script, files, secrets) with which `run` was deployed.

        A new plan can be made from them. Only the digest of a secret can be read back, not its content; the digest suffices if the secret
        is unchanged. Raises RunNotFound if the run does not exist, StackError if its deployment is malformed or another version of
        swarmtrain wrote it.
        """
        ...

    def read_identity(self, run: str) -> RunIdentity:
        """Return the id of the existing `run`, and who brought it up. Raises RunNotFound if the run does not exist."""
        ...

    def read_placement(self, run: str) -> Placement:
        """Return the machines of the nodes of `run`, which keep them in a new plan.

        Empty if a new plan may place the nodes anywhere, for example because all are on one machine. Raises RunNotFound if the run does not
        exist.
        """
        ...

    def list_runs(self) -> list[str]:
        """Return the names of all existing runs, sorted."""
        ...

    def read_overviews(self) -> list[RunOverview]:
        """Return an overview of each existing run."""
        ...

    def list_terminating_runs(self) -> list[str]:
        """Return the names of runs whose removal is incomplete: a part of the run is still stopping, or the removal was interrupted.

        `tear_down_run` completes the removal.
        """
        ...

    def list_tasks(self, run: str) -> list[TaskState]:
        """Return the state of each service of `run`, nodes first. Raises RunNotFound if the run does not exist."""
        ...

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
        """Return the coordinator's events so far, oldest first. Raises RunNotFound if the run does not exist.

        Events before `since` (seconds since the epoch), and those before the last `tail`, may be omitted.
        """
        ...

    def watch_run(self, run: str) -> Iterator[RunUpdate]:
        """Yield updates of the run: all of the coordinator's events, and new output and task states.

        Ends at the run's outcome or removal. Raises RunNotFound if the run does not exist.
        """
        ...

    def stream_logs(
        self,
        run: str,
        *,
        follow: bool,
        tail: int | None = None,
        since: float | None = None,
        node: str | None = None,
        report_progress: ProgressReporter | None = None,
    ) -> Iterator[LogLine]:
        """Yield the output of all nodes, or of `node`, as one stream ordered by time. Raises RunNotFound if the run does not exist.

        `tail`: only the last `tail` lines of each node. `since`: only lines from this time on, in seconds since the epoch.
        `report_progress` is called when reading the logs fails temporarily, and when it works again.
        """
        ...

    def build_node_command(self, run: str, node: str, argv: Sequence[str], *, with_terminal: bool) -> NodeCommand:
        """Return the command that runs `argv` where the ranks of `node` run: in the node's container, or on its host.

        `with_terminal`: the input and output of `argv` are a terminal. Raises RunNotFound if the run does not exist, and SwarmtrainError
        if `argv` cannot run there.
        """
        ...

    def stop_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Request that the ranks save a checkpoint and exit. The coordinator keeps running, and a deploy resumes the run.

        Raises RunNotFound if the run does not exist.
        """
        ...

    def tear_down_run(self, run: str, report_progress: ProgressReporter) -> None:
        """Remove the run and wait until the removal is complete. Raises RunNotFound if the run does not exist."""
        ...


@runtime_checkable
class ClusterInspector(Protocol):
    """Implemented by launchers whose cluster has managers, which know its machines. Methods raise EngineError if no manager responds."""

    def inspect_cluster(self, plan: Plan | None) -> ClusterReport:
        """Check the cluster and, with a `plan`, the machines that it uses, without starting anything on them."""
        ...

    def record_probe(self, gpus_by_node_id: Mapping[str, Sequence[str]], measurement: ClusterMeasurement | None) -> None:
        """Store in the cluster what a probe found out, for later plans: the GPUs' UUIDs by machine, and the measured times."""
        ...

    def read_measurements(self) -> Sequence[ClusterMeasurement]:
        """Return the stored measurements, newest first."""
        ...
