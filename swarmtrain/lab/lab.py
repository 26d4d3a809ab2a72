"""The lab as one object: bring it up, break it, look at it, take it down. Any later process finds it again by its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from swarmtrain.errors import LabError
from swarmtrain.lab import DEFAULT_NAME, api, engines, fabric, registry, state
from swarmtrain.lab.checks import check_machine, check_root
from swarmtrain.lab.state import Description

Say = Callable[[str], None]


@dataclass(frozen=True)
class NodeStatus:
    """One line of `lab status`.

    `state` is up, dead or cut; `role` is manager or worker, "" in a bare lab; `link` is up, cut, or the rate it is held to;
    `pid` is the machine's init.
    """

    node: str
    state: str
    role: str
    link: str
    engine: str
    address: str
    pid: int | None


class Lab:
    """A lab of this machine, running or not. Methods raise LabError; those that change something need root."""

    def __init__(self, name: str = DEFAULT_NAME) -> None:
        state.check_name(name)
        self.name = name
        self._base = state.base_directory()
        self._directory = self._base / name
        self._own_disk = self._directory / "shared"

    @property
    def shared(self) -> Path:
        """The host's view of the disk that all nodes have at /mnt/shared."""
        description = state.read(self._directory)
        return Path(description.shared) if description else self._own_disk

    def check(self, engine: Path | None = None) -> None:
        """Raise LabError, with the way out, if this machine cannot host the lab."""
        check_machine(engine)
        state.check_directory(self._directory)
        fabric.check_kernel()

    def up(
        self, nodes: int, *, bare: bool = False, gpus: int = 0, engine: Path | None = None, shared: Path | None = None, say: Say
    ) -> None:
        """Bring up `nodes` engines, joined into a swarm whose manager is node0 unless the lab is to be `bare`, and a registry.

        `engine` is a directory that holds another dockerd and containerd, `shared` one that all nodes are to share. Each
        engine declares `gpus` GPUs that are not there, so that it can be seen who gets them.
        What is made is removed again if anything fails.
        A lab of this name whose engines are all dead is removed first; one that runs with as many nodes is left as it is.
        """
        self.check(engine)
        if not 1 <= nodes <= state.MAX_NODES:
            raise LabError(f"a lab has 1 to {state.MAX_NODES} nodes, not {nodes}", place="lab up --nodes")
        if gpus and bare:
            raise LabError("the engines of a bare lab have no settings before their owner gives them some", place="lab up --gpus")
        with state.locked(self._base):
            if self._runs_already(nodes, bare, gpus, say):
                return
            self._remove()
            try:
                self._make(replace(self._describe(nodes, bare, engine, shared), gpus=gpus), say)
            except BaseException:
                say("failed or interrupted: removing what was made")
                self._remove()
                raise
        self._introduce(bare, say)

    def down(self, *, keep_images: bool = False, say: Say) -> None:
        """Remove the lab and all its data; with the last lab of this machine go the images, unless they are to be kept."""
        check_root()
        with state.locked(self._base):
            found = state.read(self._directory)
            self._remove()
            say(f"lab {self.name}: removed" if found else f"lab {self.name}: there is none")
            self._remove_images(keep_images, say)
        state.remove_base_if_empty(self._base)

    def status(self) -> list[NodeStatus]:
        """Return how each node stands."""
        check_root()
        description = self._description()
        wires = fabric.wires(self.name)
        return [self._node_status(description, node, wires.get(node, "cut")) for node in description.nodes]

    def kill(self, node: str, *, say: Say) -> None:
        """Take the node's power: engine and containers are gone at once, no peer is told. Its disk stays."""
        description = self._living(node)
        engines.power_off(self._directory, description, node)
        say(f"{node}: power off; a swarm notices in about 15 s. `{self._command('start', node)}` boots it again")

    def start(self, node: str, *, say: Say) -> None:
        """Boot a node that was killed, with its data. Returns when its engine answers and, where there is a manager, it is ready."""
        description = self._known(node)
        if engines.machine(self._directory, node).pid is not None:
            raise LabError("runs already", place=node, hint=self._command("status"))
        engines.power_off(self._directory, description, node)  # what an engine that died by itself left behind
        fabric.connect(description, node)
        engines.boot(self._directory, description, node)
        engines.wait_until_up(self._directory, node)
        if description.bare:
            say(f"{node}: runs again")
            return
        if engines.machine(self._directory, description.nodes[0]).pid is None:
            say(f"{node}: runs again, and joins when the manager does")
            return
        engines.wait_until_ready(self._directory, description, [node])
        say(f"{node}: runs again and is ready in the swarm")

    def cut(self, node: str, *, say: Say) -> None:
        """Cut the node's network: it lives on, alone."""
        self._living(node)
        fabric.cut(self.name, node)
        say(f"{node}: cut off, its engine and containers run on. `{self._command('heal', node)}` brings the network back")

    def heal(self, node: str, *, say: Say) -> None:
        """Bring the node's network back, at full speed."""
        self._living(node)
        fabric.heal(self.name, node)
        say(f"{node}: network up, full speed")

    def slow(self, node: str, rate: str, *, say: Say) -> None:
        """Hold the node's network to `rate` (100mbit, 1gbit) in both directions."""
        self._living(node)
        fabric.slow(self.name, node, rate)
        say(f"{node}: network at {rate} in both directions. `{self._command('heal', node)}` takes that off")

    def env(self) -> dict[str, str]:
        """Return the environment that points Docker's tools at the engine of node0, the lab's manager."""
        return {"DOCKER_HOST": self.docker_host(self._description().nodes[0])}

    def docker_host(self, node: str) -> str:
        """Return the address of the node's engine, in DOCKER_HOST's form."""
        self._known(node)
        return f"unix://{engines.engine_socket(self._directory, node)}"

    def enter(self, node: str, *, folder: Path = Path("/")) -> list[str]:
        """Return the prefix that runs a command on the machine `node`, beside its engine, in `folder` if the machine has that."""
        self._living(node)
        pid = engines.machine(self._directory, node).pid
        there = folder if state.visible(folder) else Path("/")
        return ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={there}"]

    def environment_on(self, node: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` as a command on the machine `node` is to have it: Docker's tools use the machine's own engine."""
        self._known(node)
        elsewhere = ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
        return {**{name: value for name, value in environ.items() if name not in elsewhere}, "DOCKER_HOST": engines.OWN_SOCKET}

    def _describe(self, nodes: int, bare: bool, engine: Path | None, shared: Path | None) -> Description:
        subnet = state.choose_subnet(self.name, state.taken_subnets(self._base))
        names = tuple(f"node{index}" for index in range(nodes))
        disk = (shared or self._own_disk).absolute()
        return Description(self.name, subnet, names, str(disk), str(engine.absolute()) if engine else None, bare)

    def _make(self, description: Description, say: Say) -> None:
        self._directory.mkdir(parents=True)
        state.write(self._directory, description)
        self.shared.mkdir(parents=True, exist_ok=True)
        self.shared.chmod(0o1777)
        say(f"lab {self.name}: {len(description.nodes)} engines on {description.subnet}{', in no swarm' if description.bare else ''}")
        fabric.make(description)
        for node in description.nodes:
            engines.prepare(self._directory, description, node)
            fabric.connect(description, node)
            engines.boot(self._directory, description, node)
        registry.start(description, self._directory)
        engines.wait_until_all_up(self._directory, description)
        if not description.bare:
            engines.form_swarm(self._directory, description)
        state.write(self._directory, replace(description, ready=True))

    def _introduce(self, bare: bool, say: Say) -> None:
        driver = engines.wait_until_up(self._directory, "node0")["Driver"]
        if driver == "vfs":
            say("storage driver vfs, since overlay does not work on this disk: images take far more space and time")
        fate = ", and is deleted by `down`" if self.shared == self._own_disk else ""
        say(f"shared disk: {self.shared} here is /mnt/shared on every node{fate}")
        trusted = "which the engines do not trust before their daemon.json says so" if bare else "for images built and pushed from here"
        say(f"registry: {registry.REGISTRY}, {trusted}")
        say("next:")
        if bare:
            say(f"  {self._command('enter', 'node0')}")
            return
        say(f'  eval "$({self._command("env")})"')
        say(f"  swarmtrain image build . --tag {registry.REGISTRY}/swarmtrain:0.1 --push")

    def _command(self, verb: str, *arguments: str) -> str:
        """Return the command line that does `verb` to this lab."""
        option = [] if self.name == DEFAULT_NAME else ["--name", self.name]
        return " ".join(["swarmtrain", "lab", verb, *option, *arguments])

    def _runs_already(self, nodes: int, bare: bool, gpus: int, say: Say) -> bool:
        description = state.read(self._directory)
        if not description or not description.ready:
            return False
        running = [node for node in description.nodes if engines.machine(self._directory, node).pid is not None]
        if not running:
            say(f"lab {self.name}: all its engines are dead; removing it")
            return False
        what = f"{len(running)} of its {len(description.nodes)} engines run"
        if len(description.nodes) != nodes:
            raise LabError(f"it is up already: {what}", place=f"lab {self.name}", hint=self._command("down"))
        if description.bare != bare:
            kind = "bare" if description.bare else "a swarm"
            raise LabError(f"it is up already, and {kind}: {what}", place=f"lab {self.name}", hint=self._command("down"))
        if description.gpus != gpus:
            has = f"its engines have {description.gpus} GPUs each: {what}"
            raise LabError(f"it is up already, and {has}", place=f"lab {self.name}", hint=self._command("down"))
        say(f"lab {self.name}: {what} already ({', '.join(running)}); left as it is")
        return True

    def _remove(self) -> None:
        description = state.read(self._directory)
        if description:
            for node in description.nodes:
                engines.power_off(self._directory, description, node)
            registry.stop(self._directory)
            fabric.remove(self.name, "fabric")
            engines.remove_cgroups(self.name)
        if self._directory.exists():
            shutil.rmtree(self._directory)

    def _remove_images(self, keep: bool, say: Say) -> None:
        images = registry.store(self._base)
        if not images.exists() or state.all_labs(self._base):
            return
        if keep:
            say(f"images kept in {images} for the next lab")
            return
        shutil.rmtree(images)
        say("images removed with the last lab")

    def _node_status(self, description: Description, node: str, link: str) -> NodeStatus:
        pid = engines.machine(self._directory, node).pid
        version = ""
        if pid is not None:
            try:
                version = api.request(engines.engine_socket(self._directory, node), "GET", "/version", timeout=2)["Version"]
            except OSError:
                version = "no answer"
        condition = "dead" if pid is None else "cut" if link == "cut" else "up"
        role = "" if description.bare else "manager" if node == description.nodes[0] else "worker"
        return NodeStatus(node, condition, role, link if pid is not None else "", version, description.address(node), pid)

    def _description(self) -> Description:
        description = state.read(self._directory)
        if description is None:
            others = ", ".join(found.name for found in state.all_labs(self._base))
            known = f"there is: {others}" if others else "there is none on this machine"
            raise LabError(f"no such lab; {known}", place=f"lab {self.name}", hint="swarmtrain lab up --nodes 3")
        return description

    def _known(self, node: str) -> Description:
        description = self._description()
        if node not in description.nodes:
            raise LabError(f"there is no such node; there is: {', '.join(description.nodes)}", place=f"lab {self.name} {node}")
        return description

    def _living(self, node: str) -> Description:
        check_root()
        description = self._known(node)
        if engines.machine(self._directory, node).pid is None:
            raise LabError("it is dead", place=node, hint=self._command("start", node))
        return description
