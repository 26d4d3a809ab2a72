"""The lab as one object: start it, inject faults, inspect it, remove it. A later process finds it by its name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmtrain.errors import LabError
from swarmtrain.lab import (
    DEFAULT_NAME,
    cpu_share,
    engine_api,
    engines,
    machines,
    network,
    path_shims,
    registry,
    slurm,
    ssh,
    state,
)
from swarmtrain.lab.prerequisites import check_machine_prerequisites, check_root
from swarmtrain.lab.state import LabDescription

ProgressReporter = Callable[[str], None]


@dataclass(frozen=True)
class NodeStatus:
    """Status of one lab node, shown as one line of `lab status`.

    `state` is up, dead or partitioned; `role` is manager or worker, "" without a swarm; `link` is up, down, or the rate limit; `engine` is
    the version of the Docker engine; `services` lists which of sshd, slurmctld and slurmd are listening; `pid` is the process id of the
    machine's init, None if the machine is dead.
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
    """A lab on this machine, running or not. Methods raise LabError; methods that change the lab need root."""

    def __init__(self, name: str = DEFAULT_NAME) -> None:
        state.check_lab_name(name)
        self.name = name
        self._base = state.get_labs_folder()
        self.directory = self._base / name
        """Folder of the lab's own files."""
        self._own_shared_disk = self.directory / "shared"

    @property
    def shared_disk(self) -> Path:
        """Host path of the shared disk, which all nodes mount at /mnt/shared."""
        description = state.read_lab_description(self.directory)
        return Path(description.shared) if description else self._own_shared_disk

    def get_node_disk(self, node: str) -> Path:
        """Return the host path of the disk that only `node` mounts, at /mnt/own."""
        self._require_node(node)
        return machines.get_node_disk(self.directory, node)

    def check_prerequisites(self, engine_folder: Path | None = None, components: Collection[str] = ("swarm",)) -> None:
        """Check that this machine can host a lab with these `components`. Raises LabError with a fix if it cannot."""
        check_machine_prerequisites(engine_folder, components)
        state.check_lab_folder(self.directory)
        network.check_kernel_support()

    def bring_up(
        self,
        nodes: int | Sequence[str],
        *,
        components: Sequence[str] = ("swarm",),
        bare: bool = False,
        gpus: int = 0,
        engine_folder: Path | None = None,
        shared_folder: Path | None = None,
        report_progress: ProgressReporter,
    ) -> None:
        """Start the lab with `nodes` machines, given by number or by names, and with `components`, a subset of state.COMPONENTS.

        With `swarm`, each machine has a Docker engine, the first machine is the manager, and there is a registry. With `docker`, the
        engines are not in a swarm; the engines of a `bare` lab do not trust a registry, either. With `ssh`, each machine has an sshd. With
        `slurm`, each is a node of a Slurm cluster whose slurmctld is on the first.

        `engine_folder` is a folder with a different dockerd and containerd; `shared_folder` is the folder that all nodes share.
        Each engine declares `gpus` simulated GPUs, so that their assignment to runs can be tested.

        If anything fails, everything that was created is removed. A lab of this name whose machines are all dead is removed first. A
        running lab is left unchanged; if its settings differ, LabError is raised.
        """
        state.check_components(components)
        self.check_prerequisites(engine_folder, components)
        names = tuple(f"node{index}" for index in range(nodes)) if isinstance(nodes, int) else tuple(nodes)
        if not 1 <= len(names) <= state.MAX_NODES:
            raise LabError(f"a lab has 1 to {state.MAX_NODES} nodes, not {nodes}", place="lab up --nodes")
        if gpus and bare:
            raise LabError("cannot be used for a bare lab: its engines have no settings until you configure them", place="lab up --gpus")
        with state.lock_labs(self._base):
            shared_path = (shared_folder or self._own_shared_disk).absolute()
            engine_path = str(engine_folder.absolute()) if engine_folder else None
            subnet = state.choose_subnet(self.name, state.list_taken_subnets(self._base))
            desired = LabDescription(
                self.name,
                subnet,
                names,
                str(shared_path),
                engine_path,
                bare,
                gpus=gpus,
                components=tuple(component for component in state.COMPONENTS if component in components),
            )
            if gpus and not desired.has_engines:
                raise LabError("needs machines with an engine, which declares the GPUs", place="lab up --gpus")
            if self._is_already_running(desired, report_progress):
                return
            self._remove_lab()
            try:
                self._create_lab(desired, report_progress)
            except BaseException:
                report_progress("failed or interrupted: removing the created objects")
                self._remove_lab()
                raise
        self._print_introduction(desired, report_progress)

    def tear_down(self, *, keep_images: bool = False, report_progress: ProgressReporter) -> None:
        """Remove the lab and all its data. If it was the last lab of this machine, also remove the images, unless `keep_images`."""
        check_root()
        with state.lock_labs(self._base):
            description = state.read_lab_description(self.directory)
            self._remove_lab()
            report_progress(f"lab {self.name}: removed" if description else f"lab {self.name}: does not exist")
            self._remove_images(keep_images, report_progress)
        state.remove_empty_labs_folder(self._base)

    def get_status(self) -> list[NodeStatus]:
        """Return the status of each node."""
        check_root()
        description = self._load_description()
        link_states = network.list_link_states(self.name)
        return [self._get_node_status(description, node, link_states.get(node, "down")) for node in description.nodes]

    def power_off_node(self, node: str, *, report_progress: ProgressReporter) -> None:
        """Power off the node: its services and containers are killed at once, without closing their connections. Its disk is kept."""
        description = self._require_running_node(node)
        machines.power_off_node(self.directory, description, node)
        notice_text = "; a swarm detects this after about 15 s" if description.has_engines else ""
        report_progress(f"{node}: powered off{notice_text}. `{self._format_lab_command('power-on', node)}` boots it again")

    def power_on_node(self, node: str, *, report_progress: ProgressReporter) -> None:
        """Boot a node that was powered off, with its data.

        Returns once its services answer and, if the first node is alive, once the node is ready.
        """
        description = self._require_node(node)
        if self._get_init_pid(node) is not None:
            raise LabError("is already running", place=node, hint=self._format_lab_command("status"))
        machines.power_off_node(self.directory, description, node)  # remove the leftovers of a machine that died by itself
        machines.boot_node(self.directory, description, node)
        if description.has_engines:
            engines.wait_until_engine_up(self.directory, node)
        if "ssh" in description.components:
            ssh.wait_until_sshd_up(self.directory, node)
        if (description.has_swarm or "slurm" in description.components) and self._get_init_pid(description.nodes[0]) is None:
            report_progress(
                f"{node}: running again, and joins when {'the manager' if description.has_swarm else description.nodes[0]} does"
            )
            return
        if "slurm" in description.components:
            running_nodes = [each.node for each in self.get_status() if each.state == "up"]
            slurm.wait_until_slurm_ready(self.directory, description, running_nodes if node == description.nodes[0] else [node])
        if description.has_swarm:
            engines.wait_until_swarm_ready(self.directory, description, [node])
        report_progress(f"{node}: running again{' and is ready in the swarm' if description.has_swarm else ''}")

    def copy_images(self, *, report_progress: ProgressReporter) -> None:
        """Copy the images of the first machine to the others, which are restarted and lose their own images and containers."""
        source, *targets = self._load_description().nodes
        for node in targets:
            self.power_off_node(node, report_progress=lambda line: None)
            engines.copy_image_store(self.directory, source, node)
            report_progress(f"{node}: has the images of {source}")
        for node in targets:
            self.power_on_node(node, report_progress=lambda line: None)

    def partition_node(self, node: str, *, report_progress: ProgressReporter) -> None:
        """Partition the node from the lab's network; the machine keeps running."""
        self._require_running_node(node)
        network.set_link_down(self.name, node)
        report_progress(f"{node}: partitioned; its processes keep running. `{self._format_lab_command('reconnect', node)}` reconnects it")

    def reconnect_node(self, node: str, *, report_progress: ProgressReporter) -> None:
        """Reconnect the node to the lab's network, at full speed."""
        self._require_running_node(node)
        network.set_link_up(self.name, node)
        report_progress(f"{node}: reconnected, without a bandwidth limit")

    def limit_node_bandwidth(self, node: str, rate: str, *, report_progress: ProgressReporter) -> None:
        """Limit the node's network to `rate` (100mbit, 1gbit) in both directions."""
        self._require_running_node(node)
        network.limit_link_rate(self.name, node, rate)
        report_progress(f"{node}: network at {rate} in both directions. `{self._format_lab_command('reconnect', node)}` removes the limit")

    def build_client_environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the environment variables that, added to `environ`, point this machine's tools to the lab.

        Docker's tools use the engine of node0, the manager; `ssh` knows the machines by their names; Slurm's tools use the lab's Slurm.
        """
        description = self._load_description()
        variables = {"DOCKER_HOST": self.get_docker_host(description.nodes[0])} if description.has_engines else {}
        if "ssh" in description.components:
            variables["PDSH_RCMD_TYPE"] = "ssh"  # Debian's pdsh defaults to rsh
        if "slurm" in description.components:
            variables["SLURM_CONF"] = str(slurm.get_slurm_conf_path(self.directory))
        if {"ssh", "slurm"} & set(description.components):
            shim_folder = str(path_shims.get_shim_folder(self.directory))
            other_folders = [folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if folder != shim_folder]
            variables["PATH"] = os.pathsep.join([shim_folder, *other_folders])
        return variables

    def get_docker_host(self, node: str) -> str:
        """Return the address of the node's engine, in the form of DOCKER_HOST."""
        self._require_node(node)
        return f"unix://{engines.get_engine_socket(self.directory, node)}"

    def build_enter_command(self, node: str, *, start_folder: Path = Path("/")) -> list[str]:
        """Return the command prefix that runs a command on `node`, in the namespaces of its services.

        The command starts in `start_folder` if that folder exists on `node`.
        """
        self._require_running_node(node)
        pid = self._get_init_pid(node)
        working_folder = start_folder if state.is_folder_visible(start_folder) else Path("/")
        return ["nsenter", "--target", str(pid), "--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={working_folder}"]

    def build_node_environment(self, node: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` adapted for a command on `node`: Docker's tools use its engine, Slurm's tools the lab's Slurm."""
        description = self._require_node(node)
        removed_variables = ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH")
        node_variables = {"DOCKER_HOST": engines.OWN_SOCKET, cpu_share.CORES_VARIABLE: str(cpu_share.compute_cores_per_node(description))}
        node_variables |= {"SLURM_CONF": str(slurm.get_slurm_conf_path(self.directory))} if "slurm" in description.components else {}
        return {**{name: value for name, value in environ.items() if name not in removed_variables}, **node_variables}

    def _create_lab(self, description: LabDescription, report_progress: ProgressReporter) -> None:
        self.directory.mkdir(parents=True)
        state.write_lab_description(self.directory, description)
        self.shared_disk.mkdir(parents=True, exist_ok=True)
        self.shared_disk.chmod(0o1777)
        report_progress(f"lab {self.name}: {len(description.nodes)} {_describe_machines(description)}")
        path_shims.write_shims(self.directory, description)
        cpu_share.write_runc_wrapper(self.directory, description)
        if "ssh" in description.components:
            ssh.write_ssh_files(self.directory, description)
        if "slurm" in description.components:
            slurm.write_slurm_files(self.directory, description)
        network.create_bridge(description)
        for node in description.nodes:
            machines.create_node_files(self.directory, description, node)
            machines.write_service_scripts(self.directory, node, self._build_node_services(description, node))
            machines.boot_node(self.directory, description, node)
        if description.has_engines:
            registry.start_registry(description, self.directory)
            engines.wait_until_all_engines_up(self.directory, description)
        if "ssh" in description.components:
            for node in description.nodes:
                ssh.wait_until_sshd_up(self.directory, node)
        if "slurm" in description.components:
            slurm.wait_until_slurm_ready(self.directory, description, description.nodes)
        if description.has_swarm:
            engines.create_swarm(self.directory, description)
        state.write_lab_description(self.directory, replace(description, ready=True))

    def _build_node_services(self, description: LabDescription, node: str) -> dict[str, str]:
        services = {"engine": engines.build_engine_service(self.directory, description, node)} if description.has_engines else {}
        if "ssh" in description.components:
            services["sshd"] = ssh.build_sshd_service(self.directory, description, node)
        return services | (slurm.build_slurm_services(self.directory, description, node) if "slurm" in description.components else {})

    def _print_introduction(self, description: LabDescription, report_progress: ProgressReporter) -> None:
        first = description.nodes[0]
        if description.has_engines and engines.wait_until_engine_up(self.directory, first)["Driver"] == "vfs":
            report_progress("using storage driver vfs, because overlay does not work on this disk: images take far more space and time")
        deletion_note = ", and is deleted by `down`" if self.shared_disk == self._own_shared_disk else ""
        report_progress(f"shared disk: {self.shared_disk} on this machine is /mnt/shared on every node{deletion_note}")
        bare = description.bare
        trust_note = (
            "which the engines do not trust until it is added to their daemon.json"
            if bare
            else "for images built and pushed from this machine"
        )
        if description.has_engines:
            report_progress(f"registry: {registry.REGISTRY_ADDRESS}, {trust_note}")
        report_progress("next:")
        if bare:
            report_progress(f"  {self._format_lab_command('enter', first)}")
            return
        report_progress(f'  eval "$({self._format_lab_command("env")})"')
        if description.has_engines:
            options = f'--base "$(swarmtrain lab base-image)" --tag {registry.REGISTRY_ADDRESS}/swarmtrain:0.1 --push'
            report_progress(f"  swarmtrain image build . {options}")
        if "ssh" in description.components:
            report_progress(f"  ssh {first} hostname")
        if "slurm" in description.components:
            report_progress("  sinfo")

    def _format_lab_command(self, verb: str, *arguments: str) -> str:
        """Return the command line that applies `verb` to this lab."""
        option = [] if self.name == DEFAULT_NAME else ["--name", self.name]
        return " ".join(["swarmtrain", "lab", verb, *option, *arguments])

    def _is_already_running(self, desired_description: LabDescription, report_progress: ProgressReporter) -> bool:
        description = state.read_lab_description(self.directory)
        if not description or not description.ready:
            return False
        unit_name = "engines" if description.has_engines else "machines"
        running = [node for node in description.nodes if self._get_init_pid(node) is not None]
        if not running:
            report_progress(f"lab {self.name}: all its {unit_name} are dead; removing the lab")
            return False
        running_text = f"{len(running)} of its {len(description.nodes)} {unit_name} run"
        if description.nodes != desired_description.nodes:
            difference = "with other nodes"
        elif description.bare != desired_description.bare:
            difference = "as a bare lab" if description.bare else "as a swarm"
        elif description.components != desired_description.components:
            difference = f"with machines that have {', '.join(description.components)}"
        elif description.gpus != desired_description.gpus:
            difference = f"with {description.gpus} GPUs per engine"
        else:
            report_progress(f"lab {self.name}: {running_text} already ({', '.join(running)}); left unchanged")
            return True
        hint = self._format_lab_command("down")
        raise LabError(f"is already up {difference}: {running_text}", place=f"lab {self.name}", hint=hint)

    def _remove_lab(self) -> None:
        description = state.read_lab_description(self.directory)
        if description:
            for node in description.nodes:
                machines.power_off_node(self.directory, description, node)
            registry.stop_registry(self.directory)
            network.remove_namespace(self.name, "bridge")
            machines.remove_cgroups(self.name)
        if self.directory.exists():
            shutil.rmtree(self.directory)

    def _remove_images(self, keep_images: bool, report_progress: ProgressReporter) -> None:
        store = registry.get_image_store_path(self._base)
        if not store.exists() or state.list_labs(self._base):
            return
        if keep_images:
            report_progress(f"images kept in {store} for the next lab")
            return
        shutil.rmtree(store)
        report_progress("images removed with the last lab")

    def _get_node_status(self, description: LabDescription, node: str, link_state: str) -> NodeStatus:
        pid = self._get_init_pid(node)
        version = ""
        if pid is not None and description.has_engines:
            try:
                version = engine_api.send_request(engines.get_engine_socket(self.directory, node), "GET", "/version", timeout=2)["Version"]
            except OSError:
                version = "no answer"
        state_text = "dead" if pid is None else "partitioned" if link_state == "down" else "up"
        role = "" if not description.has_swarm else "manager" if node == description.nodes[0] else "worker"
        ports = machines.list_listening_ports(pid)
        services = tuple(name for name, port in {"sshd": ssh.PORT, **slurm.PORTS}.items() if port in ports)
        return NodeStatus(
            node, state_text, role, link_state if pid is not None else "", version, services, description.get_node_address(node), pid
        )

    def _get_init_pid(self, node: str) -> int | None:
        return machines.get_init_daemon(self.directory, node).pid

    def _load_description(self) -> LabDescription:
        description = state.read_lab_description(self.directory)
        if description is None:
            lab_names = ", ".join(lab_description.name for lab_description in state.list_labs(self._base))
            known_text = f"existing labs: {lab_names}" if lab_names else "this machine has no labs"
            raise LabError(f"unknown lab; {known_text}", place=f"lab {self.name}", hint="swarmtrain lab up --nodes 3")
        return description

    def _require_node(self, node: str) -> LabDescription:
        description = self._load_description()
        if node not in description.nodes:
            raise LabError(f"unknown node; available nodes: {', '.join(description.nodes)}", place=f"lab {self.name} {node}")
        return description

    def _require_running_node(self, node: str) -> LabDescription:
        check_root()
        description = self._require_node(node)
        if self._get_init_pid(node) is None:
            raise LabError("is not running", place=node, hint=self._format_lab_command("power-on", node))
        return description


def _describe_machines(description: LabDescription) -> str:
    """Return a description of the machines: their number and kind, their subnet, and their components in addition to engines."""
    other_components = [component for component in description.components if component not in ("swarm", "docker")]
    unit_name = "engines" if description.has_engines else "machines"
    swarm_note = ", without a swarm" if description.has_engines and not description.has_swarm else ""
    component_note = f", with {', '.join(other_components)}" if other_components else ""
    return f"{unit_name} on {description.subnet}{swarm_note}{component_note}"
