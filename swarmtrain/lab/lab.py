"""The lab as one object: bring it up, break it, look at it, take it down. Any later process finds it again by its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmtrain.errors import LabError
from swarmtrain.lab import DEFAULT_NAME, api, commands, cores, engines, fabric, machines, registry, slurm, ssh, state
from swarmtrain.lab.checks import check_machine, check_root
from swarmtrain.lab.state import Description

Say = Callable[[str], None]


@dataclass(frozen=True)
class NodeStatus:
    """One line of `lab status`.

    `state` is up, dead or cut; `role` is manager or worker, "" where there is no swarm; `link` is up, cut, or the rate it is held
    to; `services` are those of sshd, slurmctld and slurmd that listen; `pid` is the machine's init.
    """

    node: str
    state: str
    role: str
    link: str
    engine: str
    services: tuple[str, ...]
    address: str
    pid: int | None


class Lab:
    """A lab of this machine, running or not. Methods raise LabError; those that change something need root."""

    def __init__(self, name: str = DEFAULT_NAME) -> None:
        state.check_name(name)
        self.name = name
        self._base = state.base_directory()
        self.directory = self._base / name
        """Where the lab's own files are."""
        self._own_disk = self.directory / "shared"

    @property
    def shared(self) -> Path:
        """The host's view of the disk that all nodes have at /mnt/shared."""
        description = state.read(self.directory)
        return Path(description.shared) if description else self._own_disk

    def own_disk(self, node: str) -> Path:
        """Return the host's view of the disk that the node alone has, at /mnt/own."""
        self._known(node)
        return machines.own_disk(self.directory, node)

    def check(self, engine: Path | None = None, parts: Collection[str] = ("swarm",)) -> None:
        """Raise LabError, with the way out, if this machine cannot host a lab of these `parts`."""
        check_machine(engine, parts)
        state.check_directory(self.directory)
        fabric.check_kernel()

    def up(
        self,
        nodes: int | Sequence[str],
        *,
        parts: Sequence[str] = ("swarm",),
        bare: bool = False,
        gpus: int = 0,
        engine: Path | None = None,
        shared: Path | None = None,
        say: Say,
    ) -> None:
        """Bring up machines, so many or of these names, that have what `parts` says of state.PARTS.

        With `swarm` each has an engine, the first is the manager, and there is a registry; with `docker` the engines are in no
        swarm, and those of a `bare` lab trust no registry either. With `ssh` each has an sshd; with `slurm` each is a node of a
        Slurm whose slurmctld is on the first.
        `engine` is a directory that holds another dockerd and containerd, `shared` one that all nodes are to share. Each
        engine declares `gpus` GPUs that are not there, so that it can be seen who gets them.
        What is made is removed again if anything fails.
        A lab of this name whose machines are all dead is removed first; one that runs and is the same is left as it is.
        """
        state.check_parts(parts)
        self.check(engine, parts)
        names = tuple(f"node{index}" for index in range(nodes)) if isinstance(nodes, int) else tuple(nodes)
        if not 1 <= len(names) <= state.MAX_NODES:
            raise LabError(f"a lab has 1 to {state.MAX_NODES} nodes, not {nodes}", place="lab up --nodes")
        if gpus and bare:
            raise LabError("the engines of a bare lab have no settings before their owner gives them some", place="lab up --gpus")
        with state.locked(self._base):
            disk = (shared or self._own_disk).absolute()
            program = str(engine.absolute()) if engine else None
            subnet = state.choose_subnet(self.name, state.taken_subnets(self._base))
            wanted = Description(
                self.name, subnet, names, str(disk), program, bare, gpus=gpus, parts=tuple(part for part in state.PARTS if part in parts)
            )
            if gpus and not wanted.engines:
                raise LabError("machines without an engine have none to declare GPUs", place="lab up --gpus")
            if self._runs_already(wanted, say):
                return
            self._remove()
            try:
                self._make(wanted, say)
            except BaseException:
                say("failed or interrupted: removing what was made")
                self._remove()
                raise
        self._introduce(wanted, say)

    def down(self, *, keep_images: bool = False, say: Say) -> None:
        """Remove the lab and all its data; with the last lab of this machine go the images, unless they are to be kept."""
        check_root()
        with state.locked(self._base):
            found = state.read(self.directory)
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
        """Take the node's power: its services and containers are gone at once, no peer is told. Its disk stays."""
        description = self._living(node)
        machines.power_off(self.directory, description, node)
        notice = "; a swarm notices in about 15 s" if description.engines else ""
        say(f"{node}: power off{notice}. `{self._command('start', node)}` boots it again")

    def start(self, node: str, *, say: Say) -> None:
        """Boot a node that was killed, with its data. Returns when its services answer and, where the first node lives, it is ready."""
        description = self._known(node)
        if self._pid(node) is not None:
            raise LabError("runs already", place=node, hint=self._command("status"))
        machines.power_off(self.directory, description, node)  # what an engine that died by itself left behind
        machines.boot(self.directory, description, node)
        if description.engines:
            engines.wait_until_up(self.directory, node)
        if "ssh" in description.parts:
            ssh.wait_until_up(self.directory, node)
        if (description.swarm or "slurm" in description.parts) and self._pid(description.nodes[0]) is None:
            say(f"{node}: runs again, and joins when {'the manager' if description.swarm else description.nodes[0]} does")
            return
        if "slurm" in description.parts:
            there = [each.node for each in self.status() if each.state == "up"]
            slurm.wait_until_ready(self.directory, description, there if node == description.nodes[0] else [node])
        if description.swarm:
            engines.wait_until_ready(self.directory, description, [node])
        say(f"{node}: runs again{' and is ready in the swarm' if description.swarm else ''}")

    def cut(self, node: str, *, say: Say) -> None:
        """Cut the node's network: it lives on, alone."""
        self._living(node)
        fabric.cut(self.name, node)
        say(f"{node}: cut off, all that is on it runs on. `{self._command('heal', node)}` brings the network back")

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

    def env(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return what points this machine's tools at the lab, if it is added to `environ`.

        Docker's speak to the engine of node0, the manager; `ssh` knows the machines by their names, and Slurm is the lab's.
        """
        description = self._description()
        found = {"DOCKER_HOST": self.docker_host(description.nodes[0])} if description.engines else {}
        if "ssh" in description.parts:
            found["PDSH_RCMD_TYPE"] = "ssh"  # Debian's takes rsh by itself
        if "slurm" in description.parts:
            found["SLURM_CONF"] = str(slurm.conf(self.directory))
        if {"ssh", "slurm"} & set(description.parts):
            own = str(commands.folder(self.directory))
            others = [folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if folder != own]
            found["PATH"] = os.pathsep.join([own, *others])
        return found

    def docker_host(self, node: str) -> str:
        """Return the address of the node's engine, in DOCKER_HOST's form."""
        self._known(node)
        return f"unix://{engines.engine_socket(self.directory, node)}"

    def enter(self, node: str, *, folder: Path = Path("/")) -> list[str]:
        """Return the prefix that runs a command on the machine `node`, beside its services, in `folder` if the machine has that."""
        self._living(node)
        pid = self._pid(node)
        there = folder if state.visible(folder) else Path("/")
        return ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={there}"]

    def environment_on(self, node: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` as a command on the machine `node` is to have it: Docker's tools use its own engine, Slurm's the lab's."""
        description = self._known(node)
        elsewhere = ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
        own = {"DOCKER_HOST": engines.OWN_SOCKET, cores.VARIABLE: str(cores.share(description))}
        own |= {"SLURM_CONF": str(slurm.conf(self.directory))} if "slurm" in description.parts else {}
        return {**{name: value for name, value in environ.items() if name not in elsewhere}, **own}

    def _make(self, description: Description, say: Say) -> None:
        self.directory.mkdir(parents=True)
        state.write(self.directory, description)
        self.shared.mkdir(parents=True, exist_ok=True)
        self.shared.chmod(0o1777)
        say(f"lab {self.name}: {len(description.nodes)} {_kind(description)}")
        commands.make(self.directory, description)
        cores.write_runc(self.directory, description)
        if "ssh" in description.parts:
            ssh.make(self.directory, description)
        if "slurm" in description.parts:
            slurm.make(self.directory, description)
        fabric.make(description)
        for node in description.nodes:
            machines.prepare(self.directory, description, node)
            machines.add(self.directory, node, self._services(description, node))
            machines.boot(self.directory, description, node)
        if description.engines:
            registry.start(description, self.directory)
            engines.wait_until_all_up(self.directory, description)
        if "ssh" in description.parts:
            for node in description.nodes:
                ssh.wait_until_up(self.directory, node)
        if "slurm" in description.parts:
            slurm.wait_until_ready(self.directory, description, description.nodes)
        if description.swarm:
            engines.form_swarm(self.directory, description)
        state.write(self.directory, replace(description, ready=True))

    def _services(self, description: Description, node: str) -> dict[str, str]:
        found = {"engine": engines.service(self.directory, description, node)} if description.engines else {}
        if "ssh" in description.parts:
            found["sshd"] = ssh.service(self.directory, description, node)
        return found | (slurm.services(self.directory, description, node) if "slurm" in description.parts else {})

    def _introduce(self, description: Description, say: Say) -> None:
        first = description.nodes[0]
        if description.engines and engines.wait_until_up(self.directory, first)["Driver"] == "vfs":
            say("storage driver vfs, since overlay does not work on this disk: images take far more space and time")
        fate = ", and is deleted by `down`" if self.shared == self._own_disk else ""
        say(f"shared disk: {self.shared} here is /mnt/shared on every node{fate}")
        bare = description.bare
        trusted = "which the engines do not trust before their daemon.json says so" if bare else "for images built and pushed from here"
        if description.engines:
            say(f"registry: {registry.REGISTRY}, {trusted}")
        say("next:")
        if bare:
            say(f"  {self._command('enter', first)}")
            return
        say(f'  eval "$({self._command("env")})"')
        if description.engines:
            say(f"  swarmtrain image build . --tag {registry.REGISTRY}/swarmtrain:0.1 --push")
        if "ssh" in description.parts:
            say(f"  ssh {first} hostname")
        if "slurm" in description.parts:
            say("  sinfo")

    def _command(self, verb: str, *arguments: str) -> str:
        """Return the command line that does `verb` to this lab."""
        option = [] if self.name == DEFAULT_NAME else ["--name", self.name]
        return " ".join(["swarmtrain", "lab", verb, *option, *arguments])

    def _runs_already(self, wanted: Description, say: Say) -> bool:
        description = state.read(self.directory)
        if not description or not description.ready:
            return False
        kind = "engines" if description.engines else "machines"
        running = [node for node in description.nodes if self._pid(node) is not None]
        if not running:
            say(f"lab {self.name}: all its {kind} are dead; removing it")
            return False
        what = f"{len(running)} of its {len(description.nodes)} {kind} run"
        if description.nodes != wanted.nodes:
            raise LabError(f"it is up already: {what}", place=f"lab {self.name}", hint=self._command("down"))
        if description.bare != wanted.bare:
            form = "bare" if description.bare else "a swarm"
            raise LabError(f"it is up already, and {form}: {what}", place=f"lab {self.name}", hint=self._command("down"))
        if description.parts != wanted.parts:
            has = f"its machines have {', '.join(description.parts)}: {what}"
            raise LabError(f"it is up already, and {has}", place=f"lab {self.name}", hint=self._command("down"))
        if description.gpus != wanted.gpus:
            has = f"its engines have {description.gpus} GPUs each: {what}"
            raise LabError(f"it is up already, and {has}", place=f"lab {self.name}", hint=self._command("down"))
        say(f"lab {self.name}: {what} already ({', '.join(running)}); left as it is")
        return True

    def _remove(self) -> None:
        description = state.read(self.directory)
        if description:
            for node in description.nodes:
                machines.power_off(self.directory, description, node)
            registry.stop(self.directory)
            fabric.remove(self.name, "fabric")
            machines.remove_cgroups(self.name)
        if self.directory.exists():
            shutil.rmtree(self.directory)

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
        pid = self._pid(node)
        version = ""
        if pid is not None and description.engines:
            try:
                version = api.request(engines.engine_socket(self.directory, node), "GET", "/version", timeout=2)["Version"]
            except OSError:
                version = "no answer"
        condition = "dead" if pid is None else "cut" if link == "cut" else "up"
        role = "" if not description.swarm else "manager" if node == description.nodes[0] else "worker"
        ports = machines.listening(pid)
        services = tuple(name for name, port in {"sshd": ssh.PORT, **slurm.PORTS}.items() if port in ports)
        return NodeStatus(node, condition, role, link if pid is not None else "", version, services, description.address(node), pid)

    def _pid(self, node: str) -> int | None:
        return machines.machine(self.directory, node).pid

    def _description(self) -> Description:
        description = state.read(self.directory)
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
        if self._pid(node) is None:
            raise LabError("it is dead", place=node, hint=self._command("start", node))
        return description


def _kind(description: Description) -> str:
    """Say what the machines are, where, and what they have beside engines."""
    others = [part for part in description.parts if part not in ("swarm", "docker")]
    kind = "engines" if description.engines else "machines"
    lone = ", in no swarm" if description.engines and not description.swarm else ""
    more = f", with {', '.join(others)}" if others else ""
    return f"{kind} on {description.subnet}{lone}{more}"
