"""The Docker launcher: the nodes of a run as containers on one engine that need not be in a swarm, most often one node.

The containers are those that `docker compose` makes of the file that `generate` writes, by name and label: whichever has
started a run, the other can go on with it. What Swarm does for tasks, the engine's restart policy does for each of them.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from swarmtrain.config import Config
from swarmtrain.config.runner import GpuMode
from swarmtrain.errors import EngineError, RunNotFound, StackError
from swarmtrain.images.transfer import obtain
from swarmtrain.launchers import logs as texts
from swarmtrain.launchers.base import Act, Finding, LogLine, Say, TaskState, Update
from swarmtrain.launchers.docker import bodies, follow, look
from swarmtrain.launchers.docker.look import Container
from swarmtrain.launchers.engine import Engine, gone
from swarmtrain.launchers.local.folder import RunFolder, in_state
from swarmtrain.launchers.record import keep
from swarmtrain.plan import Cargo, CodeFile, Inventory, Machine, Plan
from swarmtrain.render.compose import NETWORK, Stack
from swarmtrain.render.engine import containers
from swarmtrain.render.mounts import WORKSPACE
from swarmtrain.wire import CONFIG_PATH, LABEL_CONTAINER, LABEL_HOSTS, LABEL_SECRETS, RENDEZVOUS, Event

_MOST_NODES = 64
_GOODBYE = 10
_MARGIN = 60.0


class DockerLauncher:
    """Containers on one engine. Implements swarmtrain.launchers.base.Launcher.

    Two commands that change a run from one machine do so one at a time; from two machines, containers' names keep them apart.
    """

    def __init__(self, address: str | None = None) -> None:
        """Connect to the engine at `address`, or to the one that docker itself would use. Raises EngineError."""
        self._engine = Engine(address)
        self._up_since: dict[str, float] = {}

    @property
    def where(self) -> str:
        """The engine."""
        return f"the engine at {self._engine.endpoint}"

    def inventory(self) -> Inventory:
        """Return as many machines as anybody may want: all of them are the engine's."""
        return Inventory(self.where, tuple(Machine(host=f"docker{index}") for index in range(_MOST_NODES)))

    def check(self, plan: Plan) -> list[Finding]:
        """Look for the image, a runtime for GPUs, and names that are taken."""
        facts, image = self._engine.get("/info"), plan.config.runner.docker_config.docker_container
        found = []
        if plan.config.runner.swarm.gpu is not GpuMode.none and "nvidia" not in (facts.get("Runtimes") or {}):
            hint = "install the NVIDIA Container Toolkit there, or -o runner.swarm.gpu=none"
            found.append(Finding(self.where, "the config asks for GPUs, and it has no runtime nvidia", hint))
        if not self._image(plan):
            found.append(Finding(self.where, f"it does not have the image {image}, which will be pulled", fatal=False))
        if plan.world_size > facts["NCPU"] and plan.config.runner.swarm.gpu is GpuMode.none:
            found.append(Finding(self.where, f"{plan.world_size} ranks will share {facts['NCPU']} cores", fatal=False))
        return found

    def changes(self, plan: Plan) -> list[Act]:
        """Return what `up` would do. Raises EngineError, StackError."""
        there = look.containers(self._engine, plan.run)
        wanted = containers(plan)
        same = _same(wanted, there, self._image(plan))
        services = wanted.document["services"]
        ends = [Act("remove", name, "is not in the plan") for name in there if name not in services]
        starts = []
        for name in _board_first(wanted):
            if name not in there:
                starts.append(Act("start", name, "is not there"))
            elif name not in same:
                starts.append(Act("replace", name, "has changed, or its board has", there[name].alive))
            elif not there[name].alive and not there[name].done:
                starts.append(Act("start", name, "has ended"))
        return [*ends, *starts]

    @in_state()
    def up(self, plan: Plan, say: Say) -> None:
        """Create, replace, start and remove what differs from `plan`. Raises SwarmtrainError."""
        self._up_since[plan.run] = time.time()
        image = obtain(self._engine.client, plan.config.runner.docker_config.docker_container, say)["Id"]
        wanted = containers(plan)
        with RunFolder(plan.run).locked(say):
            first = not look.containers(self._engine, plan.run)
            try:
                self._reconcile(wanted, image, say)
            except BaseException:
                if first:
                    self._take_down(plan.run, lambda line: None)
                raise

    def _reconcile(self, wanted: Stack, image: str, say: Say) -> None:
        there = look.containers(self._engine, wanted.name)
        same = _same(wanted, there, image)
        stale = [container for name, container in there.items() if name not in same]
        self._end(wanted.name, stale)
        for container in stale:
            self._engine.delete(f"/containers/{container.id}?force=1&v=1")
            if container.node not in wanted.document["services"]:
                say(f"{container.node} removed")
        self._make_network(wanted)
        for name in _board_first(wanted):
            if name not in same:
                made = self._create(wanted, name, image)
            elif not same[name].alive and not same[name].done:
                made = same[name].id
            else:
                continue
            self._engine.post(f"/containers/{made}/start", {})
            say(f"{name} started")

    def _create(self, wanted: Stack, name: str, image: str) -> str:
        """Create a service's container with its files, and return its id."""
        title = wanted.document["services"][name]["container_name"]
        made: str = self._engine.create("/containers/create", bodies.container(wanted, name, image), {"name": title})["Id"]
        if found := bodies.files(wanted, name):
            self._engine.put_files(made, found)
        return made

    def _make_network(self, wanted: Stack) -> None:
        body = bodies.network(wanted)
        if body["Name"] not in {item["Name"] for item in self._engine.listing("/networks")}:
            self._engine.create("/networks/create", body)

    def deployed(self, run: str) -> tuple[Config, Cargo]:
        """Return what the run was brought up with, from its containers. Raises RunNotFound, StackError."""
        there = self._existing(run)
        node = next((container for name, container in there.items() if name != RENDEZVOUS), None)
        if node is None:
            raise StackError("it has no nodes, only what an unfinished removal left", place=f"run {run}", hint=f"swarmtrain down {run}")
        config = Config.from_json(self._engine.file(node.id, CONFIG_PATH).decode())
        hosts = json.loads(there[RENDEZVOUS].labels.get(LABEL_HOSTS, "null")) if RENDEZVOUS in there else None
        runner = config.runner.model_copy(update={"hosts": tuple(hosts) if hosts else None})
        code = [path.name for path in (runner.script, *runner.code)]
        digests = json.loads(node.labels[LABEL_SECRETS])
        cargo = Cargo(
            tuple(CodeFile.of(name, self._engine.file(node.id, str(WORKSPACE / name))) for name in code),
            tuple(CodeFile(name, self._engine.file(node.id, f"/run/secrets/{name}"), digest) for name, digest in digests.items()),
        )
        return config.model_copy(update={"runner": runner}), cargo

    def runs(self) -> list[str]:
        """Return the names of the runs on this engine, sorted."""
        return look.runs(self._engine)

    def leaving(self) -> list[str]:
        """Return nothing: a run is there until its last container is removed."""
        return []

    def tasks(self, run: str) -> list[TaskState]:
        """Return how each container stands, nodes first. Raises RunNotFound."""
        return [container.task() for container in self._existing(run).values()]

    def events(self, run: str, since: float | None = None) -> list[Event]:
        """Return the board's events so far. Raises RunNotFound."""
        board = self._existing(run).get(RENDEZVOUS)
        lines = texts.read(self._engine, board.source, RENDEZVOUS, since=since) if board else []
        keep(run, lines)
        return [event for line in lines if (event := line.event())]

    def watch(self, run: str) -> Iterator[Update]:
        """Yield what happens, until the verdict or the run's removal. Raises RunNotFound."""
        self._existing(run)
        since = self._up_since.get(run, time.time())
        return follow.watch(self._engine, run, lambda: look.containers(self._engine, run), since)

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
        """Yield the output of all nodes. Raises RunNotFound."""
        from swarmtrain.launchers.docker.follow import logs

        there = [container for name, container in self._existing(run).items() if name != RENDEZVOUS and node in (None, name)]
        if follow:
            return logs(self._engine, run, lambda: look.containers(self._engine, run), since=since, tail=tail, node=node)
        found = [texts.read(self._engine, container.source, container.node, tail=tail, since=since) for container in there]
        return (line.log_line() for line in heapq.merge(*found, key=lambda line: line.time))

    @in_state()
    def stop(self, run: str, say: Say) -> None:
        """Let the ranks save and leave; the notice board stays, and `up` goes on from there. Raises RunNotFound."""
        self._existing(run)
        with RunFolder(run).locked(say):
            self._end(run, [container for name, container in self._existing(run).items() if name != RENDEZVOUS])
        say(f"{run} stopped")

    @in_state()
    def down(self, run: str, say: Say) -> None:
        """End everything and remove the run; named volumes stay. Raises RunNotFound."""
        self._existing(run)
        with RunFolder(run).locked(say):
            self._take_down(run, say)
        say(f"nothing of {run} is left")

    def _take_down(self, run: str, say: Say) -> None:
        there = look.containers(self._engine, run)
        self._end(run, list(there.values()))
        for container in there.values():
            self._engine.delete(f"/containers/{container.id}?force=1&v=1")
            say(f"{container.node} removed")
        self._engine.delete(f"/networks/{run}_{NETWORK}")

    def _end(self, run: str, there: list[Container]) -> None:
        """Stop containers, each with its own grace, the nodes first: ranks that save still talk to the board. Keep what they said."""
        nodes = [container for container in there if container.node != RENDEZVOUS]
        for group in (nodes, [container for container in there if container.node == RENDEZVOUS]):
            alive = [container for container in group if container.alive]
            with ThreadPoolExecutor(max(1, len(alive))) as pool:
                list(pool.map(self._stop, alive))
            for container in group:
                keep(run, texts.read(self._engine, container.source, container.node))

    def _stop(self, container: Container) -> None:
        grace = _GOODBYE
        with suppress(EngineError):
            grace = int(self._engine.get(f"{container.source}/json")["Config"]["StopTimeout"])
        patient = Engine(self._engine.address, timeout=grace + _MARGIN)
        patient.post(f"{container.source}/stop?t={grace}", {})

    def _existing(self, run: str) -> dict[str, Container]:
        there = look.containers(self._engine, run)
        if not there:
            known = ", ".join(self.runs()) or "none"
            raise RunNotFound(f"there is no run of this name on {self.where}; there is: {known}", place=f"run {run}")
        return there

    def _image(self, plan: Plan) -> str:
        """Return the id of the plan's image, empty if the engine does not have it."""
        try:
            return str(self._engine.get(f"/images/{plan.config.runner.docker_config.docker_container}/json")["Id"])
        except EngineError as error:
            if gone(error):
                return ""
            raise


def _board_first(wanted: Stack) -> list[str]:
    return sorted(wanted.document["services"], key=lambda name: name != RENDEZVOUS)


def _same(wanted: Stack, there: dict[str, Container], image: str) -> dict[str, Container]:
    """Return the containers that are as the plan says. Without its board none is: the run begins anew."""
    board = there.get(RENDEZVOUS)
    if board is None or not board.alive:
        return {}
    services = wanted.document["services"]
    found = {name: each for name, each in there.items() if name in services and each.image == image}
    return {name: each for name, each in found.items() if services[name]["labels"][LABEL_CONTAINER] == each.digest}
