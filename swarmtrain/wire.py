"""What crosses between the launcher and the nodes, written down once for both sides.

    launcher --NodeEnv, BoardEnv--> containers        (environment variables)
    containers --Event--> board --JSON lines--> launcher   (the log of the rendezvous service)

Values only, standard library only: the entrypoint reads this inside images in which everything else may be broken.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_type_hints

PREFIX = "SWARMTRAIN_"
ATTACHED = f"{PREFIX}ATTACHED"
"""Set for ranks one of which has a person's terminal, and may stand still for as long as that person likes."""

# Exit codes of a rank and of a node's supervisor. 75 is EX_TEMPFAIL of sysexits.h: asked to leave, state saved, run me again.
EXIT_PLANNED = 75

# Labels by which a stack is found again. The first two are Docker's own, so that `docker stack` sees what we made.
LABEL_STACK = "com.docker.stack.namespace"
LABEL_STACK_IMAGE = "com.docker.stack.image"
LABEL_RUN = "swarmtrain.run"
LABEL_ROLE = "swarmtrain.role"
LABEL_HOST = "swarmtrain.host"
LABEL_SLOTS = "swarmtrain.slots"
LABEL_CONFIG = "swarmtrain.config"
LABEL_HOSTS = "swarmtrain.hosts"
# Of containers in no swarm: the node that each is, what it was made of, and the digests of its secrets.
LABEL_NODE = "swarmtrain.node"
LABEL_CONTAINER = "swarmtrain.container"
LABEL_SECRETS = "swarmtrain.secrets"
# Of an image: what went into it.
LABEL_CONTENTS = "swarmtrain.contents"
ROLE_NODE = "node"
ROLE_PROBE = "probe"
ROLE_RENDEZVOUS = "rendezvous"

RENDEZVOUS = "rendezvous"
CONFIG_PATH = "/etc/swarmtrain/config.json"


@dataclass(frozen=True)
class _Env:
    """A dataclass that travels as environment variables: one per field, `SWARMTRAIN_` and its name in capitals.

    Fields are str, int, float or, as JSON, tuple and dict.
    """

    def to_env(self) -> dict[str, str]:
        """Return the variables, all of them, in field order."""
        return {PREFIX + item.name.upper(): _encode(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables back. Raises ValueError that names the variable which is missing or malformed."""
        hints = get_type_hints(cls)
        values = {}
        for item in fields(cls):
            name = PREFIX + item.name.upper()
            if name not in environ:
                raise ValueError(f"environment variable {name} is not set: this program is started by swarmtrain, not by hand")
            try:
                values[item.name] = _decode(environ[name], hints[item.name])
            except ValueError as error:
                raise ValueError(f"environment variable {name} is malformed: {error}") from None
        return cls(**values)


def _encode(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _decode(text: str, hint: Any) -> Any:
    if hint is str:
        return text
    value = json.loads(text)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class NodeEnv(_Env):
    """All that a node's supervisor is told, the same under every launcher.

    Nothing here depends on how many nodes the run has at the moment, so that adding or removing nodes
    within min_nodes..max_nodes leaves every other node's environment, and so its container, as it is.
    """

    run: str
    """Name of the run; under Swarm the stack's name."""
    node: str
    """Name of this node in the run: node0, node1 …"""
    slots: int
    """Ranks to start here."""
    min_nodes: int
    """Fewest nodes that may train."""
    max_nodes: int
    """Most nodes that may join."""
    board: str
    """host:port of the notice board."""
    store: str
    """host:port of the rendezvous store."""
    config: str
    """Path of the resolved config, JSON."""
    script: str
    """Path of the user's script."""
    script_args: tuple[str, ...]
    """Its arguments, JSON."""
    secrets: dict[str, str]
    """Secret's name to the path of the file that holds it, JSON. The secrets themselves never enter the environment."""
    stop_grace: float
    """Seconds from SIGTERM to SIGKILL."""
    log_dir: str
    """Directory for the ranks' error files and logs; made if missing."""
    mounts: tuple[str, ...]
    """Where the config's mounts are in this container, JSON; empty where nothing is mounted."""
    interface: str
    """Interface by which ranks talk, by its name, its subnet, or an address or host name of it; empty: that on the route to the board."""
    numa: str
    """How ranks are bound to the cores near their GPUs, in torchrun's words; empty: not at all."""


@dataclass(frozen=True)
class ProbeEnv(_Env):
    """What a node's probe is told beside NodeEnv."""

    peers: tuple[str, ...]
    """Names of all nodes that are probed, this one among them, JSON."""
    addresses: dict[str, str]
    """Where they are found on a network that does not know these names, JSON; empty on one that does."""
    probe_port: int
    """Port that probes listen on, TCP and UDP."""


@dataclass(frozen=True)
class BoardEnv(_Env):
    """All that the rendezvous role is told."""

    run: str
    """Name of the run."""
    board_port: int
    """Port that the notice board listens on."""
    store_port: int
    """Port that the rendezvous store listens on."""
    bind: str
    """Address to listen on: 0.0.0.0 inside the run's own network, 127.0.0.1 for a run on one machine."""
    max_restarts: int
    """Failures in a row, without a new step between them, after which the run is given up."""
    max_restarts_per_hour: int
    """Failures within an hour, whatever lies between them, after which it is given up too."""
    min_nodes: int
    """Fewest nodes that may train: a node that fails again and again is left out if as many others are here."""


@dataclass(frozen=True)
class Stand:
    """Where one rank of a world that has broken stands; what it holds is whole."""

    step: int
    """Optimizer steps made."""
    ready: bool
    """It has all that the next step takes, and can make it alone."""
    part: int
    """Which part of parameters and state it holds; ranks of the same part hold the same."""
    parts: int
    """Parts in all: one, unless the state is divided."""
    size: int
    """Ranks of the world."""
    disk: int = 0
    """Which it would save to: its node's, or the one that all share."""
    disks: int = 1
    """Disks in all."""


# Kinds of events, with the fields that readers may rely on.
BOARD_UP = "board"  # run
JOINED = "joined"  # node, host, address, interface, slots
WORLD = "world"  # world, world_size, nodes, ranks: {node: [rank, …]}; printed once all nodes of the world are in it
RETURNED = "returned"  # node, world: the script has returned there
PROGRESS = (
    "progress"  # step, steps, loss, tokens_per_second, eta_seconds, learning_rate; and where known gradient_norm, loss_max, accuracy,
    # tflops, mfu, parts: seconds of a step by part (swarmtrain.trainer.parts), memory: bytes (swarmtrain.trainer.metrics.room)
)
REPORT = "report"  # node, and what it is made of: versions, devices, git …; text by name, or such mappings
EVALUATION = "evaluation"  # step, loss
CHECKPOINT = "checkpoint"  # step, path, seconds
RESUMED = "resumed"  # step, path
FAILURE = (
    "failure"  # node, rank, local_rank, world, exit_code or signal, error (last line), hint, traceback, oom, step; permanent: see AT_FIRST
)
NOTE = "note"  # node, message: something a person should know, for instance a skipped torn checkpoint
STRAGGLER = (
    "straggler"  # message, and rank, node, by (how much longer a step takes for it: 0.3) and part: data | compute; rank null: no more
)
FINISHED = "finished"  # step, and loss_before, loss_after, baseline if known: the last step is made and saved
LEFT = "left"  # node, exit_code; null if the node fell silent
PROBE = "probe"  # node, and what swarmtrain.entrypoint.probe finds on it
LINK = "link"  # the fields of swarmtrain.entrypoint.links.Link
TOGETHER = "together"  # node, and what swarmtrain.entrypoint.together finds: torch, devices, seconds of an all-reduce, or error
USAGE = "usage"  # posted: node, and what swarmtrain.entrypoint.usage reads; printed: nodes: {node: …}, all of them now and then
LEFT_OUT = "left_out"  # node, seconds, why: it sits out for so long, unless it is needed
LET_IN = "let_in"  # node, why: it may train again
VERDICT = "verdict"  # status: done | failed, why, exit_code, hint if there is one
ASKED = (
    "asked"  # what: up | stop | down, nodes, and code: what is checked out of the user's project; never on the board, but kept beside
    # its events by the machine that asked
)


AT_FIRST = "at first"
"""What `permanent` says of a failure: True, it comes again whenever it is tried; AT_FIRST, it does so unless a step has been
made before, as when a file is missing; False, it may pass; nothing, it may pass unless it is the same at the same step again."""


def world_key(environ: Mapping[str, str]) -> str:
    """Name the world of the rank whose environment this is; the same for all its ranks, another for each world."""
    return f"{environ['TORCHELASTIC_RUN_ID']}/{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"


_COLLATERAL = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process|DistNetworkError|DistStoreError|ncclRemoteError"
    r"|socket timeout|timed out (after )?waiting|watchdog caught|SIGTERM",
    re.IGNORECASE,
)


def collateral(failure: Mapping[str, Any]) -> bool:
    """Say whether a failure is what comes in another's wake: a peer has gone, or did not answer in time."""
    return bool(_COLLATERAL.search(f"{failure.get('error', '')} {failure.get('signal', '')}"))


@dataclass(frozen=True)
class Event:
    """One line of the notice board."""

    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    """Seconds since the epoch, by the board's clock: those of nodes may be wrong."""

    def to_line(self) -> str:
        """Return the event as one line of JSON, `event` first, so that a reader can tell it from other output."""
        return json.dumps({"event": self.kind, "time": round(self.time, 3), **self.data}, default=str)

    @classmethod
    def from_line(cls, line: str) -> Event | None:
        """Parse a line of the board's log; None for a line that is no event."""
        if not line.startswith('{"event"'):
            return None
        try:
            data = json.loads(line)
            return cls(kind=str(data.pop("event")), time=float(data.pop("time")), data=data)
        except (ValueError, KeyError):
            return None


@dataclass(frozen=True)
class Verdict:
    """How the run ended. It stands on the board; whoever finds one has nothing left to do."""

    status: str
    """done or failed"""
    why: str
    exit_code: int
    hint: str = ""
    """The next step, if whoever failed knew one."""

    @property
    def done(self) -> bool:
        return self.status == "done"


@dataclass(frozen=True)
class Receipt:
    """What the board answers to an event."""

    known: bool = False
    """The event is a failure whose reason has been told already, by another rank of its world."""
    over: bool = False
    """The run has failed: nothing is to be started again."""


@dataclass(frozen=True)
class Rescue:
    """What the board answers to survivors: who of them saves which step."""

    step: int = 0
    writers: tuple[int, ...] = ()
    """Ranks that write, one for each part and disk; the first of a disk's puts the parts together. Empty while that is being decided."""
    attempt: int = 0
    """Goes up when a writer has died and others are chosen."""
    over: bool = False
    """The checkpoint stands, or none can be had: there is nothing left to wait for."""


@dataclass(frozen=True)
class Orders:
    """What the board answers to a supervisor: stop (a verdict), or train in this rendezvous round."""

    round: str
    """Run id for the rendezvous. A new one is drawn when the old one is closed, since a closed one refuses everybody for ever."""
    verdict: Verdict | None = None
    wait: bool = False
    """Not yet: ask again in a moment. Others are on their way, or this node has failed again and again, and sits out."""
