"""The local launcher: the nodes of a run as processes on this machine, no Docker, no root.

Each node is a supervisor with the same environment as under Swarm, and they meet at a real rendezvous on loopback ports.
What Swarm does for containers, a keeper does for each of them. A run lives on when the launcher ends; any later one
finds it again by its folder.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from swarmtrain.config import Config
from swarmtrain.errors import RunNotFound
from swarmtrain.host.spec import Spec
from swarmtrain.launchers.base import Act, Finding, LogLine, Say, TaskState, Update
from swarmtrain.launchers.local import follow
from swarmtrain.launchers.local.folder import Facts, RunFolder, in_state, local_runs
from swarmtrain.plan import Cargo, Inventory, Machine, Plan
from swarmtrain.render.command import MODULE, Place, board_env, node_env
from swarmtrain.wire import RENDEZVOUS, Event

_MOST_NODES = 64
_GOODBYE = 5.0
_LOOPBACK = "127.0.0.1"
_GPUS = Path("/proc/driver/nvidia/gpus")


class LocalLauncher:
    """Runs on this machine. Implements swarmtrain.launchers.base.Launcher."""

    @property
    def where(self) -> str:
        """This machine."""
        return "this machine"

    def inventory(self) -> Inventory:
        """Return as many machines as anybody may want: all of them are this one."""
        return Inventory("this machine", tuple(Machine(host=f"local{index}") for index in range(_MOST_NODES)))

    def check(self, plan: Plan) -> list[Finding]:
        """Look for torch, and for more ranks than cores."""
        findings = []
        if importlib.util.find_spec("torch") is None:
            hint = "pip install 'swarmtrain[train]'"
            findings.append(Finding("this machine", f"{sys.executable} cannot find torch, and ranks run in it", hint))
        cores = len(os.sched_getaffinity(0))
        if plan.world_size > cores and not _gpus():
            findings.append(Finding("this machine", f"{plan.world_size} ranks will share {cores} cores", fatal=False))
        return findings

    @in_state()
    def up(self, plan: Plan, say: Say) -> None:
        """Start, restart and end what differs from `plan`. Raises SwarmtrainError."""
        folder = RunFolder(plan.run)
        with folder.locked(say):
            first = not folder.exists
            try:
                self._reconcile(folder, plan, say)
            except BaseException:
                if first:
                    folder.end(folder.names(), 0.0)
                    folder.remove()
                raise

    @in_state()
    def changes(self, plan: Plan) -> list[Act]:
        """Return what `up` would do."""
        folder = RunFolder(plan.run)
        there = folder.names() if folder.exists else []
        # Looked at first: what another command starts meanwhile is then not there yet, instead of there and different.
        alive = {name for name in there if folder.alive(name)}
        _, wanted, same = _compare(folder, plan)
        ends = [Act("end", name, "is not in the plan") for name in there if name not in wanted]
        missing = [name for name in wanted if name not in same or _idle(folder, name)]
        causes = {name: "has changed, or has ended" if name in there else "is not there" for name in missing}
        return [*ends, *(Act("start", name, cause, name in alive) for name, cause in causes.items())]

    def _reconcile(self, folder: RunFolder, plan: Plan, say: Say) -> None:
        facts, wanted, same = _compare(folder, plan)
        stale = [name for name in folder.names() if name not in same]
        folder.write(plan, facts)
        if stale:
            folder.end(stale, facts.stop_grace)
        for name in stale:
            if name not in wanted:
                say(f"{name} removed")
                folder.forget(name)
        if RENDEZVOUS not in same:
            folder.put_old_events_aside()
        for name in sorted(wanted, key=lambda name: name != RENDEZVOUS):
            if name not in same or _idle(folder, name):
                folder.launch(wanted[name])
                say(f"{name} started, log in {folder.log(name)}")

    @in_state()
    def deployed(self, run: str) -> tuple[Config, Cargo]:
        """Return what the run was brought up with. Raises RunNotFound."""
        return RunFolder(run).read()

    @in_state()
    def runs(self) -> list[str]:
        """Return the names of the runs on this machine, sorted."""
        return local_runs()

    def leaving(self) -> list[str]:
        """Return nothing: a run is there until all of it has ended."""
        return []

    def tasks(self, run: str) -> list[TaskState]:
        """Return how each process stands, nodes first. Raises RunNotFound."""
        folder = RunFolder(run)
        hosts = folder.facts().hosts
        states = []
        for name in folder.names():
            state = folder.state(name)
            host = hosts.get(name, socket.gethostname())
            if state is None:
                states.append(TaskState(name, host, "starting"))
                continue
            reason = f"exit code {state.exit_code}" if state.exit_code else ""
            states.append(TaskState(name, host, state.state, reason, state.exit_code))
        return states

    def events(self, run: str, since: float | None = None) -> list[Event]:
        """Return the board's events so far. Raises RunNotFound."""
        return follow.events(_existing(run), since)

    def watch(self, run: str) -> Iterator[Update]:
        """Yield what happens, until the verdict or the run's removal. Raises RunNotFound."""
        return follow.watch(_existing(run), lambda: self._tasks_or_none(run))

    def _tasks_or_none(self, run: str) -> list[TaskState]:
        try:
            return self.tasks(run)
        except RunNotFound:
            return []

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
        """Yield the output of all nodes. Raises RunNotFound. There is nothing to `say`: files can always be read."""
        from swarmtrain.launchers.local.follow import logs

        return logs(_existing(run), follow=follow, tail=tail, since=since, node=node)

    @in_state()
    def stop(self, run: str, say: Say) -> None:
        """Let the ranks save and leave; the notice board stays, and `up` goes on from there. Raises RunNotFound."""
        folder = _existing(run)
        with folder.locked(say):
            _end_nodes(folder)
        say(f"{run} stopped")

    @in_state()
    def down(self, run: str, say: Say) -> None:
        """End everything and remove the run; events and logs stay in its folder. Raises RunNotFound."""
        folder = _existing(run)
        with folder.locked(say):
            _end_nodes(folder)
            folder.end([RENDEZVOUS], _GOODBYE)
            folder.remove()
        say(f"{run} removed; its events and logs are in {folder.path}")


def _end_nodes(folder: RunFolder) -> None:
    """The nodes first: ranks that save on their way out still talk to the board."""
    folder.end([name for name in folder.names() if name != RENDEZVOUS], folder.facts().stop_grace)


def _existing(run: str) -> RunFolder:
    folder = RunFolder(run)
    folder.facts()
    return folder


def _idle(folder: RunFolder, name: str) -> bool:
    """Whether `name` was stopped, or its keeper is gone; what has completed is as it should be."""
    state = folder.state(name)
    return not folder.alive(name) and (state is None or state.state != "complete")


def _compare(folder: RunFolder, plan: Plan) -> tuple[Facts, dict[str, Spec], set[str]]:
    """Return the run's facts, what the plan wants by name, and the names of those that are there and equal."""
    board_is_up = folder.alive(RENDEZVOUS)
    facts = _facts(plan, folder.facts() if board_is_up else None)
    wanted = {spec.name: spec for spec in _specs(folder, plan, facts)}
    same = {name for name, spec in wanted.items() if board_is_up and folder.spec(name) == spec and folder.state(name) is not None}
    return facts, wanted, same


def _facts(plan: Plan, before: Facts | None) -> Facts:
    store, board = (before.store_port, before.board_port) if before else _free_ports()
    return Facts(
        store_port=store,
        board_port=board,
        cwd=before.cwd if before else str(Path.cwd()),
        stop_grace=plan.config.runner.stop_grace,
        hosts={node.name: node.host for node in plan.nodes},
        code=[item.name for item in plan.cargo.code],
        secrets=[item.name for item in plan.cargo.secrets],
    )


def _specs(folder: RunFolder, plan: Plan, facts: Facts) -> Iterator[Spec]:
    place = Place(
        board_host=_LOOPBACK,
        bind=_LOOPBACK,
        config=str(folder.path / "config.json"),
        code_dir=folder.path / "code",
        secrets_dir=folder.path / "secrets",
        log_dir=str(folder.path / "logs"),
        store_port=facts.store_port,
        board_port=facts.board_port,
    )
    content = "-".join([plan.config.resolved().digest, *(item.digest for item in (*plan.cargo.code, *plan.cargo.secrets))])
    argv = [sys.executable, "-m", MODULE]
    errors = str(folder.log(RENDEZVOUS))
    yield Spec(RENDEZVOUS, [*argv, "rendezvous"], board_env(plan, place), facts.cwd, str(folder.events), errors, "")
    for index, node in enumerate(plan.nodes):
        log = str(folder.log(node.name))
        env = {**_share(plan, index), **node_env(plan, node, place)}
        yield Spec(node.name, [*argv, "node"], env, facts.cwd, log, log, content)


def _share(plan: Plan, index: int) -> dict[str, str]:
    """Return what node `index` may use of this one machine: its part of the cores, and of the GPUs if there are enough.

    Reckoned with max_nodes, so that scaling leaves the others as they are.
    """
    slots = max(node.slots for node in plan.nodes)
    share = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // (slots * plan.max_nodes)))}
    if "OMP_NUM_THREADS" in os.environ:
        share = {}
    gpus = _gpus()
    if plan.nodes[index].gpus:
        share["CUDA_VISIBLE_DEVICES"] = ",".join(plan.nodes[index].gpus)
    elif len(gpus) >= slots * plan.max_nodes:
        share["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slots * index : slots * (index + 1)])
    return share


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device]
    return [str(index) for index in range(len(list(_GPUS.glob("*"))))]


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind((_LOOPBACK, 0))
        return int(first.getsockname()[1]), int(second.getsockname()[1])
