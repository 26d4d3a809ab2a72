"""The supervisor of a node: the parent process of torch's elastic agent; decides what happens after the agent exits.

Every launcher starts it as `python -m swarmtrain.entrypoint node`. Standard library only. Swarm's `restart_policy: on-failure` restarts
the node after every exit code except 0:

    0             this node is done, or the run has an outcome
    EXIT_PLANNED  stop requested (SIGTERM): a removed service stays removed whatever the exit code, but a task that only received a signal
                  (`docker kill`, a restarting engine) must be restarted
    1             the coordinator could not be reached in time; a restart may succeed
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from multiprocessing.context import ForkServerProcess
from types import FrameType

from swarmtrain.entrypoint import assigned_gpus, supervisor_watchdog
from swarmtrain.entrypoint.disk_space import list_written_folders
from swarmtrain.entrypoint.gpu_count import find_gpu_count_problem
from swarmtrain.entrypoint.network_interface import Route, choose_advertised_address, choose_route
from swarmtrain.entrypoint.preflight_checks import compute_threads_per_rank, find_node_warnings, find_permanent_problems
from swarmtrain.entrypoint.resource_usage import UsageReporter
from swarmtrain.entrypoint.supervisor import fork_server
from swarmtrain.entrypoint.supervisor.elastic_agent import run_agent
from swarmtrain.entrypoint.supervisor.rank_exit import format_signal
from swarmtrain.errors import EXIT_ERROR, EXIT_OK, CoordinatorError
from swarmtrain.process import raise_open_file_limit
from swarmtrain.protocol import (
    ENV_PREFIX,
    ENV_RUN_ID,
    EVENT_FAILURE,
    EVENT_NODE_JOINED,
    EVENT_NOTE,
    EXIT_PLANNED,
    PERMANENT_BEFORE_FIRST_STEP,
    Event,
    NodeEnv,
    SupervisorResponse,
)
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_HEARTBEAT_SECONDS = 1.0
_RETRY_SECONDS = 0.3
_COORDINATOR_TIMEOUT_SECONDS = 600.0  # the rendezvous service may still be pulling its image
_COORDINATOR_RESTART_SECONDS = 300.0  # a swarm needs a minute to notice that a manager is lost, and to start its services elsewhere
_EXIT_REPORT_SECONDS = 15.0
_FAILURE_GRACE_SECONDS = 10.0  # a failed run has nothing new to save; a script may wait for lost peers
_NO_RANKS_GRACE_SECONDS = 3.0  # an agent without ranks has nothing to save; if it hangs on a lost store, it ignores signals
_DONE_GRACE_SECONDS = 330.0  # torch's agents wait up to 300 s for each other at their end
_STABLE_AGENT_SECONDS = 30.0
_MAX_BACKOFF_SECONDS = 15.0
_ISOLATION_TIMEOUT_SECONDS = 90.0  # then the node counts as partitioned; a restarted coordinator answers sooner


def main() -> int:
    """Run this node's supervisor until the run is over or a stop is requested. Return the exit code."""
    try:
        env = NodeEnv.from_env(os.environ)
    except ValueError as error:
        return _report_invalid_environment(str(error))
    supervisor_watchdog.start_heartbeat_watchdog()
    raise_open_file_limit()
    os.environ |= _build_torch_environment(env)
    fork_server.preload_forkserver()
    return Supervisor(env).run()


class Supervisor:
    """Supervisor of one node of a run. It runs at most one agent at a time, and outlives each agent."""

    def __init__(
        self, env: NodeEnv, *, heartbeat_interval: float = _HEARTBEAT_SECONDS, isolation_timeout: float = _ISOLATION_TIMEOUT_SECONDS
    ) -> None:
        """Create the supervisor of the node that `env` describes.

        `heartbeat_interval`: seconds between heartbeats. `isolation_timeout`: seconds without a response of the coordinator until the
        agent is stopped.
        """
        self.env, self.heartbeat_interval, self.isolation_timeout = env, heartbeat_interval, isolation_timeout
        self.coordinator = CoordinatorClient(env.coordinator)
        self.agent: ForkServerProcess | None = None
        self.is_stopping = False
        self.has_stop_signal = False
        self.agent_stop_requested = False
        self.kill_agent_at = float("inf")
        self.backoff = 0.0
        self.last_response_at = time.monotonic()

    def run(self) -> int:
        """Run agents, one per round, until the run is over, this node is done, or a stop is requested. Return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_stop_signal)
        try:
            return self._run_node()
        except _StopRequested:
            self._report_exit(EXIT_PLANNED)
            return EXIT_PLANNED
        except CoordinatorError as error:
            _log_message(f"{error}; exiting, to be restarted")
            return EXIT_ERROR

    def _run_node(self) -> int:
        self.coordinator.wait_until_reachable(_COORDINATOR_TIMEOUT_SECONDS)
        if problems := find_permanent_problems(self.env):
            return self._report_problems("; ".join(problems), permanent=True)
        if problem := find_gpu_count_problem(os.environ):
            return self._report_problems(problem, permanent=PERMANENT_BEFORE_FIRST_STEP)
        route = self._announce_node()
        fork_server.wait_for_preload()  # wait before registering: from then on the coordinator expects heartbeats
        self.coordinator.register_node(self.env.node)
        UsageReporter(self.coordinator, self.env.node, folders=list_written_folders(self.env.config)).start()
        response = self._wait_for_next_round("")
        while response.outcome is None:
            code = self._run_round(response.round, response.run_id, route)
            if code == EXIT_OK:
                break
            if self.is_stopping:
                raise _StopRequested
            response = self._wait_for_next_round(response.round)
        self.is_stopping = True  # from now on a signal has no effect
        self._report_exit(EXIT_OK)
        return EXIT_OK

    def _report_problems(self, error: str, *, permanent: bool | str) -> int:
        """Report problems that a restart of this node cannot fix, and its exit. Return the exit code with which it is not restarted.

        `permanent`: whether they end the run, too, as in a failure event.
        """
        _log_message(error)
        self.coordinator.post_event(
            Event(EVENT_FAILURE, {"node": self.env.node, "error": error, "exit_code": EXIT_ERROR, "permanent": permanent})
        )
        self.is_stopping = True  # a signal only ends the wait until the run is over
        self._report_exit(EXIT_ERROR)
        return EXIT_OK

    def _announce_node(self) -> Route:
        try:
            route = choose_route(self.env.interface, self.env.coordinator)
        except OSError as error:
            raise CoordinatorError(str(error), place=f"coordinator {self.env.coordinator}") from None
        facts = {"host": socket.gethostname(), "address": route.address, "interface": route.interface, "slots": self.env.slots}
        self.coordinator.post_event(Event(EVENT_NODE_JOINED, {"node": self.env.node, **facts}))
        for message in find_node_warnings(self.env):
            self.coordinator.post_event(Event(EVENT_NOTE, {"node": self.env.node, "message": message}))
        return route

    def _run_round(self, round: str, run_id: str, route: Route) -> int:
        """Run one agent for the round `round`, and return its exit code (negative: killed by that signal)."""
        started_at = time.monotonic()
        environment = {**route.build_interface_environment(os.environ), ENV_RUN_ID: run_id}
        self.agent_stop_requested, self.kill_agent_at, self.last_response_at = False, float("inf"), time.monotonic()
        self.agent = fork_server.start_forked_process("agent", run_agent, round, choose_advertised_address(route), environment)
        try:
            code = self._wait_for_agent(self.agent, round)
        finally:
            self._kill_leftover_processes(self.agent)
            self.agent = None
        if code < 0 and not self.agent_stop_requested:
            self._report_agent_killed(round, -code)
        self.backoff = 0.0 if time.monotonic() - started_at > _STABLE_AGENT_SECONDS else min(_MAX_BACKOFF_SECONDS, self.backoff * 2 + 0.5)
        return code

    def _wait_for_agent(self, agent: ForkServerProcess, round: str) -> int:
        while (code := fork_server.wait_for_exit_code(agent, self.heartbeat_interval)) is None:
            self._send_heartbeat(agent, round)
        return code

    def _send_heartbeat(self, agent: ForkServerProcess, round: str) -> None:
        if time.monotonic() > self.kill_agent_at:
            fork_server.kill_process_group(agent)
        elif self.agent_stop_requested and not fork_server.has_rank_processes(agent):
            self.kill_agent_at = min(self.kill_agent_at, time.monotonic() + _NO_RANKS_GRACE_SECONDS)
        try:
            response = self.coordinator.send_heartbeat(self.env.node)
        except CoordinatorError as error:
            self._handle_missed_response(agent, error)
            return
        self.last_response_at = time.monotonic()
        if response.outcome and response.outcome.is_success:
            self.kill_agent_at = min(self.kill_agent_at, time.monotonic() + _DONE_GRACE_SECONDS)
        elif response.outcome:
            self._stop_agent(agent, _FAILURE_GRACE_SECONDS)
        elif response.round != round:
            # The other nodes have closed this round, so it cannot form a world again: save, and join them in the new round.
            self._stop_agent(agent, self.env.stop_grace)

    def _handle_missed_response(self, agent: ForkServerProcess, error: CoordinatorError) -> None:
        """Handle a heartbeat to which the coordinator, which may be restarting, did not respond.

        A node that is partitioned from the coordinator must not keep training after the other nodes have restarted.
        """
        if time.monotonic() - self.last_response_at > self.isolation_timeout and self.kill_agent_at == float("inf"):
            _log_message(
                f"{error}; no response for {self.isolation_timeout:.0f} s: this node may be partitioned, and stops until the coordinator "
                f"responds"
            )
            self._stop_agent(agent, self.env.stop_grace)

    def _stop_agent(self, agent: ForkServerProcess, grace: float) -> None:
        """Send a stop request to the agent, once, and schedule its kill after `grace` seconds, within the node's own grace period."""
        if not self.agent_stop_requested:
            self.agent_stop_requested = True
            self.kill_agent_at = time.monotonic() + max(1.0, min(grace, self.env.stop_grace) - 1.0)
            agent.terminate()

    def _kill_leftover_processes(self, agent: ForkServerProcess) -> None:
        """Kill all processes that the agent leaves behind: forkserver, ranks, and their descendants."""
        fork_server.kill_process_group(agent)
        agent.join()

    def _report_agent_killed(self, round: str, signal_number: int) -> None:
        name = format_signal(signal_number)
        error = f"this node's agent was killed by {name}"
        _log_message(error)
        self.coordinator.try_post_event(Event(EVENT_FAILURE, {"node": self.env.node, "round": round, "signal": name, "error": error}))

    def _wait_for_next_round(self, round: str) -> SupervisorResponse:
        """Wait for a round other than `round` to start, or for the outcome, and return the response.

        Raises CoordinatorError if the coordinator stays unreachable.
        """
        time.sleep(self.backoff)
        while True:
            self.coordinator.wait_until_reachable(_COORDINATOR_RESTART_SECONDS)
            try:
                response = self.coordinator.report_round_closed(self.env.node, round)
            except CoordinatorError:
                continue
            if response.outcome or (response.round != round and not response.wait):
                return response
            time.sleep(_RETRY_SECONDS)  # others are still arriving or finishing, or this node is quarantined

    def _report_exit(self, exit_code: int) -> None:
        """Report to the coordinator that this node exits, and if the run has an outcome, wait until it is over.

        That takes at most 5 s. If the coordinator is lost meanwhile, the one that replaces it learns the outcome from this node. If the
        coordinator stays unreachable, this is only logged.
        """
        self.last_response_at = time.monotonic()
        while True:
            try:
                response = self.coordinator.report_node_exit(self.env.node, exit_code)
            except CoordinatorError as error:
                if time.monotonic() - self.last_response_at >= self._choose_report_seconds(exit_code):
                    _log_message(f"could not report its exit: {error}")
                    return
            else:
                self.last_response_at = time.monotonic()
                if exit_code == EXIT_PLANNED or response.outcome is None or response.is_over or self.has_stop_signal:
                    return
            time.sleep(_RETRY_SECONDS)

    def _choose_report_seconds(self, exit_code: int) -> float:
        """Return for how many seconds to try to report an exit while the coordinator is unreachable."""
        if self.coordinator.knows_outcome:
            return 0.0 if self.has_stop_signal else _COORDINATOR_RESTART_SECONDS
        return _HEARTBEAT_SECONDS if exit_code == EXIT_PLANNED else _EXIT_REPORT_SECONDS

    def _handle_stop_signal(self, signal_number: int, frame: FrameType | None) -> None:
        self.has_stop_signal = True
        if self.is_stopping:
            return
        self.is_stopping = True
        if self.agent is None:
            raise _StopRequested
        self._stop_agent(self.agent, self.env.stop_grace)


class _StopRequested(BaseException):
    """Raised at SIGTERM while no agent runs, when there is nothing to save.

    It is a BaseException, so that `except Exception` does not swallow it.
    """


def _build_torch_environment(env: NodeEnv) -> dict[str, str]:
    """Return the environment variables that must be set before torch is imported."""
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(compute_threads_per_rank(env.slots))}
    return {**threads, **assigned_gpus.build_gpu_environment(os.environ)}


def _report_invalid_environment(error: str) -> int:
    """Report an environment that cannot be parsed to the coordinator, if its address can be parsed. Return the exit code."""
    _log_message(error)
    address = os.environ.get(ENV_PREFIX + "COORDINATOR")
    if address is None:
        return EXIT_ERROR
    node_name = os.environ.get(ENV_PREFIX + "NODE", "a node")
    try:
        coordinator = CoordinatorClient(address)
        coordinator.wait_until_reachable(_COORDINATOR_TIMEOUT_SECONDS)
        coordinator.post_event(Event(EVENT_FAILURE, {"node": node_name, "error": error, "exit_code": EXIT_ERROR, "permanent": True}))
    except CoordinatorError as unreachable:
        _log_message(str(unreachable))
        return EXIT_ERROR
    return EXIT_OK


def _log_message(message: str) -> None:
    sys.stderr.write(f"swarmtrain: {message}\n")
    sys.stderr.flush()
