"""The rules by which runs are admitted, shrunk, grown and preempted, each on a small cluster."""

from __future__ import annotations

from dataclasses import replace

from queue_cases import GPU, apply_changes, build_machines, build_run, complete_leaving, map_changes

from swarmtrain.queueing.decisions.admission import decide
from swarmtrain.queueing.decisions.estimates import estimate_starts
from swarmtrain.queueing.decisions.queue_model import Allocation, ExternalAllocation, OwnerLimit, QueueSnapshot

MACHINES = build_machines(4)


def test_all_nodes_at_once_or_none() -> None:
    run = build_run("a", MACHINES, nodes=3)
    assert map_changes(decide(QueueSnapshot(MACHINES, (run,))).changes) == {"a": ("admit", ["m0", "m1", "m2"])}
    external = ExternalAllocation("other", "m0", Allocation({GPU: 1.0})), ExternalAllocation("other", "m1", Allocation({GPU: 8.0}))
    decision = decide(QueueSnapshot(MACHINES, (run,), external))
    assert decision.changes == ()
    assert decision.reasons == {"a": "2 of 3 nodes free; allocated to other"}


def test_an_elastic_run_takes_what_is_free_and_grows_later() -> None:
    run = build_run("a", MACHINES, nodes=3, min_nodes=1)
    busy = (ExternalAllocation("other", "m0", Allocation({GPU: 8.0})), ExternalAllocation("other", "m1", Allocation({GPU: 8.0})))
    snapshot = QueueSnapshot(MACHINES, (run,), busy)
    decision = decide(snapshot)
    assert map_changes(decision.changes) == {"a": ("admit", ["m2", "m3"])}
    snapshot = replace(apply_changes(snapshot, decision.changes), external_allocations=())
    assert map_changes(decide(snapshot).changes) == {"a": ("grow", ["m0", "m2", "m3"])}


def test_priority_goes_before_age() -> None:
    old = build_run("old", MACHINES, nodes=4, position=1)
    urgent = build_run("urgent", MACHINES, nodes=4, position=2, priority=10)
    decision = decide(QueueSnapshot(MACHINES, (old, urgent)))
    assert map_changes(decision.changes) == {"urgent": ("admit", ["m0", "m1", "m2", "m3"])}
    assert list(decision.reasons) == ["old"]


def test_a_later_run_does_not_delay_an_earlier_one() -> None:
    """The earlier run needs 4 machines, of which 3 are free: a later run may only use what the earlier one cannot."""
    earlier = build_run("earlier", MACHINES, nodes=4, position=1)
    later = build_run("later", MACHINES, nodes=1, position=2)
    busy = (ExternalAllocation("other", "m0", Allocation({GPU: 8.0})),)
    decision = decide(QueueSnapshot(MACHINES, (earlier, later), busy))
    assert decision.changes == ()
    assert decision.reasons["later"] == "behind earlier"
    more = build_machines(5)
    elsewhere = build_run("later", more[4:], nodes=1, position=2)
    assert map_changes(decide(QueueSnapshot(more, (earlier, elsewhere), busy)).changes) == {"later": ("admit", ["m4"])}


def test_a_later_run_fits_next_to_what_an_earlier_one_reserves() -> None:
    """The earlier run needs 4 GPUs on each of 4 machines; one machine is full. 2 GPUs fit next to its 4, 5 do not."""
    earlier = build_run("earlier", MACHINES, nodes=4, gpus=4, position=1)
    small, large = build_run("small", MACHINES, gpus=2, position=2), build_run("large", MACHINES, gpus=5, position=3)
    busy = (ExternalAllocation("other", "m0", Allocation({GPU: 8.0})),)
    assert map_changes(decide(QueueSnapshot(MACHINES, (earlier, small, large), busy)).changes) == {"small": ("admit", ["m1"])}


def test_backfill_needs_time_limits_that_show_that_nobody_is_delayed() -> None:
    running = build_run("running", MACHINES, allocated=frozenset({"m0"}), time_limit=3600.0)
    earlier = build_run("earlier", MACHINES, nodes=4, position=1)
    short, long, unlimited = (
        build_run("short", MACHINES, position=2, time_limit=1800.0),
        build_run("long", MACHINES, position=2, time_limit=7200.0),
        build_run("unlimited", MACHINES, position=2),
    )
    for later, starts in ((short, True), (long, False), (unlimited, False)):
        decision = decide(QueueSnapshot(MACHINES, (running, earlier, later)), {"running": 3600.0})
        assert bool(decision.changes) == starts, later.run
    no_limit = replace(running, time_limit=None)
    assert decide(QueueSnapshot(MACHINES, (no_limit, earlier, short))).changes == ()


def test_a_higher_priority_takes_surplus_nodes_first() -> None:
    elastic = build_run("elastic", MACHINES, nodes=3, min_nodes=1, allocated=frozenset({"m0", "m1", "m2"}), position=1)
    fixed = build_run("fixed", MACHINES, allocated=frozenset({"m3"}), position=2)
    urgent = build_run("urgent", MACHINES, nodes=2, priority=10, position=3)
    snapshot = QueueSnapshot(MACHINES, (elastic, fixed, urgent))
    decision = decide(snapshot)
    assert map_changes(decision.changes) == {"elastic": ("shrink", ["m2"])}
    assert decision.reasons == {"urgent": "waits until elastic has saved"}
    snapshot = apply_changes(snapshot, decision.changes)
    assert decide(snapshot).changes == (), "nothing more is preempted while nodes save"
    assert map_changes(decide(complete_leaving(snapshot)).changes) == {"urgent": ("admit", ["m0", "m1"])}


def test_the_lowest_and_youngest_stop_and_no_more_than_necessary() -> None:
    runs = (
        build_run("low-old", MACHINES, allocated=frozenset({"m0"}), priority=-10, position=1),
        build_run("low-young", MACHINES, allocated=frozenset({"m1"}), priority=-10, position=2),
        build_run("normal", MACHINES, allocated=frozenset({"m2"}), position=3),
        build_run("other", MACHINES, allocated=frozenset({"m3"}), position=4),
    )
    for nodes, stopped in ((1, {"low-young"}), (2, {"low-young", "low-old"}), (3, {"low-young", "low-old", "other"})):
        urgent = build_run("urgent", MACHINES, nodes=nodes, priority=10, position=5)
        decision = decide(QueueSnapshot(MACHINES, (*runs, urgent)))
        assert {change.run for change in decision.changes if change.kind == "preempt"} == stopped
        assert len(decision.changes) == len(stopped)


def test_a_victim_is_spared_if_another_suffices() -> None:
    """The youngest victim alone does not help, since the rest of its machine is allocated to another run."""
    half = Allocation({GPU: 4.0})
    runs = (
        build_run("kept", MACHINES[:1], allocated=frozenset({"m0"}), priority=20, position=1, allocation=half),
        build_run("old", MACHINES, allocated=frozenset({"m1"}), priority=-10, position=2),
        build_run("young", MACHINES[:1], allocated=frozenset({"m0"}), priority=-10, position=3, allocation=half),
    )
    urgent = build_run("urgent", MACHINES[:2], priority=10, position=4)
    assert map_changes(decide(QueueSnapshot(MACHINES, (*runs, urgent))).changes) == {"old": ("preempt", [])}


def test_equal_priority_and_protected_runs_are_not_preempted() -> None:
    machines = MACHINES[:1]
    waiting = build_run("waiting", machines, priority=10, position=2)
    for fields in ({"priority": 10}, {"is_preemptible": False}):
        running = build_run("running", machines, allocated=frozenset({"m0"}), position=1, **fields)  # type: ignore[arg-type]
        decision = decide(QueueSnapshot(machines, (running, waiting)))
        assert decision.changes == ()
        assert decision.reasons == {"waiting": "0 of 1 nodes free; allocated to running"}


def test_nothing_is_preempted_in_vain() -> None:
    low = build_run("low", MACHINES, allocated=frozenset({"m0"}), priority=-10)
    protected = build_run("protected", MACHINES, nodes=3, allocated=frozenset({"m1", "m2", "m3"}), is_preemptible=False)
    urgent = build_run("urgent", MACHINES, nodes=2, priority=10)
    assert decide(QueueSnapshot(MACHINES, (low, protected, urgent))).changes == ()


def test_an_elastic_run_grows_after_waiting_runs_of_its_priority_and_before_lower_ones() -> None:
    """One machine is free, which is not enough for the waiting run."""
    elastic = build_run("elastic", MACHINES, nodes=3, min_nodes=1, allocated=frozenset({"m0"}), position=1)
    busy = (ExternalAllocation("other", "m1", Allocation({GPU: 8.0})), ExternalAllocation("other", "m2", Allocation({GPU: 8.0})))
    for priority, changes in ((-10, {"elastic": ("grow", ["m0", "m3"])}), (0, {}), (10, {})):
        waiting = build_run("waiting", MACHINES, nodes=3, priority=priority, position=2)
        assert map_changes(decide(QueueSnapshot(MACHINES, (elastic, waiting), busy)).changes) == changes


def test_limits_of_owners() -> None:
    runs = tuple(build_run(name, MACHINES, position=index) for index, name in enumerate("abc"))
    bert = build_run("d", MACHINES, position=9, owner="bert")
    limits = {"*": OwnerLimit(gpus=16), "bert": OwnerLimit(runs=0)}
    decision = decide(QueueSnapshot(MACHINES, (*runs, bert), limits=limits))
    assert map_changes(decision.changes) == {"a": ("admit", ["m0"]), "b": ("admit", ["m1"])}
    assert decision.reasons == {"c": "limit of anna: 16 GPUs; 2 nodes with 16 GPUs are allocated", "d": "limit of bert: 0 runs"}
    elastic = build_run("e", MACHINES, nodes=4, min_nodes=1)
    assert map_changes(decide(QueueSnapshot(MACHINES, (elastic,), limits=limits)).changes) == {"e": ("admit", ["m0", "m1"])}


def test_a_lost_machine_is_replaced() -> None:
    down = (replace(MACHINES[0], is_available=False, is_lost=True), *MACHINES[1:])
    run = build_run("a", down, nodes=2, allocated=frozenset({"m0", "m1"}))
    decision = decide(QueueSnapshot(down, (run,)))
    assert map_changes(decision.changes) == {"a": ("grow", ["m1", "m2"])}
    assert decision.changes[0].cause == "host2: replaces host0"


def test_a_machine_whose_state_is_unknown_keeps_its_node() -> None:
    """As that of all machines after the leader of the managers has failed: they answer one after the other."""
    unknown = (replace(MACHINES[0], is_available=False), *MACHINES[1:])
    run = build_run("a", unknown, nodes=2, allocated=frozenset({"m0", "m1"}))
    waiting = build_run("b", unknown, nodes=3, position=1)
    assert decide(QueueSnapshot(unknown, (run, waiting))).changes == ()


def test_sharing_runs_share_and_others_do_not() -> None:
    machines = build_machines(1, gpus=0, cores=8)
    shared, exclusive = Allocation({}, {"cores": 8.0}), Allocation({"cores": 8.0})
    runs = (
        build_run("a", machines, allocation=shared, position=1),
        build_run("b", machines, allocation=shared, position=2),
        build_run("c", machines, allocation=exclusive, position=3),
    )
    decision = decide(QueueSnapshot(machines, runs))
    assert [change.run for change in decision.changes] == ["a", "b"]
    first = build_run("c", machines, allocation=exclusive, allocated=frozenset({"m0"}))
    assert decide(QueueSnapshot(machines, (first, runs[0]))).changes == ()


def test_estimates_follow_the_order_of_the_queue() -> None:
    running = build_run("running", MACHINES, nodes=4, allocated=frozenset({"m0", "m1", "m2", "m3"}))
    first = build_run("first", MACHINES, nodes=4, position=1, time_limit=600.0)
    second = build_run("second", MACHINES, nodes=4, position=2)
    snapshot = QueueSnapshot(MACHINES, (running, first, second))
    assert estimate_starts(snapshot, {"running": 60.0}) == {"first": 60.0, "second": 660.0}
    assert estimate_starts(snapshot, {}) == {}
