"""Bringing a stack up: one at a time, over whatever is there or still going, and back to nothing if a first time fails."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmtrain.errors import EngineError, StackError, SwarmtrainError
from swarmtrain.launchers.base import Say
from swarmtrain.launchers.engine import Engine, gone
from swarmtrain.launchers.swarm import observe, removal
from swarmtrain.launchers.swarm.deploy import apply
from swarmtrain.launchers.swarm.lock import Lock
from swarmtrain.launchers.swarm.patience import USUAL, Patience
from swarmtrain.launchers.swarm.reconcile import Kind, Step, Verb
from swarmtrain.launchers.swarm.settle import await_running, known_tasks
from swarmtrain.launchers.swarm.turn import Need, turn

# A network that is going is still listed for a moment after its last task, and services cannot be made with it.
_TRIES = 10
_PAUSE = 0.5


def up(engine: Engine, need: Need, steps: Callable[[], list[Step]], say: Say, patience: Patience = USUAL) -> None:
    """Carry out the `steps` that are needed, whatever they then are, and return when the stack runs. Raises SwarmtrainError.

    A stack that has a `need` of reserved resources changes nothing before all of them are free. The lock is held while
    things are changed and lent while others are waited for, or containers start: whoever comes meanwhile goes first, and
    this one then leaves everything alone.
    """
    bringing = _Up(engine, need, steps, say, patience)
    with bringing.lock.held(say):
        bringing.go()


class _Up:
    def __init__(self, engine: Engine, need: Need, steps: Callable[[], list[Step]], say: Say, patience: Patience) -> None:
        self._engine, self._need, self._steps, self._say, self._patience = engine, need, steps, say, patience
        self._stack = need.run
        self.lock = Lock(engine, need.run, "brings it up", patience)
        self._made: set[str] = set()

    def go(self) -> None:
        """Do it, with the lock held."""
        first = self._wait_for_room()
        try:
            self._change_and_wait()
        except BaseException:
            if first:
                self._take_back()
            raise

    def _wait_for_room(self) -> bool:
        """Return, when nothing of an earlier stack of this name is going down any more, whether this is a first deploy."""
        if observe.services(self._engine, self._stack):
            return False
        if observe.tasks(self._engine, self._stack):
            self.lock.lend()
            removal.await_forgotten(self._engine, self._stack, self._say)
            if not self.lock.take_back():
                raise self.lock.taken()
        return True

    def _change_and_wait(self) -> None:
        with turn(self._engine, self._need_now(), self.lock, self._say, self._patience):
            old = known_tasks(self._engine, self._stack)
            done = self._change()
        if not done:
            self._say(f"{self._stack} is as it should be: nothing to do")
        self.lock.lend()
        restarted = frozenset(step.id for step in done if step.restarts)
        await_running(self._engine, self._stack, old, restarted, say=self._say, still_ours=self._still_ours, patience=self._patience)
        leaving = [step.service for step in done if step.verb is Verb.remove and step.service]
        removal.await_stopped(self._engine, self._stack, leaving, self._say)

    def _need_now(self) -> Need:
        """Return nothing if no container is to be started: a run that is over needs none to be left as it is."""
        starts = self._need.wants and any(step.kind is Kind.service and step.verb is not Verb.remove for step in self._steps())
        return self._need if starts else Need(self._stack)

    def _change(self) -> list[Step]:
        """Make the changes, again where what they rest on vanishes under them. Returns what was done."""
        done: list[Step] = []
        for left in reversed(range(_TRIES)):
            todo = self._steps()
            done += todo
            try:
                apply(self._engine, self._stack, todo, made=self._made, say=self._say, check=self.lock.check)
                break
            except EngineError as error:
                if not gone(error) or not left:
                    raise
                self._say(f"{error.message}: once more")
            time.sleep(_PAUSE)
        return done

    def _still_ours(self) -> None:
        """Raise StackError if somebody else has changed the stack, or taken it down."""
        if not self.lock.mine():
            raise self.lock.taken()
        if not observe.services(self._engine, self._stack):
            raise StackError("it was taken down meanwhile", place=f"run {self._stack}", hint="deploy again")

    def _take_back(self) -> None:
        try:
            if not self.lock.take_back():
                self._say("failed or interrupted: somebody else has changed the run since, so nothing is removed")
                return
            self._say("failed or interrupted: removing what was made")
            removal.take_back(self._engine, self._stack, self._made, self._say, self.lock.check)
        except SwarmtrainError as error:
            self._say(f"what was made could not be removed: {error}; swarmtrain down {self._stack} does that")
