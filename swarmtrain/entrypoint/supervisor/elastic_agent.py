"""Runs torch's own elastic agent with settings for a swarm.

The process is forked from the node's supervisor, one per rendezvous round. Exit codes: 0 if all ranks of this node returned,
EXIT_PLANNED if a stop was requested, 1 otherwise (store lost, round closed …).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Container
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swarmtrain.entrypoint.resource_usage import find_container_cgroup
from swarmtrain.entrypoint.supervisor import coordinator_clock, fork_server, rank_process
from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import EVENT_FAILURE, EVENT_NOTE, EXIT_PLANNED, Event, NodeEnv, build_world_key
from swarmtrain.protocol.coordinator_client import CoordinatorClient

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig
    from torch.numa.binding import NumaOptions

_PROCESS_LOGGER = "torch.distributed.elastic.multiprocessing.api"
_SPAWN_LOGGER = "torch.multiprocessing.spawn"
_TERMINATING_MESSAGE = "Terminating process"
_CLOSING_MESSAGE = "Closing process"
_EXPECTED_WARNINGS = ("death signal", _TERMINATING_MESSAGE)  # torch warns about stops that we requested
_UNLIMITED_RESTARTS = 1_000_000
_RENDEZVOUS_SETTINGS = {
    "join_timeout": 3600,  # waiting for a node that is being repaired is not a failure
    "last_call_timeout": 1,  # supervisors start their agents together
    "close_timeout": 10,
    "read_timeout": 60,
    "keep_alive_interval": 2,  # a dead node is detected after 6 s; with 1 s × 2, a node that only stalls counts as dead
    "keep_alive_max_attempt": 3,
}


def run_agent(round: str, advertised_address: str | None, environment: dict[str, str]) -> int:
    """Run this node's ranks in the rendezvous round `round`, with `environment` added to their environment. Return the exit code.

    Peers find the ranks at `advertised_address`, or by the host name if `advertised_address` is None.
    """
    os.environ |= environment
    env = NodeEnv.from_env(os.environ)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the ranks' lines pass through here
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a shared store deadlocks the second round
    with fork_server.use_forked_forkserver():
        forkserver.ensure_running()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher.api import elastic_launch

    from swarmtrain.entrypoint.supervisor.coordinator_rendezvous import register_rendezvous_backend

    register_rendezvous_backend()
    with contextlib.suppress(CoordinatorError):  # without the coordinator there is no store either, which torch will report
        coordinator_clock.use_coordinator_clock(CoordinatorClient(env.coordinator))
    make_node_identity_unique()
    logs = _build_logs_specs(env)
    _replace_log_handlers(DeathReporter(env, logs))
    try:
        elastic_launch(_build_launch_config(env, round, advertised_address, logs), rank_process.run_rank)()
        return 0
    except Exception as error:  # noqa: BLE001  # any error must be reported
        gc.disable()  # torch's keep-alive thread must not collect its own timer, which would wait for that thread
        return EXIT_PLANNED if isinstance(error, SignalException) else _report_agent_failure(env, round, error)


def make_node_identity_unique() -> None:
    """Give this process a node identity in torch's rendezvous that no other process has had.

    torch identifies a node by its address, its process id and a counter that starts at 0. In a restarted container, address and process id
    are those of its predecessor. As long as the rendezvous still lists the predecessor, the new agent would count as a member of its world
    and start ranks without waiting for the other nodes, which then restart theirs, even if these have already returned.
    """
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    # torch has no public access to the counter.
    DynamicRendezvousHandler._node_desc_generator._local_id = secrets.randbits(48)


def _build_launch_config(env: NodeEnv, round: str, advertised_address: str | None, logs_specs: DefaultLogsSpecs) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    from swarmtrain.entrypoint.supervisor.coordinator_rendezvous import BACKEND_NAME

    return LaunchConfig(
        min_nodes=env.min_nodes,
        max_nodes=env.max_nodes,
        nproc_per_node=env.slots,
        run_id=round,
        role="rank",
        rdzv_backend=BACKEND_NAME,
        rdzv_endpoint=env.coordinator,
        rdzv_configs=dict(_RENDEZVOUS_SETTINGS),
        max_restarts=_UNLIMITED_RESTARTS,  # torch counts a planned exit as a failure; the coordinator has the restart budget
        start_method="forkserver",
        logs_specs=logs_specs,
        log_line_prefix_template="[rank ${rank}] ",
        local_addr=advertised_address,
        numa_options=_build_numa_options(env.numa),
        **build_shutdown_setting(LaunchConfig, compute_shutdown_timeout(env.stop_grace)),
    )


def build_shutdown_setting(launch_config_class: type[Any], timeout: int) -> dict[str, Any]:
    """Return the arguments of `launch_config_class`, torch's LaunchConfig, for a shutdown that takes at most `timeout` seconds.

    Older versions of torch have no such argument, and use the default of a method, which is changed in this process.
    """
    if "shutdown_timeout" in launch_config_class.__dataclass_fields__:
        return {"shutdown_timeout": timeout}
    from torch.distributed.elastic.multiprocessing import PContext

    PContext.close.__defaults__ = (None, timeout)
    return {}


def _build_numa_options(binding: str) -> NumaOptions | None:
    """Return torch's options for NUMA binding of ranks by their GPUs; None without GPUs, or if `binding` is empty."""
    import torch
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(binding)) if binding and torch.cuda.is_available() else None


def compute_shutdown_timeout(stop_grace: float) -> int:
    """Return the timeout in seconds for ranks to save and exit: less than `stop_grace`, so that the agent can still report the exit."""
    return max(1, int(stop_grace - max(1.0, min(5.0, stop_grace / 5))))


def _build_logs_specs(env: NodeEnv) -> DefaultLogsSpecs:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class RankLogsSpecs(DefaultLogsSpecs):
        """Logs of the ranks: their log files and prefixed console lines, as torchrun writes them.

        Also stores the environment of each rank.
        """

        environment_by_local_rank: dict[int, dict[str, str]]

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            self.environment_by_local_rank = envs
            return super().reify(envs)

    logs = RankLogsSpecs(log_dir=env.log_dir, tee=Std.ALL)
    logs.environment_by_local_rank = {}
    return logs


def _replace_log_handlers(death_reporter: DeathReporter) -> None:
    """Replace torch's own log handler in this process.

    To print an exception, torch's handler imports the compiler, which takes seconds during a recovery. If a SIGTERM arrives in that time,
    its exception is raised inside the handler, which prints it and continues: this agent would never exit.
    """
    for name in ("torch", "torch.distributed"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [_PlainLogHandler()]
        logger.propagate = False
    for name in (_PROCESS_LOGGER, _SPAWN_LOGGER):
        logging.getLogger(name).addHandler(death_reporter)
    logging.getLogger(_PROCESS_LOGGER).propagate = False  # the rank has printed its traceback already


class _PlainLogHandler(logging.StreamHandler[TextIO]):
    """Log handler that prints to standard error, but re-raises the exception by which torch requests a stop."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        stop_exception = record.exc_info[1] if record.exc_info else None
        if type(stop_exception).__name__ == "SignalException" and stop_exception is not None:
            raise stop_exception  # torch was about to print it and continue
        if not any(expected in record.msg for expected in _EXPECTED_WARNINGS):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging defines the name
        if type(sys.exc_info()[1]).__name__ == "SignalException":
            raise  # noqa: PLE0704  # called from an except block
        super().handleError(record)


class DeathReporter(logging.Handler):
    """Log handler that posts rank deaths, which torch's agent logs, to the coordinator: a rank killed by a signal cannot report its death.

    Of several ranks that are dead when torch checks, torch logs only one, often a peer that failed because of another rank's death. So the
    deaths of all ranks are posted, except of those that torch terminated. The coordinator drops a death that the rank itself has already
    reported in more detail.

    The handler also resumes frozen ranks (SIGSTOP) that torch is about to stop.
    """

    def __init__(self, env: NodeEnv, logs_specs: Any) -> None:
        super().__init__(logging.WARNING)
        self.env = env
        self.logs = logs_specs
        self.cgroup = find_container_cgroup()
        self.oom_kills = self.cgroup.read_oom_kill_count() if self.cgroup else 0
        self.terminated_pids: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple):
            return
        if str(record.msg).startswith(_TERMINATING_MESSAGE) and isinstance(record.args[0], int):
            self.terminated_pids.add(record.args[0])
        if str(record.msg).startswith(_CLOSING_MESSAGE) and isinstance(record.args[0], int):
            # A frozen rank (SIGSTOP) would not handle SIGTERM, and torch would wait 30 s for it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.args[0], signal.SIGCONT)
        if str(record.msg).startswith("failed (exitcode"):
            for local_rank, code in _collect_exit_codes(record, self.terminated_pids).items():
                self._report_rank_death(local_rank, code)
            self.terminated_pids.clear()

    def _report_rank_death(self, local_rank: int, exit_code: int) -> None:
        if exit_code in (0, EXIT_PLANNED):
            return
        environ = self.logs.environment_by_local_rank[local_rank]
        facts = {"node": self.env.node, "rank": int(environ["RANK"]), "local_rank": local_rank, "world": build_world_key(environ)}
        cause = _describe_rank_exit(exit_code, environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if cause.get("signal") == "SIGKILL" and self.cgroup and self.cgroup.read_oom_kill_count() > self.oom_kills:
            self.oom_kills = self.cgroup.read_oom_kill_count()
            cause |= describe_out_of_memory(self.cgroup.read_memory_limit())
        CoordinatorClient(self.env.coordinator).try_post_event(Event(EVENT_FAILURE, {**facts, **cause}))


def _collect_exit_codes(record: logging.LogRecord, terminated_pids: Container[int]) -> dict[int, int]:
    """Return by local rank the exit codes of the rank that torch logs and of all other dead ranks, except those in `terminated_pids`."""
    exit_codes = {}
    if record.exc_info and record.exc_info[2]:
        # torch has no public access to its processes. If this fails, only the logged rank is reported.
        context = getattr(record.exc_info[2].tb_frame.f_locals.get("self"), "_pc", None)
        exit_codes = {
            number: process.exitcode
            for number, process in enumerate(getattr(context, "processes", ()))
            if process.pid not in terminated_pids
        }
    match record.args:
        case (int(code), int(local_rank), *_):
            exit_codes[local_rank] = code
    return {local_rank: code for local_rank, code in exit_codes.items() if code is not None}


def describe_out_of_memory(memory_limit: int | None) -> dict[str, Any]:
    """Return the failure event fields of a rank that the OOM killer killed. `memory_limit`: container memory limit in bytes."""
    memory_scope = f"its container's limit of {memory_limit / 2**30:.2f} GiB" if memory_limit else "the machine's memory"
    return {"error": f"killed by SIGKILL: out of memory within {memory_scope}", "oom": True}


def _describe_rank_exit(exit_code: int, error_file: str) -> dict[str, Any]:
    if exit_code < 0:
        name = _format_signal(-exit_code)
        hint = " (out of memory, or killed manually)" if name == "SIGKILL" else ""
        return {"signal": name, "error": f"killed by {name}{hint}"}
    try:
        message = json.loads(Path(error_file).read_text(encoding="utf-8"))["message"]
        return {"exit_code": exit_code, "error": message["message"], "traceback": message["extraInfo"]["py_callstack"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {"exit_code": exit_code, "error": f"exit code {exit_code}"}


def _format_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _report_agent_failure(env: NodeEnv, round: str, error: Exception) -> int:
    """Report why this agent exits, and return its exit code.

    A lost or closed rendezvous is not a failure of the job: the supervisor joins a new round.
    """
    from torch.distributed.elastic.rendezvous import RendezvousError

    text = f"{type(error).__name__}: {error}"
    sys.stderr.write(f"swarmtrain: this node's agent exited: {text}" + "\n")
    if isinstance(error, RendezvousError):
        CoordinatorClient(env.coordinator).try_post_event(
            Event(EVENT_NOTE, {"node": env.node, "message": f"left rendezvous round {round}, and joins the next one"})
        )
    else:
        trace = traceback.format_exc()
        CoordinatorClient(env.coordinator).try_post_event(
            Event(EVENT_FAILURE, {"node": env.node, "round": round, "error": text, "exit_code": 1, "traceback": trace})
        )
    return 1
