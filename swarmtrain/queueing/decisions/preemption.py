"""Find the runs of lower priority that must shrink or stop so that a run fits: first surplus nodes, then whole runs, as few as possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarmtrain.queueing.decisions.queue_model import Allocation, Ledger, QueuedRun


@dataclass
class Victim:
    """An admitted run of lower priority, and the machines that it would leave."""

    run: QueuedRun
    shrunk: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    @property
    def surplus(self) -> int:
        """Number of nodes that the run can still lose without stopping."""
        return len(self.run.allocated) - len(self.shrunk) - self.run.min_nodes


class VictimSearch:
    """Search for the fewest changes to lower-priority runs with which a run fits. It restores the ledger."""

    def __init__(self, run: QueuedRun, victims: list[Victim], ledger: Ledger, can_allocate: Callable[[str, Allocation], bool]) -> None:
        """`victims`: in the order in which they are preempted. `can_allocate`: whether it fits on a machine and delays no other run."""
        self._run, self._victims, self._ledger, self._can_allocate = run, victims, ledger, can_allocate
        self._fitting = {machine for machine, allocation in run.needs.items() if can_allocate(machine, allocation)}

    def find(self) -> tuple[list[Victim], list[str]]:
        """Return the victims that shrink or stop, and the machines on which the run fits then; both empty if it would not fit."""
        self._shrink_all()
        if not self._is_enough():
            self._stop_all()
        machines: list[str] = []
        if self._is_enough():
            self._remove_unneeded_victims()
            machines = [machine for machine in self._run.needs if machine in self._fitting][: self._run.min_nodes]
        else:
            for victim in self._victims:
                self._give_back(victim, list(victim.stopped), victim.stopped)
                self._give_back(victim, list(victim.shrunk), victim.shrunk)
        chosen = [victim for victim in self._victims if victim.shrunk or victim.stopped]
        for victim in chosen:  # the machines are in use until the victims have stopped
            self._restore(victim)
        return chosen, machines

    def _is_enough(self) -> bool:
        return len(self._fitting) >= self._run.min_nodes

    def _shrink_all(self) -> None:
        for victim in self._victims:
            # On machines where the run would not fit even without this victim, losing a node would not help.
            for machine in sorted(victim.run.allocated & self._run.needs.keys() - self._fitting):
                if victim.surplus <= 0 or self._is_enough():
                    break
                self._free(victim, machine, victim.shrunk)

    def _stop_all(self) -> None:
        for victim in self._victims:
            if self._is_enough():
                break
            for machine in sorted(victim.run.allocated - set(victim.shrunk)):
                self._free(victim, machine, victim.stopped)

    def _remove_unneeded_victims(self) -> None:
        """Give back what the run does not need: whole runs first, from the highest priority and the oldest on."""
        for victim in reversed(self._victims):
            if victim.stopped:
                self._spare(victim, list(victim.stopped), victim.stopped)
        for victim in reversed(self._victims):
            for machine in list(victim.shrunk):
                if not victim.stopped:
                    self._spare(victim, [machine], victim.shrunk)

    def _spare(self, victim: Victim, machines: list[str], freed: list[str]) -> None:
        self._give_back(victim, machines, freed)
        if not self._is_enough():
            for machine in machines:
                self._free(victim, machine, freed)

    def _free(self, victim: Victim, machine: str, freed: list[str]) -> None:
        freed.append(machine)
        self._ledger.remove(machine, victim.run.get_allocation(machine))
        self._recheck_machine(machine)

    def _give_back(self, victim: Victim, machines: list[str], freed: list[str]) -> None:
        for machine in machines:
            freed.remove(machine)
            self._ledger.add(machine, victim.run.get_allocation(machine))
            self._recheck_machine(machine)

    def _restore(self, victim: Victim) -> None:
        for machine in [*victim.shrunk, *victim.stopped]:
            self._ledger.add(machine, victim.run.get_allocation(machine))

    def _recheck_machine(self, machine: str) -> None:
        allocation = self._run.needs.get(machine)
        if allocation is None:
            return
        if self._can_allocate(machine, allocation):
            self._fitting.add(machine)
        else:
            self._fitting.discard(machine)
