"""One rank: runs the user's script as torchrun would, and tells the notice board how it went.

Called by torch's agent in a process forked from the forkserver. The script sees torchrun's environment
(RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR …) and ours (SWARMTRAIN_BOARD, SWARMTRAIN_CONFIG …); it need not know us.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from swarmtrain.board import Board
from swarmtrain.errors import BoardError, SwarmtrainError
from swarmtrain.process import die_with_parent_now, rename
from swarmtrain.wire import AT_FIRST, EXIT_PLANNED, FAILURE, RETURNED, WORLD, Event, NodeEnv, Receipt, world_key

_TRACEBACK_LIMIT = 16_000
_ERROR_LIMIT = 500
_BRIEF = 80
_ENDED_WITHIN = 20.0


def run() -> None:
    """Run the script to its end. A failure is put on the board and raised again; so is any exit code but 0."""
    die_with_parent_now()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server that this is forked from does not hear it
    rename(f"rank {os.environ['RANK']}")
    sys.excepthook = sys.__excepthook__  # the forkserver's own is not the script's
    node = NodeEnv.from_env(os.environ)
    _print_by_lines()
    _draw_own_random_numbers()
    _keep_process_groups()
    receipt = Receipt()
    try:
        if os.environ["LOCAL_RANK"] == "0":
            _post(node, world_event(node))
        _run_script(node)
    except SystemExit as stop:
        code = exit_code_of(stop)
        if code not in (0, EXIT_PLANNED):
            error = stop.code if isinstance(stop.code, str) else f"exit code {code}"
            receipt = _post(node, failure_event(node, error=error, exit_code=code))
        if code:
            raise  # raised with 0, torch's agent would wait for ever for our return value
    except BaseException as error:
        receipt = _tell(node, error)
        raise
    finally:
        _run_exit_functions()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the script's own handler would keep us alive for half a minute
        if receipt.over:
            _await_the_end()
    if os.environ["LOCAL_RANK"] == "0":
        _post(node, Event(RETURNED, {"node": node.node, "world": world_key(os.environ)}))


def world_event(node: NodeEnv) -> Event:
    """Say which ranks live here; the board makes one `world` of what all nodes say."""
    first, count = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return Event(
        WORLD,
        {
            "world": world_key(os.environ),
            "world_size": int(os.environ["WORLD_SIZE"]),
            "nodes": int(os.environ["GROUP_WORLD_SIZE"]),
            "ranks": {node.node: list(range(first, first + count))},
        },
    )


def failure_event(node: NodeEnv, **facts: Any) -> Event:
    """Describe the end of this rank."""
    place = {"node": node.node, "rank": int(os.environ["RANK"]), "local_rank": int(os.environ["LOCAL_RANK"])}
    return Event(FAILURE, {**place, "world": world_key(os.environ), **facts})


def exit_code_of(stop: SystemExit) -> int:
    """Return the process's exit code for `sys.exit(…)`, as the interpreter would choose it."""
    if stop.code is None:
        return 0
    return stop.code & 0xFF if isinstance(stop.code, int) else 1


def permanent(error: BaseException, script: str) -> bool | str:
    """Return whether trying again is of no use: True, AT_FIRST, or False as far as anybody can tell."""
    if isinstance(error, SyntaxError):
        return error.filename is not None and Path(error.filename).parent == Path(script).parent
    if isinstance(error, SwarmtrainError):
        return AT_FIRST if error.lasting is None else error.lasting
    return isinstance(error, ImportError)


def _run_script(node: NodeEnv) -> None:
    sys.argv = [node.script, *node.script_args]
    sys.path.insert(0, str(Path(node.script).absolute().parent))
    with _exits_that_are_noticed():
        runpy.run_path(node.script, run_name="__main__")


@contextmanager
def _exits_that_are_noticed() -> Iterator[None]:
    """Let the script's own os._exit(0), by which some skip a slow goodbye, be an end like any other.

    torch's agent waits for our return value, and of a process that is gone without a failure it would do so for ever.
    """
    really, process = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if status or os.getpid() != process or threading.current_thread() is not threading.main_thread():
            really(status)
        atexit._clear()
        raise SystemExit(0)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = really


def _tell(node: NodeEnv, error: BaseException) -> Receipt:
    """Put what went wrong on the board, and print it: at length, unless another rank has done so."""
    if isinstance(error, SwarmtrainError):
        reason, trace, full = str(error).replace("\n", "; "), "", error.text
    else:
        reason, trace = _line(error) + _place(error, Path(node.script).parent), _describe(error)
        full = trace
    facts = {"error": reason[:_ERROR_LIMIT], "exit_code": 1, "traceback": trace[-_TRACEBACK_LIMIT:]}
    if hint := _hint(error):
        facts["hint"] = hint
    if isinstance(error, SwarmtrainError) and error.rank is not None:
        facts["befell"] = error.rank
    if (step := getattr(error, "step", None)) is not None:
        facts["step"] = step
    if (lasting := permanent(error, node.script)) or isinstance(error, SwarmtrainError):
        facts["permanent"] = lasting
    receipt = _post(node, failure_event(node, **facts))
    sys.stderr.write(f"ends after another rank: {reason[:_BRIEF]}\n" if receipt.known else full)
    return receipt


def _hint(error: BaseException) -> str | None:
    if isinstance(error, SwarmtrainError):
        return error.hint
    return "the image must have it; a file of your own belongs into runner.code" if isinstance(error, ImportError) else None


def _await_the_end() -> None:
    """Stay until this node is ended: a rank that ends by itself is started again by torch's agent, in a run that is over."""
    time.sleep(_ENDED_WITHIN)


def _post(node: NodeEnv, event: Event) -> Receipt:
    try:
        return Board(node.board).post(event)
    except BoardError as error:
        sys.stderr.write(f"swarmtrain: could not post `{event.kind}`: {error}" + "\n")
        return Receipt()


def _print_by_lines() -> None:
    """Let each line reach the log whole and at once, also where PYTHONUNBUFFERED would write it in pieces."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _draw_own_random_numbers() -> None:
    """NumPy's global generator was seeded in the forkserver: forked ranks would all draw the same numbers."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _keep_process_groups() -> None:
    """Let torch's process groups live as long as this process, which leaves without destructors.

    gloo's waits for a thread that may want what Python holds just then. A script that leaves its world before the last thing that has
    the group goes, as DistributedDataParallel does, would hang in two of five runs.
    """
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    if torch is None:
        return
    leave, kept = torch.destroy_process_group, []

    def destroy_process_group(group: object = None) -> None:
        kept.extend(torch._world.pg_map)
        leave(group)

    torch.destroy_process_group = sys.modules["torch.distributed"].destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def _run_exit_functions() -> None:
    """A forked worker leaves by os._exit, without what the script registered with atexit."""
    atexit.unregister(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # multiprocessing calls it by itself
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _line(error: BaseException) -> str:
    """Return the line that says what happened: the last of a syntax error, else the first, behind which torch may put where it was."""
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    if isinstance(error, SyntaxError):
        lines = lines[-1:]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:_ERROR_LIMIT] or type(error).__name__


def _place(error: BaseException, folder: Path) -> str:
    """Return where in the user's own files it happened."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        lines.append((error.filename or "", error.lineno))
    mine = [(Path(name).name, line) for name, line in lines if Path(name).parent == folder]
    return ", in {} line {}".format(*mine[-1]) if mine else ""


def _describe(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, _below_runpy(error.__traceback__)))


def _below_runpy(trace: TracebackType | None) -> TracebackType | None:
    """Skip our own frames, so that the traceback begins in the user's script."""
    while trace and trace.tb_next and (trace.tb_frame.f_code.co_filename == __file__ or "runpy" in trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
