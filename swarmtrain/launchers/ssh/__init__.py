"""The launchers `pdsh` and `pdsh_docker`: the nodes of a run on hosts behind SSH, as bare Python or in a container each.

On each host the run has a folder and a keeper for each process, as a local run has on this machine; what differs is the hand that
reaches them. A run lives on when the launcher ends, and is found again by its index here and by what its hosts say.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.names import host_address, host_slots
from swarmtrain.config.runner import RunnerConfig, RunnerType
from swarmtrain.errors import HostError, RunNotFound, StackError
from swarmtrain.host.folder import EVENTS, MARK
from swarmtrain.host.hand import OPEN, SECRET
from swarmtrain.host.log import head
from swarmtrain.host.spec import Spec
from swarmtrain.launchers import kept
from swarmtrain.launchers.base import Act, Finding, LogLine, Say, TaskState, Update
from swarmtrain.launchers.local.folder import in_state
from swarmtrain.launchers.ssh import checks, follow
from swarmtrain.launchers.ssh.host import HERE, Connections, Host, Team, connect
from swarmtrain.launchers.ssh.images import pull
from swarmtrain.launchers.ssh.record import Index, Record
from swarmtrain.launchers.ssh.specs import There, specs
from swarmtrain.plan import Cargo, CodeFile, Inventory, Machine, Plan
from swarmtrain.wire import RENDEZVOUS, Event

_LOCK_EVERY = 0.5
_AFTER_GRACE = 30.0
_GOODBYE = 5.0
_BOARD_SPEAKS_WITHIN = 60.0
_OF_DOCKER = re.compile(r"(Run|See) 'docker|Error: failed to start containers")
"""What docker says beside its reason."""
_BOARD_TRIES = 2


@dataclass(frozen=True)
class Wanted:
    """What a plan wants on its hosts, and what is so already."""

    record: Record
    specs: dict[str, list[Spec]]
    looks: dict[str, dict[str, Any]]
    same: frozenset[tuple[str, str]]
    """Host and name of what is there and equal."""

    @property
    def missing(self) -> list[tuple[str, Spec]]:
        """What is to be started, with its host, the board first. What has completed is as it should be."""
        return [(host, spec) for host, found in self.specs.items() for spec in found if self._to_start(host, spec.name)]

    @property
    def stale(self) -> dict[str, list[str]]:
        """What is to be ended, by host."""
        found = {host: [name for name in look["specs"] if (host, name) not in self.same] for host, look in self.looks.items()}
        return {host: names for host, names in found.items() if names}

    def plans(self, host: str, name: str) -> bool:
        """Whether `name` belongs on `host`."""
        return any(spec.name == name for spec in self.specs.get(host, []))

    def _to_start(self, host: str, name: str) -> bool:
        look = self.looks[host]
        state = look["states"].get(name)
        return (host, name) not in self.same or (name not in look["alive"] and (state is None or state["state"] != "complete"))


class SshLauncher:
    """Runs on hosts behind SSH. Implements swarmtrain.launchers.base.Launcher."""

    kind = RunnerType.pdsh

    def __init__(self) -> None:
        self._connections = Connections()
        self._index = Index(self.kind, self._connections)

    @property
    def where(self) -> str:
        """The hosts of the run."""
        return "its hosts"

    def inventory(self) -> Inventory:
        """Return this machine, which is what a config without hosts means."""
        return inventory(RunnerConfig(runner_type=self.kind))

    def check(self, plan: Plan) -> list[Finding]:
        """Ask each host whether it has what a node needs."""
        with self._team(plan) as team:
            up = plan.run in self.runs()
            return checks.findings(plan, team, ports=() if up else (plan.master_port, plan.master_port + 1))

    @in_state()
    def changes(self, plan: Plan) -> list[Act]:
        """Return what `up` would do."""
        with self._all_hosts(plan) as team:
            wanted = _compare(plan, team, self._record(plan.run))
        ends = [
            Act("end", f"{name} on {host}", "is not in the plan")
            for host, names in wanted.stale.items()
            for name in names
            if not wanted.plans(host, name)
        ]
        starts = []
        for host, spec in wanted.missing:
            there = spec.name in wanted.looks[host]["specs"]
            cause = "has changed, or has ended" if there else "is not there"
            starts.append(Act("start", f"{spec.name} on {host}", cause, spec.name in wanted.looks[host]["alive"]))
        return [*ends, *starts]

    @in_state()
    def up(self, plan: Plan, say: Say) -> None:
        """Start, restart and end what differs from `plan`. Raises SwarmtrainError."""
        with self._all_hosts(plan) as team, _locked(team, plan.run, say):
            wanted = _compare(plan, team, self._record(plan.run))
            first = not any(look["mark"] for look in wanted.looks.values())
            try:
                if self.kind is RunnerType.pdsh_docker:
                    pull(plan, team, [host for host, found in wanted.specs.items() if found], say)
                self._reconcile(plan, team, wanted, say)
            except BaseException:
                if first:
                    self._undo(team, plan.run)
                raise

    def _reconcile(self, plan: Plan, team: Team, wanted: Wanted, say: Say) -> None:
        run, record = plan.run, wanted.record
        leaving = [host for host, look in wanted.looks.items() if look["mark"] and host not in wanted.specs]
        # Until all is done, the index has those that leave too: an `up` that is cut off here is still found whole.
        for host in record.pythons.keys() - wanted.looks.keys():
            say(f"{host} cannot be reached; what is there is ended by a later command that reaches it")
        pythons = {**record.pythons, **{host: team.python(host) for host in leaving}}
        self._index.write(run, replace(record, pythons=pythons))
        files = _files(plan, record)
        team.each(lambda host: host.ask("put", run=run, files=files), list(wanted.specs))
        stale = wanted.stale
        team.each(lambda host: host.ask("end", within=_patience(record), run=run, names=stale[host.name], grace=record.stop_grace), stale)
        _keep(team, run, leaving)
        for host, names in stale.items():
            if gone := [name for name in names if not wanted.plans(host, name)]:
                team.hosts[host].ask("forget", run=run, names=gone)
                say(f"{', '.join(gone)} removed from {host}")
        team.each(lambda host: host.ask("remove", run=run), leaving)
        self._index.write(run, record)
        missing = wanted.missing
        if any(spec.name == RENDEZVOUS for _, spec in missing):
            team.each(lambda host: host.ask("put_old_events_aside", run=run), list(wanted.specs))
        for first in (True, False):
            now = {host: [asdict(spec) for at, spec in missing if at == host and (spec.name == RENDEZVOUS) is first] for host, _ in missing}
            now = {host: found for host, found in now.items() if found}
            team.each(lambda host, now=now: host.ask("launch", run=run, specs=now[host.name]), list(now))  # type: ignore[misc]
            for host, found in now.items():
                say(f"{', '.join(spec['name'] for spec in found)} started on {host}")
        if any(spec.name == RENDEZVOUS for _, spec in missing):
            _await_board(team.hosts[record.board], run)

    def _undo(self, team: Team, run: str) -> None:
        """Leave nothing of a first `up`. A host that cannot be asked now keeps what it has, and the index says so."""
        _, failed = team.tried(lambda host: _end_all(host, run))
        if failed:
            with contextlib.suppress(RunNotFound):
                self._index.write(run, self._index.read(run).on(list(failed)))
        else:
            self._index.forget(run)

    @in_state()
    def deployed(self, run: str) -> tuple[Config, Cargo]:
        """Return what the run was brought up with, from the first host that tells. Raises RunNotFound, HostError."""
        record, team = self._index.team(run)
        names = ["deployed.json", *(f"code/{name}" for name in record.code), *(f"secrets/{name}" for name in record.secrets)]
        with team:
            failed: HostError | None = None
            for host in team.hosts.values():
                try:
                    found = {name: base64.b64decode(text) for name, text in host.ask("get", run=run, names=names).items()}
                except HostError as error:
                    failed = error
                    continue
                code = tuple(CodeFile.of(name, found[f"code/{name}"]) for name in record.code)
                secrets = tuple(CodeFile.of(name, found[f"secrets/{name}"]) for name in record.secrets)
                return Config.from_json(found["deployed.json"].decode()), Cargo(code, secrets)
        raise failed or RunNotFound("has no hosts", place=f"run {run}")

    @in_state()
    def runs(self) -> list[str]:
        """Return the names of the runs that were brought up from this machine, sorted."""
        return self._index.runs()

    @in_state()
    def leaving(self) -> list[str]:
        """Return the names of runs that were taken down, but for hosts that could not be reached."""
        return self._index.runs(leaving=True)

    def tasks(self, run: str) -> list[TaskState]:
        """Return how each process stands, nodes first; also those whose hosts cannot be reached. Raises RunNotFound."""
        record, team = self._index.team(run)
        with team:
            looks, failed = team.tried(lambda host: host.ask("look", run=run))
        states = []
        for name, host in {**record.nodes, RENDEZVOUS: record.board}.items():
            if host in failed:
                states.append(follow.unreachable(name, host, failed[host]))
            else:
                states.append(follow.task(name, host, looks[host]["states"].get(name)))
        return states

    def events(self, run: str, since: float | None = None) -> list[Event]:
        """Return the board's events so far. Raises RunNotFound, HostError."""
        record, team = self._index.team(run)
        with team:
            return [event for event in follow.events(team.hosts[record.board], run) if event.time >= (since or 0.0)]

    def watch(self, run: str) -> Iterator[Update]:
        """Yield what happens, until the verdict or the run's removal. Raises RunNotFound."""
        return follow.watch(*self._index.team(run), run)

    def logs(
        self,
        run: str,
        *,
        follow: bool,
        tail: int | None = None,
        since: float | None = None,
        node: str | None = None,
        say: Say | None = None,
    ) -> Iterator[LogLine]:
        """Yield the output of all nodes. Raises RunNotFound. `say` is told of hosts that do not answer."""
        from swarmtrain.launchers.ssh.follow import logs

        return logs(*self._index.team(run), run, follow=follow, tail=tail, since=since, node=node, say=say)

    @in_state()
    def stop(self, run: str, say: Say) -> None:
        """Let the ranks save and leave; the notice board stays, and `up` goes on from there. Raises RunNotFound, StackError."""
        record, team = self._index.team(run)
        with team, _locked(team, run, say):
            if failed := _end_nodes(team, run, record):
                raise _not_reached(failed, run, "stop")
        say(f"{run} stopped")

    @in_state()
    def down(self, run: str, say: Say) -> None:
        """End everything and remove the run; events and logs come here first. Raises RunNotFound.

        What is on a host that cannot be reached stays, and StackError says so: another `down` ends it when it is back.
        """
        record, team = self._index.team(run)
        with team, _locked(team, run, say):
            failed = _end_nodes(team, run, record)
            reached = [host for host in team.hosts if host not in failed]
            team.each(lambda host: host.ask("end", within=_patience(record), run=run, names=None, grace=_GOODBYE), reached)
            _keep(team, run, reached)
            team.each(lambda host: host.ask("remove", run=run), reached)
            if failed:
                self._index.write(run, record.on(list(failed)))
                raise _not_reached(failed, run, "down")
            self._index.forget(run)
        say(f"{run} removed; its events and logs are in {kept.directory(run)}")

    def _record(self, run: str) -> Record | None:
        with contextlib.suppress(RunNotFound):
            return self._index.read(run)
        return None

    def _all_hosts(self, plan: Plan) -> Team:
        """Return the hosts of the plan, and those that the run has now."""
        before = self._record(plan.run)
        return self._team(plan, before.pythons if before else {})

    def _team(self, plan: Plan, before: dict[str, str] | None = None) -> Team:
        pythons = {**(before or {}), **{node.host: _python(plan.config.runner) for node in plan.nodes}}
        return self._connections.to([*dict.fromkeys([*(node.host for node in plan.nodes), *pythons])], pythons)


class SshDockerLauncher(SshLauncher):
    """The same, each process in a container."""

    kind = RunnerType.pdsh_docker


def inventory(runner: RunnerConfig) -> Inventory:
    """Return the hosts that the config lists, else this machine; GPUs are asked for where nothing else says the slots.

    Raises HostError.
    """
    hosts = runner.hosts or (HERE,)
    names = [host.split()[0] for host in hosts]
    silent = [name for name, host in zip(names, hosts, strict=True) if not (host_slots(host) or runner.default_gpu_count)]
    with connect(names, dict.fromkeys(names, _python(runner))) as team:
        facts = team.each(lambda host: host.ask("facts"), silent)
    gpus = {name: {runner.swarm.generic_resource: found["gpus"]} for name, found in facts.items()}
    origin = "the hosts that the config lists, over SSH" if runner.hosts else "this machine"
    return Inventory(origin, tuple(Machine(host=name, resources=gpus.get(name, {})) for name in names))


def _python(runner: RunnerConfig) -> str:
    return runner.python or ("python3" if runner.runner_type is RunnerType.pdsh_docker else sys.executable)


@contextlib.contextmanager
def _locked(team: Team, run: str, say: Say) -> Iterator[None]:
    """Hold the only right to change the run, on the first of its hosts that answers; it ends with the connection."""
    who = f"process {os.getpid()} on {socket.gethostname()}"
    holder = _first_that_answers(team, run, who)
    told = False
    while holder[1]:
        if not told:
            say(f"waiting for another swarmtrain that changes {run}: {holder[1]}")
            told = True
        time.sleep(_LOCK_EVERY)
        holder = (holder[0], holder[0].ask("lock", run=run, who=who))
    try:
        yield
    finally:
        with contextlib.suppress(HostError):
            holder[0].ask("unlock", run=run)


def _first_that_answers(team: Team, run: str, who: str) -> tuple[Host, str]:
    failed: HostError | None = None
    for host in team.hosts.values():
        try:
            return host, host.ask("lock", run=run, who=who)
        except HostError as error:
            failed = failed or error
    raise failed or RunNotFound("has no hosts", place=f"run {run}")


def _compare(plan: Plan, team: Team, before: Record | None) -> Wanted:
    """Return what the plan wants, with what its hosts and those that leave say."""
    run, runner = plan.run, plan.config.runner
    cwd = before.cwd if before else str(Path.cwd())
    planned = list(dict.fromkeys(node.host for node in plan.nodes))
    looks, lost = team.tried(lambda host: host.ask("look", run=run))
    for host in lost.keys() & planned:
        raise lost[host]
    facts = team.each(lambda host: host.ask("facts", cwd=cwd), planned)
    board = planned[0]
    mark = looks[board]["mark"]
    stays = RENDEZVOUS in looks[board]["alive"] and mark is not None and next(iter(mark["pythons"])) == board
    address = Record.of(mark).address if stays else address_of(runner, planned[0], facts)
    record = Record(
        # A host that is to leave and cannot be reached is asked again by whatever changes the run next.
        pythons={name: team.python(name) for name in (*planned, *lost)},
        nodes={node.name: node.host for node in plan.nodes},
        address=address,
        store_port=plan.master_port,
        board_port=plan.master_port + 1,
        cwd=cwd,
        stop_grace=runner.stop_grace,
        code=tuple(item.name for item in plan.cargo.code),
        secrets=tuple(item.name for item in plan.cargo.secrets),
    )
    there = {
        name: There(
            PurePosixPath(looks[name]["path"]), cwd if facts[name]["cwd"] else facts[name]["home"], facts[name]["gpus"], facts[name]["user"]
        )
        for name in planned
    }
    wanted = specs(plan, record, there)
    same = frozenset(
        (host, spec.name)
        for host, found in wanted.items()
        for spec in found
        if stays and looks[host]["specs"].get(spec.name) == asdict(spec) and looks[host]["states"].get(spec.name)
    )
    return Wanted(record, wanted, looks, same)


def address_of(runner: RunnerConfig, first: str, facts: dict[str, dict[str, Any]]) -> str:
    """Return where the others find the host `first`: as the config says, else where SSH found it."""
    entry = next((host for host in runner.hosts or () if host.split()[0] == first), first)
    if given := runner.master_addr or host_address(entry):
        return given
    others = [found["address"] for name, found in facts.items() if name != first and found["address"]]
    if first == HERE and others:
        with socket.socket(socket.AF_INET6 if ":" in others[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((others[0], 1))
            return str(probe.getsockname()[0])
    return "127.0.0.1" if first == HERE else facts[first]["address"] or first


def _files(plan: Plan, record: Record) -> dict[str, tuple[str, int]]:
    """Return what travels to each host, the mark last but one."""
    cargo = plan.cargo
    files = {f"secrets/{item.name}": (item.content, SECRET) for item in cargo.secrets}
    files |= {f"code/{item.name}": (item.content, OPEN) for item in cargo.code}
    files |= {"deployed.json": (plan.config.to_json().encode(), SECRET), "config.json": (plan.config.resolved().to_json().encode(), OPEN)}
    files |= {MARK: (record.to_json().encode(), SECRET)}
    return {name: (base64.b64encode(content).decode(), mode) for name, (content, mode) in files.items()}


def _patience(record: Record) -> float:
    return record.stop_grace + _AFTER_GRACE


def _end_nodes(team: Team, run: str, record: Record) -> dict[str, HostError]:
    """End the nodes first: ranks that save on their way out still talk to the board. Return the hosts that could not be asked."""

    def end(host: Host) -> None:
        look = host.ask("look", run=run)
        names = [name for name in look["specs"] if name != RENDEZVOUS]
        host.ask("end", within=_patience(record), run=run, names=names, grace=record.stop_grace)

    return team.tried(end)[1]


def _end_all(host: Host, run: str) -> None:
    host.ask("end", run=run, names=None, grace=0.0)
    host.ask("remove", run=run)


def _not_reached(failed: dict[str, HostError], run: str, verb: str) -> StackError:
    reasons = "; ".join(f"{name}: {error.message}" for name, error in failed.items())
    return StackError(f"what is there goes on: {reasons}", place=f"run {run}", hint=f"swarmtrain {verb} {run} again when it can be reached")


def _await_board(host: Host, run: str) -> None:
    """Return when the run's notice board speaks. Raises StackError if it ends again and again instead: no budget ends a run without one."""
    end = time.monotonic() + _BOARD_SPEAKS_WITHIN
    while time.monotonic() < end and not follow.events(host, run):
        state = host.ask("look", run=run)["states"].get(RENDEZVOUS)
        if state and state["state"] == "failed" and state["restarts"] >= _BOARD_TRIES:
            said = [line.text for line in follow.printed(host, run) if line.node == RENDEZVOUS and line.text.strip()]
            reason = next((text for text in reversed(said) if not _OF_DOCKER.match(text)), f"exit code {state['exit_code']}")
            raise StackError(reason, place=f"rendezvous on {host.name}", hint="the nodes would not start either")
        time.sleep(_LOCK_EVERY)


def _keep(team: Team, run: str, hosts: Sequence[str]) -> None:
    """Bring events and logs here before they go, beside what is kept of earlier times."""
    found = team.each(lambda host: (follow.printed(host, run), follow.lines_of(host, run, EVENTS)), list(hosts))
    kept.directory(run).mkdir(parents=True, exist_ok=True)
    for lines, events in found.values():
        for node in {line.node for line in lines}:
            with (kept.directory(run) / f"{node}.log").open("a", encoding="utf-8") as file:
                file.writelines(
                    f"{head(line.time)}{f'[rank {line.rank}] ' if line.rank is not None else ''}{line.text}\n"
                    for line in lines
                    if line.node == node
                )
        if events:
            with (kept.directory(run) / EVENTS).open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in events)
