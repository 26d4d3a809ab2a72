"""Protocol between the launcher and the nodes, defined once for both sides.

    launcher --NodeEnv, CoordinatorEnv--> containers                (environment variables)
    containers --Event--> coordinator --JSON lines--> launcher      (the log of the rendezvous service)

Only constants and dataclasses, standard library only: the entrypoint imports this in images whose other packages may be broken.

coordinator_client   sends messages to the coordinator
run_key              the secret key that signs them
run_identity         id and owner of a run
distributed_env      rank and world size of a process, from its environment variables
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_type_hints

from swarmtrain import __version__

PROTOCOL_VERSION = 9
"""Version of the messages in this module. It is increased by each change after which an earlier launcher, node or coordinator would
misread a message.
"""
ENV_PREFIX = "SWARMTRAIN_"
ENV_KEY_FILE = f"{ENV_PREFIX}KEY_FILE"
"""Variable with the path of the run's key; empty if only the run's own processes can reach its ports."""
ENV_RUN_ID = f"{ENV_PREFIX}RUN_ID"
"""Variable with the id of the run, for its coordinator and its ranks; empty if it is unknown."""
ENV_WORLD = f"{ENV_PREFIX}WORLD"
"""Variable of a rank with the key of its world (WorldAssignment)."""
ENV_RANK_STORE = f"{ENV_PREFIX}RANK_STORE"
"""Variable of a rank with the address (host:port) at which other nodes reach the ranks' store."""
ENV_GPUS = f"{ENV_PREFIX}GPUS"
"""Variable that is set on a node whose run uses GPUs: the number of GPUs that the plan assumes, followed by + if there may be more."""
ENV_SIMULATED_GPUS = f"{ENV_PREFIX}SIMULATED_GPUS"
"""Variable that a lab sets on the nodes whose engines declare GPUs that do not exist: the number of these GPUs."""
ENV_NOTIFY = f"{ENV_PREFIX}NOTIFY"
"""Variable of a coordinator that sends notifications: the settings of its channels (swarmtrain.notifications.channel), without secrets."""
ENV_ATTACHED = f"{ENV_PREFIX}ATTACHED"
"""Variable that is set for all ranks if a user's terminal is attached to one of them. A debugger may pause that rank for any time."""

# Exit codes of a rank and of a node's supervisor. 75 is EX_TEMPFAIL of sysexits.h: stop requested, state saved, run again.
EXIT_PLANNED = 75

OUTCOME_FIELD = "outcome"
"""Field of the responses to supervisors: the outcome of the run, or null. A supervisor that knows it sends it in its requests, so that a
coordinator that has been restarted adopts it."""

# Labels that identify the objects of a stack. The first two are Docker's own, so that `docker stack` recognizes our stacks.
LABEL_STACK = "com.docker.stack.namespace"
LABEL_STACK_IMAGE = "com.docker.stack.image"
LABEL_RUN = "swarmtrain.run"
LABEL_ROLE = "swarmtrain.role"
LABEL_HOST = "swarmtrain.host"
LABEL_SLOTS = "swarmtrain.slots"
LABEL_CONFIG = "swarmtrain.config"
LABEL_HOSTS = "swarmtrain.hosts"
# Settings of a run for a queue (swarmtrain.config.schema.runner.QUEUE_KEYS), as JSON, if they differ from their defaults.
LABEL_QUEUE_SETTINGS = "swarmtrain.queue.settings"

# The channels of a run's notifications (the config's section notify), as JSON, on its coordinator.
LABEL_NOTIFY = "swarmtrain.notify"

# Labels of the run's identity (protocol.run_identity): its id, who brought it up, from which machine, and when (seconds since the epoch).
LABEL_RUN_ID = "swarmtrain.id"
LABEL_OWNER = "swarmtrain.owner"
LABEL_ORIGIN = "swarmtrain.origin"
LABEL_CREATED = "swarmtrain.created"
# Labels of containers outside a swarm: the node name, a digest of the container's specification, and the digests of its secrets.
LABEL_NODE = "swarmtrain.node"
LABEL_CONTAINER = "swarmtrain.container"
LABEL_CODE = "swarmtrain.code"
LABEL_SECRETS = "swarmtrain.secrets"
# Label of an image: digest of its build inputs.
LABEL_CONTENTS = "swarmtrain.contents"
ROLE_NODE = "node"
ROLE_PROBE = "probe"
ROLE_RENDEZVOUS = "rendezvous"

RENDEZVOUS_SERVICE = "rendezvous"
RUN_KEY_NAME = "run-key"
"""Name of the run's key, as a file and as a secret. The names of other secrets are names of variables, which contain no hyphen."""
CONFIG_PATH = "/etc/swarmtrain/config.json"


@dataclass(frozen=True)
class _EnvironmentMessage:
    """Base class of dataclasses passed as environment variables: one variable per field, `SWARMTRAIN_` and the field name in capitals.

    Fields are str, int, float or, as JSON, tuple and dict.
    """

    def to_env(self) -> dict[str, str]:
        """Return the environment variables of all fields, in field order."""
        return {ENV_PREFIX + item.name.upper(): _encode_env_value(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Return the message in the variables `environ`.

        Raises ValueError if a variable is missing or malformed, or if the launcher uses another version of the protocol.
        """
        _check_protocol_version(environ)
        hints = get_type_hints(cls)
        values = {}
        for item in fields(cls):
            name = ENV_PREFIX + item.name.upper()
            if name not in environ:
                raise ValueError(f"environment variable {name} is not set: only swarmtrain may start this program")
            try:
                values[item.name] = _decode_env_value(environ[name], hints[item.name])
            except ValueError as error:
                raise ValueError(f"environment variable {name} is malformed: {error}") from None
        return cls(**values)


def _check_protocol_version(environ: Mapping[str, str]) -> None:
    """Raise ValueError if the launcher that set the variables `environ` uses another version of the protocol."""
    launcher_version = environ.get(f"{ENV_PREFIX}PROTOCOL", "")
    if launcher_version not in ("", str(PROTOCOL_VERSION)):
        own_version = f"swarmtrain {__version__} on this node uses version {PROTOCOL_VERSION}"
        raise ValueError(f"the launcher uses protocol version {launcher_version}, but {own_version}: rebuild the image")


def _encode_env_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _decode_env_value(text: str, type_hint: Any) -> Any:
    if type_hint is str:
        return text
    value = json.loads(text)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class NodeEnv(_EnvironmentMessage):
    """Environment of a node's supervisor, the same under every launcher.

    No field depends on the current number of nodes, so that adding or removing nodes within min_nodes..max_nodes leaves every other
    node's environment, and so its container, unchanged.
    """

    run: str
    """Name of the run; under Swarm the stack's name."""
    node: str
    """Name of this node in the run: node0, node1 …"""
    slots: int
    """Number of ranks to start on this node."""
    min_nodes: int
    """Minimum number of nodes that training needs."""
    max_nodes: int
    """Maximum number of nodes that can join."""
    coordinator: str
    """host:port of the coordinator."""
    config: str
    """Path of the resolved config, JSON."""
    code_folder: str
    """Folder with the files that are shipped with the run."""
    script: str
    """Path of the user's script, in `code_folder`; empty if `module` is set."""
    script_args: tuple[str, ...]
    """Arguments of the user's script, JSON."""
    secrets: dict[str, str]
    """Path of the file of each secret by its name, JSON. The secrets themselves never enter the environment."""
    stop_grace: float
    """Seconds from SIGTERM to SIGKILL."""
    log_dir: str
    """Directory for the ranks' error files and logs; created if missing."""
    mounts: tuple[str, ...]
    """Paths of the config's mounts in this container, JSON; empty if nothing is mounted."""
    interface: str
    """Interface for communication between ranks: its name, subnet, address or host name; empty: that of the route to the coordinator."""
    numa: str
    """CPU binding of ranks to the cores near their GPUs, as one of torchrun's modes; empty: none."""
    module: str = ""
    """Module to start instead of a script; empty: the script."""
    key_file: str = ""
    """Path of the run's key (swarmtrain.protocol.run_key); empty: none."""
    protocol: int = PROTOCOL_VERSION
    """Version of the protocol that the launcher uses. A node with another version reports both versions and does not start."""


@dataclass(frozen=True)
class ProbeEnv(_EnvironmentMessage):
    """Environment variables that a node's probe receives in addition to those of NodeEnv."""

    peers: tuple[str, ...]
    """Names of all probed nodes, including this one, JSON."""
    addresses: dict[str, str]
    """Addresses of the nodes on a network that cannot resolve their names, JSON; otherwise empty."""
    probe_port: int
    """Port that probes listen on, TCP and UDP."""
    step_time_seconds: float
    """About how long to measure training steps of the config's model on this node, in seconds; 0: not at all."""


@dataclass(frozen=True)
class CoordinatorEnv(_EnvironmentMessage):
    """Environment of the rendezvous service, which runs the coordinator."""

    run: str
    """Name of the run."""
    coordinator_port: int
    """Port that the coordinator listens on."""
    bind: str
    """Address to listen on: 0.0.0.0 inside the run's own network, 127.0.0.1 for a run on one machine."""
    max_restarts: int
    """Maximum consecutive restarts without a new step between them; the next failure ends the run."""
    max_restarts_per_hour: int
    """Maximum restarts within 1 h, regardless of progress; the next failure ends the run."""
    min_nodes: int
    """Minimum number of nodes to train: a flaky node is quarantined if at least this many others are present."""
    run_id: str = ""
    """Id of the run (swarmtrain.protocol.run_identity); empty if it is unknown."""
    key_file: str = ""
    """Path of the run's key (swarmtrain.protocol.run_key); empty: none."""
    protocol: int = PROTOCOL_VERSION
    """Version of the protocol that the launcher uses. A coordinator with another version does not start."""


@dataclass(frozen=True)
class SurvivorState:
    """State of one surviving rank of a failed world. Its model and optimizer state belong to one step, without a partial update."""

    step: int
    """Number of completed optimizer steps."""
    ready: bool
    """Whether the rank has all inputs of the next step, and can complete the step alone."""
    shard: int
    """Index of the shard of parameters and optimizer state that the rank holds; ranks with the same index hold the same shard."""
    shards: int
    """Total number of shards: 1 unless the state is sharded."""
    world_size: int
    """Number of ranks of the world."""
    disk: int = 0
    """Index of the file system to which the rank would save: the local one of its node, or the shared one."""
    disks: int = 1
    """Total number of file systems to which the ranks would save."""


INTERIM_SUFFIX = "\033[K"
"""End of a line of a node's output that a later line replaces: the state of a progress bar. A terminal shows nothing of it."""
UNRESOLVED_COORDINATOR_TEXT = "swarmtrain: cannot resolve the name of the coordinator"
"""Start of the log line of a node that cannot resolve the coordinator's name, which follows. An event could not reach the coordinator."""


# Event kinds. The comment above each lists its fields.
# run, run_id, protocol: PROTOCOL_VERSION of the coordinator
EVENT_COORDINATOR_STARTED = "coordinator"
# node, host, address, interface, slots
EVENT_NODE_JOINED = "joined"
# world, world_size, nodes, ranks: {node: [rank, …]}; printed once every node of the world has joined it
EVENT_WORLD_FORMED = "world"
# world, world_size, address, ranks: {node: [rank, …]} that wait in init_process_group for rank 0 at this address; no ranks: none waits
EVENT_RANKS_CONNECTING = "connecting"
# node, world, and from each rank its number: the script has returned; printed once it has returned on all ranks of that node
EVENT_SCRIPT_RETURNED = "script_returned"
# step, steps, loss, tokens_per_second, eta_seconds, learning_rate; if known gradient_norm, max_replica_loss, accuracy, tflops, mfu, phases:
# seconds of a step by phase (swarmtrain.trainer.health.step_timer), memory: bytes (swarmtrain.trainer.metrics.memory_usage),
# micro_batches: {node: [number for each replica]} if micro batches are assigned by speed
EVENT_PROGRESS = "progress"
# node, and the fields of swarmtrain.trainer.run_report: versions, devices, tokens_per_step …; values are strings, numbers, or mappings
EVENT_RUN_REPORT = "report"
# step, loss (null if it is NaN/Inf)
EVENT_EVALUATION = "evaluation"
# step, path, seconds
EVENT_CHECKPOINT = "checkpoint"
# step, path, and run_id: the id of the run that wrote the checkpoint, and that this run therefore continues; empty if it is unknown
EVENT_RESUMED = "resumed"
# node, rank, local_rank, world, exit_code or signal, error (last line), hint, traceback, oom, step;
# peer: the node whose address is in the error;
# permanent: see PERMANENT_BEFORE_FIRST_STEP
EVENT_FAILURE = "failure"
# node, message: text for the user, for example about a skipped corrupt checkpoint
EVENT_NOTE = "note"
# message, and rank, node, slowdown (0.3: its steps take 30 % longer), phase: data | compute; rank is null if there is no longer a straggler
EVENT_STRAGGLER = "straggler"
# step, and initial_validation_loss, final_validation_loss, bigram_baseline_loss if known: the last step is done and saved
EVENT_TRAINING_FINISHED = "finished"
# node, exit_code; null if the node stopped sending heartbeats
EVENT_NODE_LEFT = "left"
# node, and the results of swarmtrain.entrypoint.probe.node_probe
EVENT_NODE_PROBE = "probe"
# the fields of swarmtrain.entrypoint.probe.link_probe.Link
EVENT_LINK = "link"
# node, and the results of swarmtrain.entrypoint.probe.collective_probe: torch, devices, seconds of an all-reduce, or error
EVENT_COLLECTIVE = "collective"
# node, and the results of swarmtrain.entrypoint.probe.step_time_probe: parameters, times of a step, or error
EVENT_STEP_TIME = "step_time"
# as posted: node, and the fields of swarmtrain.entrypoint.resource_usage; as printed: nodes: {node: …}, all nodes every few seconds
EVENT_USAGE = "usage"
# node, message, hint, is_hardware: whether the GPU is faulty, so that its node is quarantined; see swarmtrain.entrypoint.gpu_health
EVENT_GPU_FAULT = "gpu_fault"
# node, path, free, total (bytes of the file system at path), message: the disk of a save_dir or log_dir is nearly full
EVENT_DISK_NEARLY_FULL = "disk"
# node, seconds (duration, unless the node is needed earlier), reason
EVENT_NODE_QUARANTINED = "quarantined"
# node, reason: the node may train again
EVENT_NODE_RELEASED = "released"
# status: done | failed, reason, exit_code, round, and optionally hint
EVENT_OUTCOME = "outcome"
# operation: up | stop | down, nodes, and code: the commit that is checked out in the user's project. Not sent to the coordinator: the
# machine on which the operation was requested stores it next to the run's events
EVENT_OPERATION = "operation"

PERMANENT_BEFORE_FIRST_STEP = "before_first_step"
"""A value of the field `permanent` of a failure event, which says whether the failure recurs at a retry.

True: at every retry. PERMANENT_BEFORE_FIRST_STEP: if the run has not completed a step yet, for example because a file is missing. False: a
retry may succeed. Absent: a retry may succeed, but a failure that recurs at the same step is a bug.
"""


_COLLATERAL_PATTERN = re.compile(
    r"connection (was )?(closed|reset|refused|timed out)|broken pipe|remote process|DistNetworkError|DistStoreError|ncclRemoteError"
    r"|socket timeout|timed out (after )?waiting|watchdog caught|SIGTERM|gloo/transport|connectFullMesh|(read|write) error \[",
    re.IGNORECASE,
)


def is_collateral_failure(failure: Mapping[str, Any]) -> bool:
    """Return whether a failure is collateral: the consequence of another rank's failure, such as a lost or unresponsive peer."""
    return bool(_COLLATERAL_PATTERN.search(f"{failure.get('error', '')} {failure.get('signal', '')}"))


@dataclass(frozen=True)
class Event:
    """One event of the coordinator's log."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    """Seconds since the epoch by the coordinator's clock, since the clocks of nodes may be wrong."""

    def to_line(self) -> str:
        """Return the event as one line of JSON. The key `event` comes first, so that readers can distinguish it from other output."""
        return json.dumps({"event": self.kind, "time": round(self.time, 3), **self.data}, default=str)

    @classmethod
    def from_line(cls, line: str) -> Event | None:
        """Return the event in a line of the coordinator's log; None if the line is not an event."""
        if not line.startswith('{"event"'):
            return None
        try:
            data = json.loads(line)
            return cls(kind=str(data.pop("event")), time=float(data.pop("time")), data=data)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run. The coordinator publishes it; a node that receives it exits."""

    status: str
    """Status of the run: done or failed."""
    reason: str
    exit_code: int
    hint: str = ""
    """Hint for the user about the next step; empty if the failure has none."""
    round: str = ""
    """Round that the outcome has ended. It distinguishes the outcomes of two deploys of one run."""

    @property
    def is_success(self) -> bool:
        return self.status == "done"


def format_micro_batch_counts(counts_by_node: Mapping[str, Sequence[int]]) -> str:
    """Return the number of micro batches per step of each replica, by node, as text. Nodes are in the order of their numbers."""
    nodes = sorted(counts_by_node, key=lambda node: (len(node), node))
    return ", ".join(f"{node} {' + '.join(map(str, counts_by_node[node]))}" for node in nodes)


def describe_outcome(outcome: Mapping[str, Any]) -> str:
    """Return the outcome in the data of an outcome event as text."""
    return f"{outcome['status']}, {outcome['reason']}"


def format_run_summary(run: str, outcome_text: str) -> str:
    """Return the first line of `swarmtrain why`, which is also the text of a notification: the run and its outcome."""
    return f"run {run}: {outcome_text}"


@dataclass(frozen=True)
class EventResponse:
    """The coordinator's response to an event."""

    is_known: bool = False
    """Whether the event is a failure whose reason another rank of the same world has already reported."""
    run_failed: bool = False
    """Whether the run has failed, so that no process may be restarted."""


@dataclass(frozen=True)
class ConnectingRank:
    """A rank that waits in init_process_group, or no longer does."""

    world: str
    world_size: int
    rank: int
    node: str
    address: str
    """host:port of rank 0, for which it waits."""
    waits: bool


@dataclass(frozen=True)
class ConnectingWorld:
    """The coordinator's response to a connecting rank."""

    waiting_ranks: int
    """Number of ranks of the world that wait in init_process_group."""
    seconds_since_last_arrival: float
    """Seconds since the last of them has reported that it waits."""


@dataclass(frozen=True)
class WorldRequest:
    """Request of a node's agent for ranks in the next world."""

    node: str
    agent: str
    """Random id of the agent: another agent of the same node is another member."""
    round: str
    previous_world: str
    """Key of the world that the agent has left; empty before its first."""
    slots: int
    """Number of ranks of the node."""
    address: str
    """Address at which the other nodes reach the ranks' store, if rank 0 is on this node."""
    port: int
    """Free port for the ranks' store; with a key, the port of the node's relay (entrypoint.rank_store)."""
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class WorldAssignment:
    """The coordinator's response to a WorldRequest."""

    world: str = ""
    """Key of the world: equal for all its ranks, unique to each world. Empty while it has not formed."""
    group_rank: int = 0
    """Index of the node in the world."""
    node_count: int = 0
    address: str = ""
    port: int = 0
    has_equal_slots: bool = False
    """Whether all nodes of the world have the same number of ranks."""
    is_round_over: bool = False
    """Whether no world will form in this round any more."""


@dataclass(frozen=True)
class RescueAssignment:
    """The coordinator's response to a surviving rank: which ranks write a just-in-time checkpoint of which step."""

    step: int = 0
    writers: tuple[int, ...] = ()
    """Ranks that write, one for each shard and file system; empty until the coordinator has decided.

    On each file system, the first writer assembles the checkpoint from the shards.
    """
    attempt: int = 0
    """Number of the current attempt: incremented when a writer is lost and new writers are chosen."""
    is_finished: bool = False
    """Whether the checkpoint is committed or impossible. In both cases the rank stops waiting."""


@dataclass(frozen=True)
class SupervisorResponse:
    """The coordinator's response to a supervisor. The supervisor stops if `outcome` is set; otherwise it joins round `round`."""

    round: str
    """Id of the round. The agents of all nodes are restarted in each round, in which one world follows another."""
    outcome: RunOutcome | None = None
    run_id: str = ""
    """Id of the run (swarmtrain.protocol.run_identity); empty if it is unknown."""
    wait: bool = False
    """Whether the supervisor must repeat the request, because other nodes are still arriving or this node is quarantined."""
    is_over: bool = False
    """Whether the run has an outcome, and its notifications are delivered or given up. A supervisor that exits repeats its request until
    then, so that a coordinator that replaces a lost one learns the outcome."""
