"""Types of launchers: the values of runner.runner_type, and the capabilities of each launcher.

Only this module distinguishes launchers by name. Config, plan and commands use the launcher's Capabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

from swarmtrain.config.entry_points import LAUNCHER_GROUP, build_entry_point_error, list_entry_points, load_entry_point
from swarmtrain.errors import SwarmtrainError

DEPLOYED_CONTEXT = "deployed"
"""Validation context for the config of a deployed run. Nodes validate with it, since they may lack the launcher's package."""


class HostSource(StrEnum):
    """How the launcher finds the hosts for a plan."""

    as_written = "as written"
    """The names in runner.hosts are not looked up."""
    cluster = "cluster"
    """The launcher queries a cluster, and looks up the names in runner.hosts there."""
    over_ssh = "over SSH"
    """The hosts in runner.hosts are reached over SSH."""


class NodeNetwork(StrEnum):
    """The network that the nodes of a run use."""

    own = "own"
    """A network whose addresses and ports only the launcher knows: of containers, of loopback, of a Slurm job."""
    host = "host"
    """The host network of the machines, with ports for each run."""
    configured = "configured"
    """The network that runner.swarm.network names."""


@dataclass(frozen=True)
class Capabilities:
    """Properties of a launcher on which config, plan and commands depend. The defaults describe a launcher of processes on one machine."""

    hosts: HostSource = HostSource.as_written
    network: NodeNetwork = NodeNetwork.own
    runs_in_containers: bool = False
    runs_as_folder_owner: bool = False
    """Whether ranks run as the owner of save_dir unless docker_config.user is set."""
    passes_environment: bool = False
    """Whether runner.env_file and runner.env_prefixes are added to runner.env."""
    sees_all_gpus: bool = False
    """Whether ranks see all GPUs of their machine without swarm.gpu."""
    requires_gpu_mode: bool = False
    """Whether ranks see the GPUs listed in runner.hosts only if swarm.gpu is visible."""
    has_equal_nodes: bool = False
    """Whether a scheduler gives all nodes of a job the same slots, by default one for each GPU that runner.slurm requests."""
    starts_missing_nodes: bool = False
    """Whether a node whose machine is missing starts by itself when the machine becomes available, so that it can be created at once."""
    has_queue: bool = False
    """Whether runs can be queued: whether the settings for a queue have an effect."""
    has_managers: bool = False
    """Whether the nodes run in a swarm with managers: a manager runs the coordinator, and the doctor queries the managers."""


class BuiltInLauncher(NamedTuple):
    """A launcher of this package: its class as `module:class`, and its capabilities, which are known without importing the class."""

    location: str
    capabilities: Capabilities


_SSH = Capabilities(hosts=HostSource.over_ssh, network=NodeNetwork.host, passes_environment=True, sees_all_gpus=True)
BUILT_IN_LAUNCHERS = {
    "swarm": BuiltInLauncher(
        "swarmtrain.launchers.swarm:SwarmLauncher",
        Capabilities(
            hosts=HostSource.cluster,
            network=NodeNetwork.configured,
            runs_in_containers=True,
            runs_as_folder_owner=True,
            requires_gpu_mode=True,
            starts_missing_nodes=True,
            has_queue=True,
            has_managers=True,
        ),
    ),
    "docker": BuiltInLauncher(
        "swarmtrain.launchers.docker:DockerLauncher",
        Capabilities(runs_in_containers=True, runs_as_folder_owner=True),
    ),
    "local": BuiltInLauncher("swarmtrain.launchers.local:LocalLauncher", Capabilities()),
    "ssh": BuiltInLauncher("swarmtrain.launchers.ssh:SshLauncher", _SSH),
    "ssh_docker": BuiltInLauncher("swarmtrain.launchers.ssh:SshDockerLauncher", replace(_SSH, runs_in_containers=True)),
    "slurm": BuiltInLauncher("swarmtrain.launchers.slurm:SlurmLauncher", Capabilities(has_equal_nodes=True)),
}
# As in Scaling's configs. pdsh itself is never run.
RUNNER_TYPE_ALIASES = {"pdsh": "ssh", "pdsh_docker": "ssh_docker"}


def list_runner_types() -> list[str]:
    """Return the possible values of runner.runner_type: the built-in launchers, then the launchers of other installed packages."""
    return list(dict.fromkeys([*BUILT_IN_LAUNCHERS, *list_entry_points(LAUNCHER_GROUP)]))


@cache
def find_capabilities(runner_type: str) -> Capabilities:
    """Return the capabilities of the launcher `runner_type`. Raises SwarmtrainError if its package is missing or broken."""
    built_in = BUILT_IN_LAUNCHERS.get(runner_type)
    if built_in:
        return built_in.capabilities
    capabilities: Capabilities = load_installed_launcher(runner_type).capabilities
    return capabilities


def load_installed_launcher(runner_type: str) -> Any:
    """Import and return the launcher class that another installed package provides as `runner_type`.

    Raises SwarmtrainError if it is missing or broken.
    """
    entry_point = list_entry_points(LAUNCHER_GROUP).get(runner_type)
    if entry_point is None:
        known = ", ".join(list_runner_types())
        raise SwarmtrainError(f"launcher {runner_type} is not installed; existing launchers: {known}", place="config runner.runner_type")
    launcher_class = load_entry_point(entry_point)
    if not isinstance(getattr(launcher_class, "capabilities", None), Capabilities):
        raise build_entry_point_error(entry_point, "is not a launcher: its attribute capabilities is not an instance of Capabilities")
    return launcher_class


def _check_runner_type(value: Any, info: ValidationInfo) -> str:
    if isinstance(value, str):
        runner_type = RUNNER_TYPE_ALIASES.get(value, value)
        if runner_type in BUILT_IN_LAUNCHERS or info.context == DEPLOYED_CONTEXT or runner_type in list_runner_types():
            return runner_type
    from swarmtrain.config.yaml_document import describe_value  # imported here because only errors need PyYAML

    *others, last = map(repr, list_runner_types())
    raise ValueError(f"must be {', '.join(others)} or {last}, not {describe_value(value)}")


RunnerType = Annotated[
    str, BeforeValidator(_check_runner_type), WithJsonSchema({"type": "string", "examples": [*BUILT_IN_LAUNCHERS, *RUNNER_TYPE_ALIASES]})
]
