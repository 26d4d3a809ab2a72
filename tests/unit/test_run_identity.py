"""The identity of runs: ids, owners, how commands find a run, and when they ask before they change somebody else's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from swarmtrain.errors import EXIT_USAGE, AmbiguousRun, ConfirmationRequired, RunNotFound
from swarmtrain.launchers import run_discovery
from swarmtrain.launchers.base import ProgressReporter, TaskState
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.common.run_overviews import read_overviews
from swarmtrain.launchers.run_discovery import find_run, find_run_or_record
from swarmtrain.operations import runs
from swarmtrain.protocol import EVENT_PROGRESS, EVENT_WORLD_FORMED, Event
from swarmtrain.protocol.run_identity import RunIdentity, create_run_identity, find_current_owner, is_valid_run_name
from swarmtrain.view.run_table import build_run_table

ALICE, BOB = RunIdentity("aaaaaaaaaaaa", "alice", "login1", 60.0), RunIdentity("bbbbbbbbbbbb", "bob", "laptop", 120.0)
NOBODY = RunIdentity("cccccccccccc")


@dataclass
class FakeLauncher:
    """A launcher with the runs `identities`, by name."""

    location: str
    identities: dict[str, RunIdentity]
    changes: list[str] = field(default_factory=list)

    def list_runs(self) -> list[str]:
        return sorted(self.identities)

    def list_terminating_runs(self) -> list[str]:
        return []

    def read_identity(self, run: str) -> RunIdentity:
        if run not in self.identities:
            raise RunNotFound("unknown run", place=f"run {run}")
        return self.identities[run]

    def list_tasks(self, run: str) -> list[TaskState]:
        return [TaskState("node0", "a", "running", gpus=("GPU-1", "GPU-2")), TaskState("node1", "b", "pending", gpus=("2 NVIDIA-GPU",))]

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
        return [Event(EVENT_WORLD_FORMED, {}, 100.0), Event(EVENT_PROGRESS, {"step": 7, "steps": 9}, 101.0)]

    def stop_run(self, run: str, report_progress: ProgressReporter) -> None:
        self.changes.append(f"stop {run}")

    def tear_down_run(self, run: str, report_progress: ProgressReporter) -> None:
        self.changes.append(f"down {run}")


@pytest.fixture(autouse=True)
def _act_as_alice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMTRAIN_OWNER", "alice")


def use_launchers(monkeypatch: pytest.MonkeyPatch, *launchers: FakeLauncher) -> None:
    found = [(launcher, run) for launcher in launchers for run in launcher.list_runs()]
    monkeypatch.setattr(run_discovery, "discover_runs", lambda: ({item.location: item for item in launchers}, found, []))


def test_labels_store_an_identity_completely() -> None:
    assert RunIdentity.from_labels(ALICE.labels) == ALICE
    assert RunIdentity.from_labels({"swarmtrain.run": "demo"}) is None
    assert RunIdentity.from_labels({"swarmtrain.id": "x", "swarmtrain.created": "yesterday"}) == RunIdentity("x")


def test_labels_that_would_be_paths_or_no_times_store_no_identity() -> None:
    for run_id in ("", "..", "../demo", "a/b", "a.b", "a\nb", "a" * 65):
        assert RunIdentity.from_labels({"swarmtrain.id": run_id}) is None, run_id
    for created in ("²", "-1", "9" * 400, "1e9", "٣"):
        assert RunIdentity.from_labels({"swarmtrain.id": "x", "swarmtrain.created": created}) == RunIdentity("x"), created
    assert all(is_valid_run_name(name) for name in ("demo", "Stack_1.2-x", "0"))
    assert not any(is_valid_run_name(name) for name in ("", "..", ".demo", "../demo", "a/b", "-x", "a\nb"))


def test_ids_of_this_project_and_of_docker_are_valid() -> None:
    for run_id in (create_run_identity().id, "k3yq0v9c1m2n"):
        assert RunIdentity.from_labels({"swarmtrain.id": run_id}) == RunIdentity(run_id)


def test_a_run_that_plain_docker_started_has_an_id_and_no_owner() -> None:
    identity = RunIdentity.from_engine_object("k3yq0v9c1m2n4b5v6c7x8z9a0", "1970-01-01T00:02:00.123456789Z")
    assert (identity, identity.is_own) == (RunIdentity("k3yq0v9c1m2n", created=120.0), True)


def test_a_new_run_belongs_to_the_current_user(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = create_run_identity(), create_run_identity()
    assert first.id != second.id
    assert (first.owner, first.is_own) == ("alice", True)
    monkeypatch.delenv("SWARMTRAIN_OWNER")
    monkeypatch.setenv("LOGNAME", "carol")
    assert find_current_owner() == "carol"
    assert not first.is_own


def test_without_a_name_only_runs_of_the_user_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = FakeLauncher("the swarm", {"mine": ALICE, "theirs": BOB})
    use_launchers(monkeypatch, swarm)
    assert find_run(None) == (swarm, "mine")
    assert find_run("theirs") == find_run(BOB.id) == (swarm, "theirs")
    use_launchers(monkeypatch, FakeLauncher("the swarm", {"theirs": BOB}))
    with pytest.raises(RunNotFound, match=r"no run of yours exists; runs of others: theirs \(bob\)"):
        find_run(None)
    use_launchers(monkeypatch, FakeLauncher("the swarm", {"mine": ALICE, "plain": NOBODY, "theirs": BOB}))
    with pytest.raises(AmbiguousRun, match=r"several runs exist: mine, plain$"):
        find_run(None)


def test_a_name_that_occurs_twice_is_listed_with_ids_and_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, machine = FakeLauncher("the swarm", {"demo": BOB}), FakeLauncher("this machine", {"demo": ALICE})
    use_launchers(monkeypatch, swarm, machine)
    with pytest.raises(AmbiguousRun) as error:
        find_run("demo")
    for text in ("id bbbbbbbbbbbb, owner bob from laptop, deployed on 1970-01-01", "on the swarm", "id aaaaaaaaaaaa, owner alice"):
        assert text in error.value.message
    with pytest.raises(AmbiguousRun):
        find_run_or_record("demo")
    assert find_run(ALICE.id) == (machine, "demo")


def test_a_recorded_run_is_found_by_its_id_although_another_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    past = RecordedRun("demo", BOB)
    past.record_operation(Event(EVENT_PROGRESS, {"step": 1}, 1.0))
    swarm = FakeLauncher("the swarm", {"demo": ALICE})
    use_launchers(monkeypatch, swarm)
    assert find_run_or_record("demo").recorded_run == RecordedRun("demo", ALICE)
    found = find_run_or_record(BOB.id)
    assert (found.recorded_run, found.launcher) == (past, None)


@pytest.mark.parametrize("operation", ["stop", "down"])
def test_a_change_to_somebody_elses_run_needs_a_confirmation(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = FakeLauncher("the swarm", {"mine": ALICE, "plain": NOBODY, "theirs": BOB})
    use_launchers(monkeypatch, swarm)

    def change_run(run: str, *, assume_yes: bool = False) -> None:
        if operation == "stop":
            runs.stop_run(*find_run(run), assume_yes=assume_yes)
        else:
            runs.remove_named_run(run, assume_yes=assume_yes)

    with pytest.raises(ConfirmationRequired, match=r"theirs, the run of bob from laptop, but there is no terminal") as error:
        change_run("theirs")
    assert (error.value.exit_code, error.value.hint, swarm.changes) == (EXIT_USAGE, "add --yes to confirm", [])
    change_run("theirs", assume_yes=True)
    change_run("mine")
    change_run("plain")
    assert swarm.changes == [f"{operation} theirs", f"{operation} mine", f"{operation} plain"]


@pytest.mark.parametrize("name", ["/etc", "..", "*", "**x", "[", "", "a\0b"])
def test_a_name_that_is_not_one_is_an_unknown_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordedRun("demo", BOB).record_operation(Event(EVENT_PROGRESS, {"step": 1}, 1.0))
    use_launchers(monkeypatch)
    with pytest.raises(RunNotFound):
        find_run_or_record(name)


def test_the_table_of_runs_has_those_of_all_users() -> None:
    launchers = [FakeLauncher("the swarm", {"demo": BOB}), FakeLauncher("this machine", {"demo": ALICE, "other": NOBODY})]
    overviews = [(launcher.location, overview) for launcher in launchers for overview in read_overviews(launcher)]
    assert [line.rstrip() for line in str(build_run_table(overviews, 180.0)).splitlines()] == [
        "RUN    ID            OWNER  NODES  GPUS  STATE     STEP  AGE",
        "other  cccccccccccc         1/2    4     training  7/9",
        "demo   aaaaaaaaaaaa  alice  1/2    4     training  7/9   2 min 00 s  on this machine",
        "demo   bbbbbbbbbbbb  bob    1/2    4     training  7/9   1 min 00 s  on the swarm",
    ]
