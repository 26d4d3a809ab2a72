"""Pool of worker processes that run tasks. The workers exit when their parent process exits."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from swarmtrain import process
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")
_POLL_SECONDS = 1.0
"""Number of seconds without a finished task after which None is yielded."""


@dataclass(frozen=True)
class TaskFailure:
    """The error of a failed task."""

    message: str
    place: str | None
    hint: str | None


class WorkerPool(Generic[TaskT, ResultT]):
    """Pool of `worker_count` worker processes that run `task_function`. They are forked, so they inherit the caller's memory."""

    def __init__(self, worker_count: int, task_function: Callable[[TaskT], ResultT]) -> None:
        context = multiprocessing.get_context("fork")
        self._idle: list[Connection] = []
        self._processes = []
        # The workers' garbage collections skip the caller's objects: some extension modules crash if these are collected after a fork.
        gc.freeze()
        try:
            for _ in range(worker_count):
                parent_end, child_end = context.Pipe()
                worker = context.Process(target=_serve_tasks, args=(child_end, task_function, os.getpid()), daemon=True)
                worker.start()
                child_end.close()
                self._idle.append(parent_end)
                self._processes.append(worker)
        finally:
            gc.unfreeze()

    def run_tasks(self, tasks: Sequence[TaskT]) -> Iterator[tuple[int, ResultT] | None]:
        """Yield index and result of each task when it finishes, and None after each second without a finished task.

        Tasks are started in the order of `tasks`. If any fail, raises TrainingError for the first failed task in this order, after all
        tasks before it have finished. If a worker process is killed, raises TrainingError at once.
        """
        next_number, running, failures = 0, dict[Connection, int](), dict[int, TaskFailure]()
        while running or (next_number < len(tasks) and not failures):
            while self._idle and next_number < len(tasks) and not failures:
                worker = self._idle.pop()
                self._send_task(worker, tasks[next_number])
                running[worker] = next_number
                next_number += 1
            ready = wait(list(running), _POLL_SECONDS)
            if not ready:
                yield None
            for connection in ready:
                assert isinstance(connection, Connection)  # noqa: S101  # for mypy: wait() returns only connections that were passed to it
                number, result = running.pop(connection), self._receive_result(connection)
                self._idle.append(connection)
                if isinstance(result, TaskFailure):
                    failures[number] = result
                else:
                    yield number, result
            if failures and all(number > min(failures) for number in running.values()):
                break
        if failures:
            first = failures[min(failures)]
            raise TrainingError(first.message, place=first.place, hint=first.hint)

    @staticmethod
    def _send_task(worker: Connection, task: TaskT) -> None:
        try:
            worker.send(task)
        except ConnectionError:
            raise _build_killed_worker_error() from None

    @staticmethod
    def _receive_result(worker: Connection) -> ResultT | TaskFailure:
        try:
            result: ResultT | TaskFailure = worker.recv()
        except (EOFError, ConnectionError):  # a reset connection if the worker had not read its task
            raise _build_killed_worker_error() from None
        return result

    def kill_workers(self) -> None:
        """Kill all worker processes with SIGKILL, and wait until they have exited."""
        for worker in self._processes:
            worker.kill()
        for worker in self._processes:
            worker.join()


def _build_killed_worker_error() -> TrainingError:
    hint = "lower --workers if the machine runs out of memory; run the same command again to resume"
    return TrainingError("a worker process was killed", place=ERROR_PLACE, hint=hint)


def _serve_tasks(connection: Connection, task_function: Callable[[TaskT], ResultT], parent_pid: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends the workers
    process.set_parent_death_signal()
    while os.getppid() == parent_pid:
        task = connection.recv()
        try:
            result: ResultT | TaskFailure = task_function(task)
        except TrainingError as error:
            result = TaskFailure(error.message, error.place, error.hint)
        except OSError as error:
            result = TaskFailure(
                f"{error.filename or 'a file'}: {(error.strerror or str(error)).lower()}",
                ERROR_PLACE,
                "check that the disk is mounted, readable and not full",
            )
        connection.send(result)
