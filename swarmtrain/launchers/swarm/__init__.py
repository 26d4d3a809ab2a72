"""The Swarm launcher: a plan becomes a stack of services, one for each node, on the swarm that DOCKER_HOST points to.

All it knows it reads from the swarm: whoever reaches a manager can go on where somebody else left off, and a stack that
plain `docker stack deploy` started is as good as one of its own.
"""

from __future__ import annotations

import base64
import heapq
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.errors import StackError
from swarmtrain.images import pin
from swarmtrain.launchers import logs
from swarmtrain.launchers.base import Finding, LogLine, Say, TaskState, Update
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.logs import Line
from swarmtrain.launchers.record import keep
from swarmtrain.launchers.swarm import checks, holders, observe, removal
from swarmtrain.launchers.swarm.follow import Scope, follow, manager
from swarmtrain.launchers.swarm.lock import Lock
from swarmtrain.launchers.swarm.patience import USUAL, Patience
from swarmtrain.launchers.swarm.reconcile import Ended, Step, reconcile
from swarmtrain.launchers.swarm.specs import Specs, specs
from swarmtrain.launchers.swarm.turn import Need
from swarmtrain.launchers.swarm.up import up
from swarmtrain.plan import Cargo, CodeFile, Inventory, Plan
from swarmtrain.render.compose import stack
from swarmtrain.render.mounts import WORKSPACE
from swarmtrain.wire import CONFIG_PATH, LABEL_HOSTS, NOTE, RENDEZVOUS, VERDICT, Event, Verdict


class SwarmLauncher:
    """Implements swarmtrain.launchers.base.Launcher; see there for what each method promises."""

    def __init__(self, address: str | None = None, patience: Patience = USUAL) -> None:
        """Connect to the engine at `address`, or to the one that docker itself would use. Raises EngineError."""
        self._engine, self._patience = Engine(address), patience
        self._up_since: dict[str, float] = {}

    @property
    def where(self) -> str:
        return f"the swarm at {self._engine.endpoint}"

    def inventory(self) -> Inventory:
        return observe.inventory(self._engine)

    def check(self, plan: Plan) -> list[Finding]:
        found = checks.findings(self._engine, plan)
        if any(finding.fatal for finding in found):
            return found
        return [*found, *checks.network_findings(self._specs(plan), observe.observe(self._engine, plan.run))]

    def changes(self, plan: Plan) -> list[Step]:
        """Return what `up` would do, in order; each step prints itself. Raises ImageError, StackError, EngineError."""
        return self._steps(self._specs(plan))

    def up(self, plan: Plan, say: Say) -> None:
        wanted = self._specs(plan)
        self._up_since[plan.run] = time.time()
        up(self._engine, _need(plan), lambda: self._steps(wanted), say, self._patience)

    def deployed(self, run: str) -> tuple[Config, Cargo]:
        services = observe.run_services(self._engine, run)
        nodes = [service for service in services if service.is_node]
        if not nodes:
            raise StackError("it has no nodes, only what an unfinished removal left", place=f"run {run}", hint=f"swarmtrain down {run}")
        container = nodes[0].spec["TaskTemplate"]["ContainerSpec"]
        files = {item["File"]["Name"]: item for item in container.get("Configs", [])}
        config = Config.from_json(self._content(files.pop(CONFIG_PATH)["ConfigID"]).decode())
        board = observe.board(services, run)
        hosts = json.loads(board.spec["Labels"].get(LABEL_HOSTS, "null")) if board else None
        runner = config.runner.model_copy(update={"hosts": tuple(hosts) if hosts else None})
        code = [(path.removeprefix(f"{WORKSPACE}/"), item) for path, item in files.items()]
        # The script comes first, the files beside it in the config's order, as a plan from the files themselves has them.
        order = [runner.script.name, *(path.name for path in runner.code)]
        cargo = Cargo(
            tuple(
                CodeFile(name, self._content(item["ConfigID"]), _digest(item["ConfigName"]))
                for name, item in sorted(code, key=lambda pair: order.index(pair[0]))
            ),
            tuple(CodeFile(item["File"]["Name"], b"", _digest(item["SecretName"])) for item in container.get("Secrets", [])),
        )
        return config.model_copy(update={"runner": runner}), cargo

    def runs(self) -> list[str]:
        return observe.runs(self._engine)

    def leaving(self) -> list[str]:
        return observe.leaving(self._engine)

    def tasks(self, run: str) -> list[TaskState]:
        services = observe.run_services(self._engine, run)
        found, hosts = observe.tasks(self._engine, run), observe.hosts(self._engine)
        states = [observe.task_state(_short(service, run), found, service, hosts) for service in services]
        return [*observe.stopping(found, services, hosts), *holders.told(self._engine, run, services, states)]

    def events(self, run: str, since: float | None = None) -> list[Event]:
        return self._events(observe.run_services(self._engine, run), run, since)

    def watch(self, run: str) -> Iterator[Update]:
        observe.run_services(self._engine, run)
        return follow(self._engine, run, Scope(since=self._up_since.get(run, time.time())), self._patience)

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
        services = [service for service in observe.run_services(self._engine, run) if node in (None, _short(service, run))]
        lines = self._lines(services, run, tail, since)
        if follow:
            return self._follow_lines(run, Scope(since, tail, lines, node), say)
        return (line.log_line() for line in lines if line.event() is None)

    def stop(self, run: str, say: Say) -> None:
        observe.run_services(self._engine, run)
        lock = Lock(self._engine, run, "stops it", self._patience)
        with lock.held(say):
            removal.stop(self._engine, run, observe.run_services(self._engine, run), say, lock.check)

    def down(self, run: str, say: Say) -> None:
        there = observe.observe(self._engine, run)
        if checks.foreign(list(there.services.values())) or (there.empty and run not in observe.leaving(self._engine)):
            raise observe.not_found(self._engine, run)
        lock = Lock(self._engine, run, "takes it down", self._patience)
        with lock.held(say):
            removal.take_down(self._engine, run, say, lock.check)
        say(f"nothing of {run} is left")

    def _steps(self, wanted: Specs) -> list[Step]:
        there = observe.observe(self._engine, wanted.stack)
        services = list(there.services.values())
        if checks.foreign(services):
            found = checks.foreign_finding(wanted.stack)
            raise StackError(found.message, place=found.place, hint=found.hint)
        return reconcile(wanted, there, self._ended(services, wanted.stack))

    def _specs(self, plan: Plan) -> Specs:
        wanted = stack(plan)
        images = {service["image"] for service in wanted.document["services"].values()}
        return specs(wanted, {image: pin(self._engine, image) for image in images})

    def _ended(self, services: list[observe.Service], run: str) -> Ended | None:
        """Return the run's verdict if its board has spoken it and left."""
        board = observe.board(services, run)
        task = observe.newest(observe.tasks(self._engine, run), board.id) if board and board.replicas else None
        if task is None or not task.over or task.desired != "shutdown":
            return None
        verdicts = [Verdict(**event.data) for event in self._events(services, run) if event.kind == VERDICT]
        return Ended(failed=not verdicts[-1].done, why=verdicts[-1].why) if verdicts else Ended(failed=True, why="its notice board is gone")

    def _events(self, services: list[observe.Service], run: str, since: float | None = None) -> list[Event]:
        board = observe.board(services, run)
        if board is None:
            return []
        old = observe.replaced(observe.tasks(self._engine, run), board.id)
        lines = logs.read(self._engine, board.source, RENDEZVOUS, since=since)
        keep(run, lines)
        # A run that was started again after its verdict has that one in its log still.
        found = [(line.event(), line.task) for line in lines]
        return [event for event, task in found if event is not None and not (event.kind == VERDICT and task in old)]

    def _lines(self, services: list[observe.Service], run: str, tail: int | None, since: float | None) -> list[Line]:
        """Return what there is of the services' logs, in the order of time."""
        with ThreadPoolExecutor(8, thread_name_prefix="logs") as pool:
            read = partial(logs.read, self._engine, tail=tail, since=since)
            found = list(pool.map(lambda service: read(service.source, _short(service, run)), services))
        return list(heapq.merge(*found, key=lambda line: line.time))

    def _follow_lines(self, run: str, scope: Scope, say: Say | None) -> Iterator[LogLine]:
        keep(run, scope.before)
        yield from (line.log_line() for line in scope.before if line.event() is None)
        for update in follow(self._engine, run, scope, self._patience):
            if isinstance(update, LogLine):
                yield update
            elif say and isinstance(update, Event) and update.kind == NOTE and update.data["node"] == manager(self._engine):
                say(f"{update.data['node']} {update.data['message']}")

    def _content(self, config: str) -> bytes:
        return base64.b64decode(self._engine.get(f"/configs/{config}")["Spec"]["Data"])


def _short(service: observe.Service, run: str) -> str:
    return service.name.removeprefix(f"{run}_")


def _need(plan: Plan) -> Need:
    swarm = plan.config.runner.swarm
    if swarm.gpu is not GpuMode.reserve:
        return Need(plan.run)
    return Need(plan.run, swarm.generic_resource, {node.constraint: node.slots for node in plan.nodes}, patient=not plan.probe)


def _digest(name: str) -> str:
    return name.rpartition("-")[2]
