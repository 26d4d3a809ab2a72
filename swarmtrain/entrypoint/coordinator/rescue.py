"""Just-in-time checkpoints: choose which step the surviving ranks of a failed world save, and which of these ranks write the checkpoint.

Also issues generations (fencing tokens): each is higher than all issued before and all on the disks of the new world.

A pure state machine, like state_machine.py. Surviving ranks report their state repeatedly. The rules:
- The newest step of which surviving ranks hold all shards is saved. A rank that holds the previous step, but is ready to complete this step
  alone, counts as a holder if another rank has completed it: when a world fails, ranks may be one step apart.
- A rank that is not ready has not joined the last collective of its next step, so no rank has completed that step: the rank's own step is
  the newest possible, and is chosen once all its shards are reported. Otherwise the arbiter waits for reports of other ranks.
- Each shard is written by one rank, the lowest that holds it. If a writer stops reporting, new writers are chosen from the other ranks.
- If each node has its own disk, a copy needs all shards on one node; every node whose ranks hold all shards saves its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swarmtrain.protocol import EVENT_FAILURE, Event, RescueAssignment, SurvivorState

RESCUE_DECISION_TIMEOUT_SECONDS = 10.0
"""Seconds after the first report in which reports of further ranks are awaited."""
RESCUE_SETTLE_SECONDS = 1.0
"""Seconds to wait for reports of further nodes if each node has its own disk: a node without a copy later receives it over the network."""
SURVIVOR_LOST_SECONDS = 5.0
"""Seconds without a report after which a surviving rank is considered lost."""
_DECISION_INTERVAL_SECONDS, _LARGE_WORLD_RANKS = 0.05, 256
"""Minimum seconds between two attempts to choose writers of a large world while reports are missing: each takes time for every rank."""
_MAX_WORLDS = 8


@dataclass
class _BrokenWorld:
    started_at: float
    survivor_states: dict[int, SurvivorState] = field(default_factory=dict)
    dead_ranks: set[int] = field(default_factory=set)
    last_reports: dict[int, float] = field(default_factory=dict)
    rescue: RescueAssignment = field(default_factory=RescueAssignment)
    decided_at: float = float("-inf")
    saved_ranks: set[int] = field(default_factory=set)
    """Ranks that are the first writer of a disk and have finished the current attempt."""


class RescueArbiter:
    """Arbiter of the just-in-time checkpoints of one run: decides which ranks write which step. `clock` is in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._worlds: dict[str, _BrokenWorld] = {}
        self._generation = 0

    def handle_request(self, op: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a request of a writer or of a new world, and return the response.

        Raises ValueError, KeyError or TypeError if the request is malformed.
        """
        if op == "rescue_finished":
            self.record_rescue_finished(request["world"], int(request["attempt"]), int(request["rank"]))
        if op == "generation":
            return {"generation": self.issue_generation(int(request["above"]))}
        return {"rescue_pending": self.is_rescue_pending}

    def issue_generation(self, highest_generation: int) -> int:
        """Return a new generation, above `highest_generation` (the highest on the disks of a new world) and above all issued before."""
        self._generation = max(self._generation, highest_generation) + 1
        return self._generation

    @property
    def is_rescue_pending(self) -> bool:
        """Whether surviving ranks are writing a just-in-time checkpoint, so that a new world must wait for it."""
        return any(
            not world.rescue.is_finished and any(self._is_alive(world, rank) for rank in world.survivor_states)
            for world in self._worlds.values()
        )

    def record_surviving_rank(self, world_key: str, rank: int, state: SurvivorState) -> RescueAssignment:
        """Record that rank `rank` of the world `world_key` is alive and holds `state`. Return the assignment of writers."""
        world = self._get_or_create_world(world_key)
        world.survivor_states[rank], world.last_reports[rank] = state, self._clock()
        if not world.rescue.is_finished:
            self._assign_checkpoint_writers(world)
        return world.rescue

    @property
    def assignments(self) -> dict[str, RescueAssignment]:
        """The newest assignment of writers in each world."""
        return {key: world.rescue for key, world in self._worlds.items()}

    def process_timeouts(self) -> None:
        """Assign the checkpoints for which no further report is awaited any more, or whose writers have been lost."""
        for world in self._worlds.values():
            if not world.rescue.is_finished and any(self._is_alive(world, rank) for rank in world.survivor_states):
                self._assign_checkpoint_writers(world)

    def record_dead_rank(self, event: Event) -> None:
        """Record from a failure event that a rank is dead, so that the arbiter does not wait for a report of this rank."""
        if event.kind == EVENT_FAILURE and {"world", "rank"} <= event.data.keys():
            world = self._get_or_create_world(str(event.data["world"]))
            world.dead_ranks.add(int(event.data["rank"]))

    def record_rescue_finished(self, world_key: str, attempt: int, rank: int) -> None:
        """Record that `rank`, the first writer of a disk, has finished `attempt`: its disk's checkpoint is committed, or has failed."""
        world = self._worlds.get(world_key)
        if world and attempt == world.rescue.attempt:
            world.saved_ranks.add(rank)
            first_writers: dict[int, int] = {}
            for writer in world.rescue.writers:
                first_writers.setdefault(world.survivor_states[writer].disk, writer)
            if world.saved_ranks >= set(first_writers.values()):
                world.rescue = replace(world.rescue, is_finished=True)

    def _get_or_create_world(self, key: str) -> _BrokenWorld:
        while len(self._worlds) > _MAX_WORLDS:
            del self._worlds[next(iter(self._worlds))]
        return self._worlds.setdefault(key, _BrokenWorld(self._clock()))

    def _assign_checkpoint_writers(self, world: _BrokenWorld) -> None:
        previous, reported_count = world.rescue, len(world.survivor_states) + len(world.dead_ranks)
        if previous.writers and all(self._is_alive(world, rank) for rank in previous.writers):
            return
        world_size = next(iter(world.survivor_states.values())).world_size
        if _LARGE_WORLD_RANKS < world_size > reported_count and self._clock() - world.decided_at < _DECISION_INTERVAL_SECONDS:
            return  # another report follows
        world.decided_at = self._clock()
        alive = {rank: state for rank, state in world.survivor_states.items() if self._is_alive(world, rank)}
        any_state, elapsed = next(iter(alive.values())), self._clock() - world.started_at
        all_reported = len(alive.keys() | world.dead_ranks) == any_state.world_size
        no_more_expected = all_reported or elapsed > RESCUE_DECISION_TIMEOUT_SECONDS
        step, writers = (
            choose_checkpoint_writers(alive, are_reports_complete=no_more_expected)
            if no_more_expected or any_state.disks == 1 or elapsed > RESCUE_SETTLE_SECONDS
            else (0, ())
        )
        if writers:
            world.rescue, world.saved_ranks = RescueAssignment(step, writers, previous.attempt + 1), set()
        elif no_more_expected:
            world.rescue = RescueAssignment(attempt=previous.attempt, is_finished=True)
        else:
            world.rescue = RescueAssignment(attempt=previous.attempt)

    def _is_alive(self, world: _BrokenWorld, rank: int) -> bool:
        return rank not in world.dead_ranks and self._clock() - world.last_reports[rank] <= SURVIVOR_LOST_SECONDS


def choose_checkpoint_writers(survivor_states: dict[int, SurvivorState], *, are_reports_complete: bool) -> tuple[int, tuple[int, ...]]:
    """Return the step to save, and the ranks that write it, in ascending order.

    Returns step 0 without writers if the surviving ranks do not hold all shards of a step, or while a newer step may still be reported.
    `are_reports_complete`: no further rank is expected to report.
    """
    newest = max(state.step for state in survivor_states.values())
    newest_is_final = are_reports_complete or any(state.step == newest and not state.ready for state in survivor_states.values())
    for step in (newest, newest - 1) if are_reports_complete else (newest,) if newest_is_final else ():
        holders_by_disk: dict[int, dict[int, int]] = {}
        # Prefer ranks that have completed the step to those that are only ready to complete it.
        for rank, state in sorted(survivor_states.items(), key=lambda item: (item[1].step != step, item[0])):
            if state.step == step or (state.ready and state.step == step - 1 and step == newest):
                holders_by_disk.setdefault(state.disk, {}).setdefault(state.shard, rank)
        complete_holders = [
            ranks.values() for ranks in holders_by_disk.values() if len(ranks) == next(iter(survivor_states.values())).shards
        ]
        if step > 0 and complete_holders:
            return step, tuple(sorted(rank for ranks in complete_holders for rank in ranks))
    return 0, ()
