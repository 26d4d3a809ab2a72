"""Process of a node's elastic agent, forked from the supervisor's fork server, one per round of the coordinator.

Exit codes: 0 if all ranks of this node returned, EXIT_PLANNED if a stop was requested, 1 otherwise (the round is over, the coordinator is
lost …). Imports torch only when it runs: the supervisor imports this module.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
from multiprocessing import forkserver

from swarmtrain.entrypoint.supervisor import fork_server
from swarmtrain.protocol import EVENT_FAILURE, EXIT_PLANNED, Event, NodeEnv
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_UNLIMITED_RESTARTS = 1_000_000
_ROLE = "rank"


def run_agent(round: str, advertised_address: str | None, environment: dict[str, str]) -> int:
    """Run this node's ranks in `round`, with `environment` added to their environment. Return the exit code.

    Other nodes find the ranks at `advertised_address`, or by the host name if `advertised_address` is None.
    """
    os.environ |= environment
    env = NodeEnv.from_env(os.environ)
    with fork_server.use_forked_forkserver():
        forkserver.ensure_running()
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    from swarmtrain.entrypoint.supervisor.rank_agent import RankAgent
    from swarmtrain.entrypoint.supervisor.rank_process import run_rank
    from swarmtrain.entrypoint.supervisor.rendezvous_handler import CoordinatorRendezvousHandler

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # torch warns about each stop
    try:
        handler = CoordinatorRendezvousHandler(env, round, advertised_address or socket.getfqdn())
        spec = WorkerSpec(
            role=_ROLE,
            local_world_size=env.slots,
            entrypoint=run_rank,
            rdzv_handler=handler,
            max_restarts=_UNLIMITED_RESTARTS,  # the coordinator has the restart budget
            monitor_interval=0.001,  # RankAgent itself waits for its ranks
        )
        agent = RankAgent(spec, env, handler, compute_shutdown_timeout(env.stop_grace))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, agent.handle_stop_signal)
        agent.run()
        return 0
    except SignalException:
        return EXIT_PLANNED
    except RendezvousClosedError:
        return 1
    except DistError as error:  # the supervisor joins the next round
        sys.stderr.write(f"swarmtrain: this node's agent exited: {type(error).__name__}: {error}\n")
        return 1
    except Exception as error:  # noqa: BLE001  # any error must be reported
        return _report_agent_failure(env, round, error)


def compute_shutdown_timeout(stop_grace: float) -> int:
    """Return the timeout in seconds for ranks to save and exit: less than `stop_grace`, so that the agent can still report the exit."""
    return max(1, int(stop_grace - max(1.0, min(5.0, stop_grace / 5))))


def _report_agent_failure(env: NodeEnv, round: str, error: Exception) -> int:
    """Report why this agent exits, and return its exit code."""
    text = f"{type(error).__name__}: {error}"
    sys.stderr.write(f"swarmtrain: this node's agent exited: {text}" + "\n")
    facts = {"node": env.node, "round": round, "error": text, "exit_code": 1, "traceback": traceback.format_exc()}
    CoordinatorClient(env.coordinator).try_post_event(Event(EVENT_FAILURE, facts))
    return 1
