"""Process of one rank: runs the user's script as torchrun would, and reports to the coordinator how it ended.

Called in a process that the node's agent (rank_agent) forks from its forkserver. The script sees torchrun's environment (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR …) and swarmtrain's (SWARMTRAIN_COORDINATOR, SWARMTRAIN_CONFIG …). The script need not import swarmtrain.
"""

from __future__ import annotations

import atexit
import functools
import io
import multiprocessing.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swarmtrain.entrypoint.supervisor.numa_binding import bind_to_gpu
from swarmtrain.entrypoint.supervisor.process_group_watch import ProcessGroupWatch
from swarmtrain.errors import SwarmtrainError
from swarmtrain.process import set_parent_death_signal, set_process_name
from swarmtrain.protocol import (
    ENV_WORLD,
    EVENT_FAILURE,
    EVENT_WORLD_FORMED,
    EXIT_PLANNED,
    PERMANENT_BEFORE_FIRST_STEP,
    Event,
    NodeEnv,
)
from swarmtrain.protocol.coordinator_client import CoordinatorClient

_MAX_TRACEBACK_LENGTH = 16_000
_MAX_ERROR_LENGTH = 500
_BRIEF_ERROR_LENGTH = 80


def run_rank_process(environment: Mapping[str, str], stdout: str, stderr: str, numa: str) -> None:
    """Run a rank with the variables `environment`, and with its output in the files `stdout` and `stderr`, to its end.

    `numa`: mode of the binding to CPUs near its GPU; empty: none. The exit code is that of the user's script.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    os.environ |= environment
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    try:
        record(run_rank)(numa)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001  # run_rank has reported it
        raise SystemExit(1) from None


def run_rank(numa: str = "") -> None:
    """Run the user's script to its end. A failure, including any nonzero exit code, is posted to the coordinator and re-raised.

    `numa`: as in `run_rank_process`.
    """
    set_parent_death_signal()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored in the forkserver that this process is forked from
    set_process_name(f"rank {os.environ['RANK']}")
    env = NodeEnv.from_env(os.environ)
    _enable_line_buffering()
    _reseed_numpy()
    _keep_process_groups_alive()
    try:
        if numa:
            bind_to_gpu(numa, int(os.environ["LOCAL_RANK"]))
        ProcessGroupWatch(env).start()
        if os.environ["LOCAL_RANK"] == "0":
            CoordinatorClient(env.coordinator).try_post_event(build_world_event(env))
        _run_script(env)
    except SystemExit as system_exit:
        code = resolve_exit_code(system_exit)
        if code not in (0, EXIT_PLANNED):
            error = system_exit.code if isinstance(system_exit.code, str) else f"exit code {code}"
            CoordinatorClient(env.coordinator).try_post_event(build_failure_event(env, error=error, exit_code=code))
        if code:
            raise
    except BaseException as error:
        _report_error(env, error)
        raise
    finally:
        _run_atexit_functions()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the script's own handler could keep this process alive for 30 s


def build_world_event(env: NodeEnv) -> Event:
    """Return the event that reports a formed world, with this node's ranks. The coordinator merges the events of all nodes into one."""
    first, count = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return Event(
        EVENT_WORLD_FORMED,
        {
            "world": os.environ[ENV_WORLD],
            "world_size": int(os.environ["WORLD_SIZE"]),
            "nodes": int(os.environ["GROUP_WORLD_SIZE"]),
            "ranks": {env.node: list(range(first, first + count))},
        },
    )


def build_failure_event(env: NodeEnv, **facts: Any) -> Event:
    """Return the failure event of this rank."""
    rank_fields = {"node": env.node, "rank": int(os.environ["RANK"]), "local_rank": int(os.environ["LOCAL_RANK"])}
    return Event(EVENT_FAILURE, {**rank_fields, "world": os.environ[ENV_WORLD], **facts})


def resolve_exit_code(system_exit: SystemExit) -> int:
    """Return the process exit code for `system_exit`, as the interpreter would choose it."""
    if system_exit.code is None:
        return 0
    return system_exit.code & 0xFF if isinstance(system_exit.code, int) else 1


def classify_error_permanence(error: BaseException, code_folder: str) -> bool | str:
    """Return whether the error recurs on a retry: True, PERMANENT_BEFORE_FIRST_STEP, or False if that is unknown."""
    if isinstance(error, SyntaxError):
        return error.filename is not None and _get_name_of_user_file(error.filename, code_folder) is not None
    if isinstance(error, SwarmtrainError):
        return PERMANENT_BEFORE_FIRST_STEP if error.is_permanent is None else error.is_permanent
    return isinstance(error, ImportError)


def _run_script(env: NodeEnv) -> None:
    sys.argv = [env.module or env.script, *env.script_args]
    code_folder = Path(env.code_folder).absolute()
    if env.module:
        sys.path[:0] = [str(code_folder), str(Path.cwd())]  # python -m searches the working folder
        runpy.run_module(env.module, run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = dict.fromkeys([str(Path(env.script).absolute().parent), str(code_folder)])
        runpy.run_path(env.script, run_name="__main__")


def _report_error(env: NodeEnv, error: BaseException) -> None:
    """Post an error to the coordinator, and print it unless another rank has already reported it."""
    if isinstance(error, SwarmtrainError):
        reason, trace, full_text = str(error).replace("\n", "; "), "", error.plain_text
    else:
        reason, trace = _summarize_error(error) + _locate_error_in_user_code(error, env.code_folder), _format_traceback(error)
        full_text = trace
    facts = {"error": reason[:_MAX_ERROR_LENGTH], "exit_code": 1, "traceback": trace[-_MAX_TRACEBACK_LENGTH:]}
    if hint := _build_error_hint(error):
        facts["hint"] = hint
    if isinstance(error, SwarmtrainError) and error.rank is not None:
        facts["failed_rank"] = error.rank
    if (step := getattr(error, "step", None)) is not None:
        facts["step"] = step
    if (permanence := classify_error_permanence(error, env.code_folder)) or isinstance(error, SwarmtrainError):
        facts["permanent"] = permanence
    response = CoordinatorClient(env.coordinator).try_post_event(build_failure_event(env, **facts))
    sys.stderr.write(f"exits after another rank failed: {reason[:_BRIEF_ERROR_LENGTH]}\n" if response.is_known else full_text)


def _build_error_hint(error: BaseException) -> str | None:
    if isinstance(error, SwarmtrainError):
        return error.hint
    return "install it in the image; list your own files in runner.code" if isinstance(error, ImportError) else None


def _enable_line_buffering() -> None:
    """Write each line to the log with one write call, as soon as it is complete, even if PYTHONUNBUFFERED is set."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _reseed_numpy() -> None:
    """Reseed NumPy's global generator. It was seeded in the forkserver, so that all forked ranks would draw the same numbers."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _keep_process_groups_alive() -> None:
    """Keep torch's process groups alive as long as this process, which exits without destructors.

    The destructor of gloo's group waits for a thread that may need the GIL at that moment. A script that destroys its process group before
    the last object that refers to it, such as DistributedDataParallel, would hang in 40 % of the runs.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    kept_groups = []

    def keep_groups(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*arguments: object, **options: object) -> object:
            kept_groups.append(distributed.group.WORLD)
            kept_groups.append(result := function(*arguments, **options))
            return result

        return call

    for name in ("new_group", "destroy_process_group"):
        kept = keep_groups(getattr(distributed, name))
        setattr(distributed, name, kept)
        setattr(distributed.distributed_c10d, name, kept)


def _run_atexit_functions() -> None:
    """Run the script's atexit functions: a forked worker exits by os._exit, which skips them."""
    atexit.unregister(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # multiprocessing calls it itself
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _summarize_error(error: BaseException) -> str:
    """Return the most informative line of the error message: the last of a syntax error, else the first (torch may append locations)."""
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        lines = lines[-1:]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:_MAX_ERROR_LENGTH] or type(error).__name__


def _locate_error_in_user_code(error: BaseException, code_folder: str) -> str:
    """Return the location of the error in the user's own files, which are in `code_folder`, formatted as a suffix."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno))
    user_frames = [(name, line) for path, line in lines if (name := _get_name_of_user_file(path, code_folder)) is not None]
    return ", in {} line {}".format(*user_frames[-1]) if user_frames else ""


def _get_name_of_user_file(path: str, code_folder: str) -> str | None:
    """Return `path` relative to `code_folder`; None if it is outside or belongs to a package installed below it."""
    folder = Path(code_folder).absolute()
    if not Path(path).is_relative_to(folder) or "site-packages" in Path(path).parts:
        return None
    return str(Path(path).relative_to(folder))


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _skip_swarmtrain_frames(error.__traceback__)))


def _skip_swarmtrain_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without our own frames, so that it begins in the user's script."""
    while trace and trace.tb_next and (trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
