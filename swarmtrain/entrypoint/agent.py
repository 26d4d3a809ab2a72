"""torch's own elastic agent, with the settings without which it does not survive on a swarm. We write none of our own.

Forked for the node's supervisor, one process a rendezvous round.
Exit codes: 0 all ranks of this node returned, EXIT_PLANNED told to stop, 1 anything else (store lost, round closed …).
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Container
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swarmtrain.board import Board
from swarmtrain.entrypoint import clock, forks, rank
from swarmtrain.entrypoint.usage import own_cgroup
from swarmtrain.errors import BoardError
from swarmtrain.wire import EXIT_PLANNED, FAILURE, NOTE, Event, NodeEnv, world_key

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig
    from torch.numa.binding import NumaOptions

_DEATHS = "torch.distributed.elastic.multiprocessing.api"
_ENDS = "torch.multiprocessing.spawn"
_ENDED_BY_TORCH = "Terminating process"
_ASKED_BY_TORCH = "Closing process"
_AS_WE_WISH = ("death signal", _ENDED_BY_TORCH)  # what torch warns of, and what we asked it to do
_FOR_EVER = 1_000_000
_RENDEZVOUS = {
    "is_host": 0,  # the store is a service of its own; guessed by host name it would be wrong behind a service name
    "join_timeout": 3600,  # waiting for a node that is being repaired is no failure
    "last_call_timeout": 1,  # supervisors let their agents begin together
    "close_timeout": 10,
    "read_timeout": 60,
    "keep_alive_interval": 2,  # together 6 s to notice a dead node; 1 s × 2 splits a world whose nodes merely stall
    "keep_alive_max_attempt": 3,
}


def main(round: str, address: str | None, environment: dict[str, str]) -> int:
    """Run this node's ranks in the rendezvous `round`, with `environment` added to theirs.

    Peers find them at `address`, None for the host name.
    """
    os.environ |= environment
    node = NodeEnv.from_env(os.environ)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the ranks' lines pass through here
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a shared one wedges the second round
    with forks.forked_server():
        forkserver.ensure_running()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher.api import elastic_launch

    with contextlib.suppress(BoardError):  # without the board there is no store either: torch will say so
        clock.agree(Board(node.board))
    logs = _logs(node)
    _log_plainly(DeathReporter(node, logs))
    try:
        elastic_launch(_config(node, round, address, logs), rank.run)()
        return 0
    except Exception as error:  # noqa: BLE001  # whatever it is, it must be told
        gc.disable()  # torch's keep-alive thread must not collect its own timer: it would wait for itself, and print that
        return EXIT_PLANNED if isinstance(error, SignalException) else _give_up(node, round, error)


def _config(node: NodeEnv, round: str, address: str | None, logs: DefaultLogsSpecs) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=node.min_nodes,
        max_nodes=node.max_nodes,
        nproc_per_node=node.slots,
        run_id=round,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint=node.store,
        rdzv_configs=dict(_RENDEZVOUS),
        max_restarts=_FOR_EVER,  # a planned exit is a failure to torch; the budget is the board's
        start_method="forkserver",
        logs_specs=logs,
        log_line_prefix_template="[rank ${rank}] ",
        local_addr=address,
        shutdown_timeout=shutdown_timeout(node.stop_grace),
        numa_options=_numa(node.numa),
    )


def _numa(binding: str) -> NumaOptions | None:
    """Return torch's own binding of ranks to cores; it goes by GPUs, so that without any there is none."""
    import torch
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(binding)) if binding and torch.cuda.is_available() else None


def shutdown_timeout(stop_grace: float) -> int:
    """Return how many seconds the ranks get to save, less than `stop_grace`, so that we live to report the rest."""
    return max(1, int(stop_grace - max(1.0, min(5.0, stop_grace / 5))))


def _logs(node: NodeEnv) -> DefaultLogsSpecs:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    class Logs(DefaultLogsSpecs):
        """Files and prefixed console lines, as torchrun's; remembers the environment that each rank was given."""

        ranks: dict[int, dict[str, str]]

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            self.ranks = envs
            return super().reify(envs)

    logs = Logs(log_dir=node.log_dir, tee=Std.ALL)
    logs.ranks = {}
    return logs


def _log_plainly(deaths: DeathReporter) -> None:
    """Keep torch's own log handler out of this process.

    To print an exception it imports the compiler, seconds of work in the middle of a recovery; and a SIGTERM that arrives
    meanwhile is raised inside the handler, which prints it and goes on: this agent would never end.
    """
    for name in ("torch", "torch.distributed"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [_Lines()]
        logger.propagate = False
    for name in (_DEATHS, _ENDS):
        logging.getLogger(name).addHandler(deaths)
    logging.getLogger(_DEATHS).propagate = False  # the rank has printed its traceback already


class _Lines(logging.StreamHandler[TextIO]):
    """Prints to standard error, and lets the exception through by which torch learns that it is to stop."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        told_to_stop = record.exc_info[1] if record.exc_info else None
        if type(told_to_stop).__name__ == "SignalException" and told_to_stop is not None:
            raise told_to_stop  # torch was about to print it and go on
        if not any(words in record.msg for words in _AS_WE_WISH):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging names it
        if type(sys.exc_info()[1]).__name__ == "SignalException":
            raise  # noqa: PLE0704  # called from an except block
        super().handleError(record)


class DeathReporter(logging.Handler):
    """Posts the ranks' deaths that torch's agent logs: one killed by a signal cannot say so itself. Wakes those that are to end.

    The board drops what the rank had already said better. Of ranks that are dead by the time that torch looks, it logs but
    one, often a peer that stumbled over the death of another: so all are posted that had not to be ended by torch.
    """

    def __init__(self, node: NodeEnv, logs: Any) -> None:
        super().__init__(logging.WARNING)
        self.node = node
        self.logs = logs
        self.cgroup = own_cgroup()
        self.oom_kills = self.cgroup.oom_kills() if self.cgroup else 0
        self.ended: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if not isinstance(record.args, tuple):
            return
        if str(record.msg).startswith(_ENDED_BY_TORCH) and isinstance(record.args[0], int):
            self.ended.add(record.args[0])
        if str(record.msg).startswith(_ASKED_BY_TORCH) and isinstance(record.args[0], int):
            # A rank that was stopped would not hear SIGTERM, and torch would wait 30 s for it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.args[0], signal.SIGCONT)
        if str(record.msg).startswith("failed (exitcode"):
            for local_rank, code in _deaths(record, self.ended).items():
                self._tell(local_rank, code)
            self.ended.clear()

    def _tell(self, local_rank: int, code: int) -> None:
        if code in (0, EXIT_PLANNED):
            return
        environ = self.logs.ranks[local_rank]
        facts = {"node": self.node.node, "rank": int(environ["RANK"]), "local_rank": local_rank, "world": world_key(environ)}
        cause = _cause(code, environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if cause.get("signal") == "SIGKILL" and self.cgroup and self.cgroup.oom_kills() > self.oom_kills:
            self.oom_kills = self.cgroup.oom_kills()
            cause |= out_of_memory(self.cgroup.memory_limit())
        _post(self.node, Event(FAILURE, {**facts, **cause}))


def _deaths(record: logging.LogRecord, ended: Container[int]) -> dict[int, int]:
    """Return local rank → exit code of the rank that torch logs, and of all others that are dead and not `ended` by it."""
    found = {}
    if record.exc_info and record.exc_info[2]:
        # torch's own account of its processes is not to be had otherwise; without it, there is what it logs.
        context = getattr(record.exc_info[2].tb_frame.f_locals.get("self"), "_pc", None)
        found = {number: process.exitcode for number, process in enumerate(getattr(context, "processes", ())) if process.pid not in ended}
    match record.args:
        case (int(code), int(local_rank), *_):
            found[local_rank] = code
    return {local_rank: code for local_rank, code in found.items() if code is not None}


def out_of_memory(limit: int | None) -> dict[str, Any]:
    """Describe a death for which the kernel has counted a kill; `limit` is what the container may use, in bytes."""
    whose = f"its container's limit of {limit / 2**30:.2f} GiB" if limit else "the machine's memory"
    return {"error": f"killed by SIGKILL: the kernel had no memory left for it, within {whose}", "oom": True}


def _cause(code: int, error_file: str) -> dict[str, Any]:
    if code < 0:
        name = _signal_name(-code)
        hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
        return {"signal": name, "error": f"killed by {name}{hint}"}
    try:
        message = json.loads(Path(error_file).read_text(encoding="utf-8"))["message"]
        return {"exit_code": code, "error": message["message"], "traceback": message["extraInfo"]["py_callstack"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {"exit_code": code, "error": f"exit code {code}"}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _give_up(node: NodeEnv, round: str, error: Exception) -> int:
    """Tell why this agent ends. A lost or closed rendezvous is no fault of the job's: the supervisor draws a new round."""
    from torch.distributed.elastic.rendezvous import RendezvousError

    text = f"{type(error).__name__}: {error}"
    sys.stderr.write(f"swarmtrain: this node's agent ended: {text}" + "\n")
    if isinstance(error, RendezvousError):
        _post(node, Event(NOTE, {"node": node.node, "message": f"left rendezvous round {round}: {text}"}))
    else:
        trace = traceback.format_exc()
        _post(node, Event(FAILURE, {"node": node.node, "round": round, "error": text, "exit_code": 1, "traceback": trace}))
    return 1


def _post(node: NodeEnv, event: Event) -> None:
    try:
        Board(node.board).post(event)
    except BoardError as error:
        sys.stderr.write(f"swarmtrain: could not post `{event.kind}`: {error}" + "\n")
