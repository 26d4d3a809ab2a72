"""Processes that do one task after the other, and end with the one that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from swarmtrain import process
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.prepare.options import PLACE

Task = TypeVar("Task")
Result = TypeVar("Result")
_LOOK = 1.0
"""Seconds between two looks where nothing has ended."""


@dataclass(frozen=True)
class Failure:
    """Why a task could not be done."""

    message: str
    place: str | None
    hint: str | None


class Workers(Generic[Task, Result]):
    """`count` processes that call `do`, forked, so that they have what the caller has loaded."""

    def __init__(self, count: int, do: Callable[[Task], Result]) -> None:
        context = multiprocessing.get_context("fork")
        self._free: list[Connection] = []
        self._all = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, do, os.getpid()), daemon=True)
            worker.start()
            theirs.close()
            self._free.append(ours)
            self._all.append(worker)

    def done(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Result] | None]:
        """Yield the number and the result of each of `tasks` as it is done, and None when a second has passed in which none was.

        They are begun in order. Raises TrainingError for the first of `tasks` that fails, when all before it are done.
        """
        following, running, failed = 0, dict[Connection, int](), dict[int, Failure]()
        while running or (following < len(tasks) and not failed):
            while self._free and following < len(tasks) and not failed:
                worker = self._free.pop()
                worker.send(tasks[following])
                running[worker] = following
                following += 1
            ready = wait(list(running), _LOOK)
            if not ready:
                yield None
            for each in ready:
                assert isinstance(each, Connection)  # noqa: S101  # for mypy: these are what was waited for
                number, result = running.pop(each), self._received(each)
                self._free.append(each)
                if isinstance(result, Failure):
                    failed[number] = result
                else:
                    yield number, result
            if failed and all(number > min(failed) for number in running.values()):
                break
        if failed:
            first = failed[min(failed)]
            raise TrainingError(first.message, place=first.place, hint=first.hint)

    @staticmethod
    def _received(worker: Connection) -> Result | Failure:
        try:
            result: Result | Failure = worker.recv()
        except EOFError:
            hint = "is memory short? the same command goes on from here; --workers takes fewer"
            raise TrainingError("a worker was killed", place=PLACE, hint=hint) from None
        return result

    def end(self) -> None:
        """End them at once, whatever they do."""
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.join()


def _serve(tasks: Connection, do: Callable[[Task], Result], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends them
    process.die_with_parent_now()
    while os.getppid() == parent:
        task = tasks.recv()
        try:
            result: Result | Failure = do(task)
        except TrainingError as error:
            result = Failure(error.message, error.place, error.hint)
        except OSError as error:
            result = Failure(
                f"{error.filename or 'a file'}: {(error.strerror or str(error)).lower()}", PLACE, "df -h shows which disk is full"
            )
        tasks.send(result)
