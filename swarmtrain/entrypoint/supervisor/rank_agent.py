"""torch's elastic agent for ranks that are forked from this process's fork server, by the methods that torch asks a subclass for.

torch's agent asks the rendezvous handler for a world, has the ranks started, and monitors them. When a rank has exited with an error, it is
reported to the coordinator; its siblings run on until the coordinator says that the world is over.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server import RunResult, SimpleElasticAgent, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from swarmtrain.entrypoint.supervisor import fork_server, rank_process
from swarmtrain.entrypoint.supervisor.rank_exit import RankExitDescriber
from swarmtrain.entrypoint.supervisor.rank_output import RankOutput
from swarmtrain.entrypoint.supervisor.rendezvous_handler import CoordinatorRendezvousHandler
from swarmtrain.protocol import ENV_RANK_STORE, ENV_WORLD, EVENT_FAILURE, EVENT_SCRIPT_RETURNED, EXIT_PLANNED, Event, NodeEnv
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_POLL_SECONDS = 0.1
_RESTART_STOP_SECONDS = 30
"""Seconds until ranks are killed after their world is over, as under torchrun."""
_UNANSWERED_SECONDS = 10.0
"""Seconds without a response of the coordinator after which a rank's failure ends the world."""


class RankAgent(SimpleElasticAgent):
    """Elastic agent of the node `env`. `stop_seconds`: seconds until ranks are killed after a stop request."""

    def __init__(self, spec: WorkerSpec, env: NodeEnv, handler: CoordinatorRendezvousHandler, stop_seconds: int) -> None:
        super().__init__(spec)
        self._env, self._handler, self._stop_seconds = env, handler, stop_seconds
        self._coordinator = CoordinatorClient(env.coordinator)
        self._exit_describer = RankExitDescriber()
        self._logs = DefaultLogsSpecs(log_dir=env.log_dir, tee=Std.ALL)
        self._output: RankOutput | None = None
        self._ranks: dict[int, ForkServerProcess] = {}
        self._environments: dict[int, dict[str, str]] = {}
        self._exit_codes: dict[int, int] = {}
        self._failed_at = 0.0
        self._stop_signal: SignalException | None = None

    def handle_stop_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: raise torch's SignalException, so that the agent stops its ranks with this signal."""
        name = signal.Signals(number).name
        self._stop_signal = SignalException(f"process {os.getpid()} received {name}", signal.Signals(number))
        raise self._stop_signal

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of `worker_group`, and return the process id of each local rank."""
        self._environments = {worker.local_rank: self._build_rank_environment(worker, worker_group) for worker in worker_group.workers}
        logs = self._logs.reify(self._environments)
        self._exit_codes, self._ranks = {}, {}
        for local_rank, environment in self._environments.items():
            streams = logs.stdouts[local_rank], logs.stderrs[local_rank]
            process = multiprocessing.get_context("forkserver").Process(
                target=rank_process.run_rank_process, args=(environment, *streams, self._env.numa)
            )
            process.start()
            self._ranks[local_rank] = process
        prefixes = {local_rank: f"[rank {environment['RANK']}] " for local_rank, environment in self._environments.items()}
        self._output = RankOutput(
            {path: (prefixes[rank], target) for target, paths in ((1, logs.stdouts), (2, logs.stderrs)) for rank, path in paths.items()}
        )
        self._output.start()
        return {local_rank: process.pid for local_rank, process in self._ranks.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait up to 0.1 s for a rank to exit, and return the state of the ranks."""
        if self._stop_signal:
            raise self._stop_signal  # it was raised where torch logs and ignores exceptions
        running = [process for rank, process in self._ranks.items() if rank not in self._exit_codes]
        connection.wait([process.sentinel for process in running], timeout=_POLL_SECONDS)
        self._collect_exit_codes()
        failed_ranks = {rank: code for rank, code in self._exit_codes.items() if code}
        has_ended = len(self._exit_codes) == len(self._ranks)
        if not failed_ranks:
            state = WorkerState.SUCCEEDED if has_ended else WorkerState.HEALTHY
            return RunResult(state, {worker.global_rank: None for worker in worker_group.workers} if has_ended else {})
        if not (has_ended or self._handler.is_world_over or time.monotonic() - self._failed_at > _UNANSWERED_SECONDS):
            return RunResult(WorkerState.HEALTHY)
        global_ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        failures = {
            global_ranks[rank]: ProcessFailure(rank, self._ranks[rank].pid or 0, code, self._environments[rank]["TORCHELASTIC_ERROR_FILE"])
            for rank, code in failed_ranks.items()
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop all ranks of a world that is over."""
        self._stop_ranks(signal.SIGTERM, _RESTART_STOP_SECONDS)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int | None = None) -> None:
        """Stop all ranks with `death_sig`, and kill those that have not exited when the time for a stop is over."""
        self._stop_ranks(death_sig, self._stop_seconds)

    def _stop_ranks(self, stop_signal: signal.Signals, timeout: float) -> None:
        self._collect_exit_codes()
        deadline = time.monotonic() + timeout
        remaining = [process for rank, process in self._ranks.items() if rank not in self._exit_codes]
        for process in remaining:
            _send_signals(process, stop_signal, signal.SIGCONT)  # a frozen rank handles no other signal
        while remaining and time.monotonic() < deadline:
            connection.wait([process.sentinel for process in remaining], timeout=deadline - time.monotonic())
            remaining = [process for process in remaining if process.exitcode is None]
        for process in remaining:
            _send_signals(process, signal.SIGKILL)
            process.join()
        self._ranks = {}
        if self._output:
            self._output.stop()
            self._output = None

    def _collect_exit_codes(self) -> None:
        """Collect the exit codes of ranks that have exited, and report them to the coordinator."""
        for local_rank, process in self._ranks.items():
            if local_rank not in self._exit_codes and (code := fork_server.read_rank_exit_code(process)) is not None:
                if code and not any(self._exit_codes.values()):
                    self._failed_at = time.monotonic()
                self._exit_codes[local_rank] = code
                self._report_exit(local_rank, code)

    def _report_exit(self, local_rank: int, exit_code: int) -> None:
        """Report the exit of a rank. Of a failure that the rank itself has reported, the coordinator keeps the rank's report."""
        environment = self._environments[local_rank]
        facts = {"node": self._env.node, "rank": int(environment["RANK"]), "world": environment[ENV_WORLD]}
        if exit_code == 0:
            self._coordinator.try_post_event(Event(EVENT_SCRIPT_RETURNED, facts))
        elif exit_code == EXIT_PLANNED:
            self._handler.end_world()
        else:
            description = self._exit_describer.describe_exit(exit_code, environment["TORCHELASTIC_ERROR_FILE"])
            self._coordinator.try_post_event(Event(EVENT_FAILURE, {**facts, "local_rank": local_rank, **description}))

    def _build_rank_environment(self, worker: Worker, worker_group: WorkerGroup) -> dict[str, str]:
        """Return the environment variables that torchrun sets for a rank, and the key of its world."""
        spec = worker_group.spec
        return {
            "LOCAL_RANK": str(worker.local_rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(worker_group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(worker.world_size),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            # Ranks that use the agent's store find each other under this number, so it must be the same on all nodes.
            "TORCHELASTIC_RESTART_COUNT": str(int(self._handler.world.rpartition("/")[2]) - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ENV_WORLD: self._handler.world,
            ENV_RANK_STORE: self._handler.store_address,
        }


def _send_signals(process: ForkServerProcess, *signals: signal.Signals) -> None:
    for number in signals:
        with suppress(ProcessLookupError, TypeError):
            os.kill(process.pid, number)  # type: ignore[arg-type]  # it has been started
