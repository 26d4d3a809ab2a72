"""500 random sequences of what people and machines do to a queue, against a model: no double allocation, no run lost, stuck or starved."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from queue_cases import GPU, apply_changes, build_machines, build_run
from randomized import SEED, count_examples, print_seed

from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.admission import decide
from swarmtrain.queueing.decisions.queue_model import Allocation, ChangeKind, QueuedRun, QueueSnapshot

_SEQUENCES, _STEPS, _MAX_ROUNDS = 500, 40, 200


class _Cluster:
    """A cluster in which runs are submitted, end, are cancelled and scaled, machines drain, and the scheduler dies between two changes."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)  # noqa: S311  # not for cryptography
        self.snapshot = QueueSnapshot(build_machines(self.random.randint(2, 6)), ())
        self.submitted = 0

    def step(self) -> None:
        actions = (self.submit, self.submit, self.schedule, self.schedule, self.finish, self.cancel, self.drain, self.scale, self.leave)
        self.random.choice(actions)()
        self.check()

    def submit(self) -> None:
        machines = self.snapshot.machines
        nodes = self.random.randint(1, len(machines))
        gpus = self.random.choice((1.0, 2.0, 4.0, 8.0))
        is_shared = self.random.random() < 0.2
        self.submitted += 1
        run = build_run(
            f"run{self.submitted}",
            machines,
            nodes=nodes,
            min_nodes=self.random.randint(1, nodes),
            priority=self.random.choice((-10, 0, 10)),
            position=float(self.submitted),
            allocation=Allocation({}, {"cores": 16.0}) if is_shared else Allocation({GPU: gpus, "cores": 4 * gpus}),
            is_preemptible=self.random.random() < 0.8,
            owner=self.random.choice(("anna", "bert")),
        )
        self.snapshot = replace(self.snapshot, runs=(*self.snapshot.runs, run))

    def schedule(self) -> None:
        """Make a round. The scheduler may be killed after any of its changes."""
        changes = decide(self.snapshot).changes
        applied = changes if self.random.random() < 0.7 else changes[: self.random.randint(0, len(changes))]
        self.snapshot = apply_changes(self.snapshot, applied)

    def finish(self) -> None:
        if running := [run for run in self.snapshot.runs if run.state is EntryState.admitted]:
            self.remove(self.random.choice(running))

    def cancel(self) -> None:
        if self.snapshot.runs:
            self.remove(self.random.choice(self.snapshot.runs))

    def drain(self) -> None:
        machines = list(self.snapshot.machines)
        index = self.random.randrange(len(machines))
        machines[index] = replace(machines[index], is_available=not machines[index].is_available, is_lost=machines[index].is_available)
        self.snapshot = replace(self.snapshot, machines=tuple(machines))

    def scale(self) -> None:
        if self.snapshot.runs:
            run = self.random.choice(self.snapshot.runs)
            nodes = self.random.randint(max(1, run.min_nodes, len(run.allocated)), len(self.snapshot.machines))
            self.replace(replace(run, nodes=nodes))

    def leave(self) -> None:
        """Let the containers of one run that have been asked to stop do so."""
        if leaving := [run for run in self.snapshot.runs if run.leaving]:
            self.replace(replace(self.random.choice(leaving), leaving={}))

    def remove(self, run: QueuedRun) -> None:
        self.snapshot = replace(self.snapshot, runs=tuple(other for other in self.snapshot.runs if other.run != run.run))

    def replace(self, run: QueuedRun) -> None:
        self.snapshot = replace(self.snapshot, runs=tuple(run if other.run == run.run else other for other in self.snapshot.runs))

    def check(self) -> None:
        """Check that nothing is allocated twice, by an accounting of the test's own, and that entries are consistent."""
        for machine in self.snapshot.machines:
            users = [run for run in self.snapshot.runs if machine.id in run.allocated or machine.id in run.leaving]
            for resource, capacity in machine.capacity.items():
                allocations = [run.get_allocation(machine.id) for run in users]
                exclusive = sum(allocation.exclusive.get(resource, 0.0) for allocation in allocations)
                shared = max((allocation.shared.get(resource, 0.0) for allocation in allocations), default=0.0)
                assert exclusive + shared <= capacity + 1e-6, f"{machine.id}: {[run.run for run in users]}"
        for run in self.snapshot.runs:
            assert (run.state is EntryState.admitted) == bool(run.allocated)
            assert len(run.allocated) <= run.nodes
            assert not run.allocated & run.leaving.keys()

    def run_to_the_end(self) -> None:
        """Let all machines return and all runs end one after another. Each run must start, the first of the highest priority first."""
        self.snapshot = replace(
            self.snapshot, machines=tuple(replace(machine, is_available=True, is_lost=False) for machine in self.snapshot.machines)
        )
        for _ in range(_MAX_ROUNDS):
            if not self.snapshot.runs:
                return
            changes = decide(self.snapshot).changes
            self.snapshot = apply_changes(self.snapshot, changes)
            self.check()
            is_saving = any(run.leaving for run in self.snapshot.runs)
            self.snapshot = replace(self.snapshot, runs=tuple(replace(run, leaving={}) for run in self.snapshot.runs))
            if not changes and not is_saving:
                running = [run for run in self.snapshot.runs if run.state is EntryState.admitted]
                assert running, f"stuck: {[run.run for run in self.snapshot.runs]}"
                self.remove(min(running, key=lambda run: run.position))
        raise AssertionError(f"not ended: {[run.run for run in self.snapshot.runs]}")


def test_random_sequences() -> None:
    with print_seed("fast"):
        for index in range(count_examples(_SEQUENCES)):
            cluster = _Cluster(f"{SEED or 0}-{index}")
            try:
                for _ in range(_STEPS):
                    cluster.step()
                cluster.run_to_the_end()
            except AssertionError as error:
                raise AssertionError(f"sequence {index}: {error}") from error


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 4), (2, 8), (4, 4), (4, 8)])
def test_a_large_run_does_not_starve_behind_a_stream_of_small_ones(nodes: int, gpus: int) -> None:
    """It starts when the runs that were running before it have ended, however many small runs of its priority are submitted meanwhile."""
    machines = build_machines(4)
    small = [build_run(f"small{index}", machines, gpus=4, position=float(index)) for index in range(8)]
    snapshot = apply_changes(QueueSnapshot(machines, tuple(small)), decide(QueueSnapshot(machines, tuple(small))).changes)
    assert all(run.allocated for run in snapshot.runs)
    snapshot = replace(snapshot, runs=(*snapshot.runs, build_run("large", machines, nodes=nodes, gpus=gpus, position=100.0)))
    for ended in range(8):
        later = build_run(f"later{ended}", machines, gpus=4, position=200.0 + ended)
        kept = tuple(run for run in snapshot.runs if run.run != f"small{ended}")
        snapshot = replace(snapshot, runs=(*kept, later))
        snapshot = apply_changes(snapshot, decide(snapshot).changes)
        large = next(run for run in snapshot.runs if run.run == "large")
        # Of each machine, two small runs have half. The large run needs one or both of them to end on each of its machines.
        assert bool(large.allocated) == (ended >= 2 * (nodes - 1) + (gpus == 8))


def test_a_killed_scheduler_leaves_a_decision_that_the_next_one_completes() -> None:
    """Whatever prefix of its changes a scheduler has made, the next ones come to the same end."""
    machines = build_machines(4)
    runs = (
        build_run("elastic", machines, nodes=3, min_nodes=1, allocated=frozenset({"m0", "m1", "m2"}), position=1),
        build_run("low", machines, allocated=frozenset({"m3"}), priority=-10, position=2),
        build_run("urgent", machines, nodes=3, priority=10, position=3),
    )
    ends = set()
    for prefix in range(3):
        snapshot = QueueSnapshot(machines, runs)
        changes = decide(snapshot).changes
        assert [change.kind for change in changes] == [ChangeKind.preempt, ChangeKind.shrink] or len(changes) == 2
        snapshot = apply_changes(snapshot, changes[:prefix])
        for _ in range(6):
            snapshot = apply_changes(snapshot, decide(snapshot).changes)
            snapshot = replace(snapshot, runs=tuple(replace(run, leaving={}) for run in snapshot.runs))
        ends.add(tuple((run.run, run.state, len(run.allocated)) for run in snapshot.runs))
    assert ends == {(("elastic", "admitted", 1), ("low", "waiting", 0), ("urgent", "admitted", 3))}
