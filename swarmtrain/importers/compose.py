"""Import a hand-written Compose file for a swarm: one service per node, or one service with several replicas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from swarmtrain.config.schema.fields.validators import check_image_reference as check_image
from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.launch_command import (
    RENDEZVOUS_TEXT,
    RENDEZVOUS_VARIABLES,
    map_environment_variable,
    map_launch_command,
)
from swarmtrain.importers.launch_finder import parse_launch_argv, parse_launch_text
from swarmtrain.importers.launcher_arguments import LaunchCommand
from swarmtrain.importers.migration_report import KeyPath, MigrationReport, UnmappedReason
from swarmtrain.importers.shell.unresolved import Unresolved, has_reserved_characters, show_text

_CONSTRAINT_PATTERN = re.compile(r"\s*node\.(?P<what>hostname|id|role|labels\.(?P<label>[\w.-]+))\s*(?P<sign>==|!=)\s*(?P<value>.+?)\s*")
_VARIABLE_PATTERN = re.compile(r"\$\{?\w+")
_STACK_FILE_TEXT = "swarmtrain generate creates a complete stack file"
_UNMAPPED_KEYS: dict[str, tuple[UnmappedReason, str]] = {
    "hostname": (UnmappedReason.done_differently, RENDEZVOUS_TEXT),
    "container_name": (UnmappedReason.no_counterpart, "docker stack deploy ignores it"),
    "depends_on": (UnmappedReason.done_differently, "nodes wait for the rendezvous"),
    "ports": (UnmappedReason.no_counterpart, "nodes publish no ports; with swarm.network: host, ports are those of the host"),
    "expose": (UnmappedReason.no_counterpart, "all ports are open within the run's network"),
    "network_mode": (UnmappedReason.no_counterpart, "the stack creates its own network"),
    "tmpfs": (UnmappedReason.done_differently, "runner.docker_config.shm_size, for /dev/shm"),
    "healthcheck": (UnmappedReason.done_differently, "the coordinator receives events from every rank"),
    "logging": (UnmappedReason.done_differently, "use swarmtrain logs; logs are kept on this machine"),
    "build": (UnmappedReason.done_differently, "swarmtrain image build"),
    "working_dir": (UnmappedReason.done_differently, "the script and runner.code are put into one folder"),
    "entrypoint": (UnmappedReason.done_differently, "each node starts a supervisor"),
    "stdin_open": (UnmappedReason.no_counterpart, ""),
    "tty": (UnmappedReason.no_counterpart, ""),
    "init": (UnmappedReason.is_default, "orphaned processes are reaped by the supervisor"),
    "ipc": (UnmappedReason.done_differently, "runner.docker_config.shm_size; docker stack deploy ignores ipc"),
    "privileged": (UnmappedReason.no_counterpart, "docker stack deploy ignores it"),
    "ulimits": (UnmappedReason.done_differently, "runner.swarm.rdma lets ranks lock memory"),
    "cap_add": (UnmappedReason.done_differently, "runner.swarm.rdma lets ranks lock memory"),
    "devices": (UnmappedReason.done_differently, "runner.swarm.gpu and runner.swarm.rdma; docker stack deploy ignores devices"),
    "configs": (UnmappedReason.done_differently, "runner.code"),
    "labels": (UnmappedReason.no_counterpart, ""),
    "extra_hosts": (UnmappedReason.no_counterpart, ""),
    "env_file": (UnmappedReason.done_differently, "put its variables into runner.env and its secrets into runner.secrets"),
    "deploy.update_config": (UnmappedReason.done_differently, "swarmtrain scale and deploy change one run at a time"),
    "deploy.rollback_config": (UnmappedReason.no_counterpart, ""),
    "deploy.endpoint_mode": (UnmappedReason.done_differently, _STACK_FILE_TEXT),
    "deploy.labels": (UnmappedReason.no_counterpart, ""),
    "deploy.placement.preferences": (UnmappedReason.done_differently, "one service runs on each node"),
    "deploy.placement.max_replicas_per_node": (UnmappedReason.done_differently, "one service runs on each node"),
    "deploy.resources.reservations.cpus": (UnmappedReason.no_counterpart, "runner.docker_config.cpus sets a limit, not a reservation"),
    "deploy.resources.reservations.memory": (UnmappedReason.no_counterpart, "runner.docker_config.memory sets a limit, not a reservation"),
    "deploy.resources.limits.pids": (UnmappedReason.no_counterpart, ""),
}


def map_compose_file(report: MigrationReport, source_file: str) -> None:
    """Map the Compose file in `report` to config fields. Raises ConfigError if none of its services starts training."""
    services = report.get_source_mapping("services")
    launches = {name: launch for name, body in services.items() if (launch := _find_launch_command(report, name, body)) is not None}
    if not launches:
        hint = "start torchrun or a script in a service's command, or set RANK or WORLD_SIZE in its environment"
        raise ConfigError(
            (Problem("services", "no service starts training", report.find_line_number(("services",)), hint),), source=source_file
        )
    for name in services:
        if name not in launches:
            report.add_unmapped_key(
                ("services", name),
                UnmappedReason.no_counterpart,
                "not a training node: deploy it as a separate stack",
            )
    report.set_runner_type("swarm")
    names = sorted(launches, key=lambda name: _get_node_rank(report, name, launches[name]))
    nodes, slots = _map_service(report, names[0], launches[names[0]])
    slots_by_service = {names[0]: slots} | {name: _compare_with_first_service(report, names[0], name, launches[name]) for name in names[1:]}
    _map_nodes(report, slots_by_service, nodes)
    _map_networks(report, names)
    _map_volumes(report, names[0])
    _map_top_level_fields(report)


def _find_launch_command(report: MigrationReport, service_name: str, service: Any) -> LaunchCommand | None:
    if not isinstance(service, dict):
        return None
    for field in ("command", "entrypoint"):
        value = service.get(field)
        try:
            launch = (
                parse_launch_argv([_mark_variables(str(word)) for word in value])
                if isinstance(value, list)
                else parse_launch_text(_mark_variables(str(value or "")))
            )
        except ValueError:
            launch = None
        if launch is not None:
            return launch
    variables = _parse_environment(service.get("environment"))
    return LaunchCommand("image") if any(variable in variables for variable in ("RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR")) else None


def _mark_variables(text: str) -> str:
    """Return `text` with the variables that Docker takes from the shell that deploys marked as unresolved.

    Raises ValueError if `text` contains a reserved character.
    """
    if has_reserved_characters(text):
        raise ValueError("contains a private-use character of Unicode")

    def mark(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else Unresolved(match[1] or match[2], match[0], 1).to_mark()

    return re.sub(r"\$\$|\$(\w+)|\$\{(\w+)[^{}]*\}", mark, text)


def _parse_environment(environment: Any) -> dict[str, Any]:
    if isinstance(environment, dict):
        return environment
    return {str(item).partition("=")[0]: str(item).partition("=")[2] for item in environment} if isinstance(environment, list) else {}


def _get_node_rank(report: MigrationReport, service_name: str, launch: LaunchCommand) -> int:
    """Return the node rank in the launch command or environment of `service_name`; 0 if it is unset, which keeps the order of the file."""
    variables = _parse_environment(report.get_source_value(("services", service_name, "environment")))
    text = launch.flags.get("node_rank", str(variables.get("NODE_RANK", variables.get("RANK", ""))))
    return int(text) if text.isdigit() else 0


def _map_service(report: MigrationReport, service_name: str, launch: LaunchCommand) -> tuple[int | None, int | None]:
    service_key: KeyPath = ("services", service_name)
    for prefix in launch.prefixes:
        for variable, value in prefix.variables.items():
            map_environment_variable(report, (*service_key, "command", variable), variable, value)
        if prefix.program:
            key = (*service_key, "command", prefix.program)
            report.add_unmapped_key(key, UnmappedReason.done_differently, "each node starts a supervisor", value=prefix.text)
    nodes, slots = (
        (None, None)
        if launch.program == "image"
        else map_launch_command(report, (*service_key, _get_command_field(report, service_key)), launch)
    )
    if launch.program == "image":
        report.add_note("no service has a command: set runner.script to the script that the image starts")
    for field in report.get_source_value(service_key):
        _map_service_field(report, service_key, field)
    variables = _parse_environment(report.get_source_value((*service_key, "environment")))
    for variable, value in variables.items():
        _map_environment_variable(report, (*service_key, "environment", variable), variable, value)
    report.mark_keys_handled(
        *([(*service_key, "environment")] if isinstance(report.get_source_value((*service_key, "environment")), list) else [])
    )
    _map_deploy_section(report, (*service_key, "deploy"))
    _map_restart_limit(report, service_key)
    _map_mounts(report, (*service_key, "volumes"))
    return nodes, slots


def _get_command_field(report: MigrationReport, service_key: KeyPath) -> str:
    return "command" if report.has_source_key((*service_key, "command")) else "entrypoint"


def _map_service_field(report: MigrationReport, service_key: KeyPath, field: str) -> None:
    key = (*service_key, field)
    value = report.get_source_value(key)
    if field in ("environment", "deploy", "volumes", "networks", "restart"):
        return
    if field in ("command", "secrets") or (field == "entrypoint" and not report.has_source_key((*service_key, "command"))):
        report.mark_keys_handled(key)
    elif field == "image":
        _map_image(report, key, str(value))
    elif field == "shm_size":
        report.map_key(key, "runner.docker_config.shm_size")
    elif field == "user" and re.fullmatch(r"\d+(:\d+)?", str(value)):
        report.map_key(key, "runner.docker_config.user", str(value))
    elif field == "stop_grace_period" and (seconds := _parse_duration(str(value))):
        report.map_key(key, "runner.stop_grace", seconds)
    elif not _map_machine_field(report, key, field, value):
        report.add_unmapped_key(key, *_UNMAPPED_KEYS.get(field, (UnmappedReason.no_counterpart, "")))


def _map_machine_field(report: MigrationReport, key: KeyPath, field: str, value: Any) -> bool:
    """Map a field of a service that concerns the machine: host network, GPUs, RDMA devices. Return whether the field was mapped."""
    if field == "network_mode" and value == "host":
        report.map_key(key, "runner.swarm.network", "host")
    elif field == "runtime" and value == "nvidia":
        report.add_gpu_visibility_setting()
        report.mark_keys_handled(key)
    elif field in ("cap_add", "devices", "ulimits") and re.search(r"IPC_LOCK|infiniband|memlock", str(value)):
        report.map_key(key, "runner.swarm.rdma", True)
    else:
        return False
    return True


def _map_restart_limit(report: MigrationReport, service_key: KeyPath) -> None:
    """Map the limit of a service's restarts, if it has one. deploy.restart_policy takes precedence over restart, as in a swarm."""
    policy_key, restart_key = (*service_key, "deploy", "restart_policy"), (*service_key, "restart")
    policy, restart = report.get_source_mapping(policy_key), report.get_source_value(restart_key)
    limits: dict[KeyPath, int | None] = {}
    if policy:
        limits[*policy_key, "condition"] = 0 if policy.get("condition") == "none" else None
        limits[*policy_key, "max_attempts"] = _parse_restart_count(policy.get("max_attempts"))
    elif restart_count := re.fullmatch(r"on-failure:(\d+)", str(restart)):
        limits[restart_key] = _parse_restart_count(restart_count[1])
    elif str(restart) in ("no", "False"):
        limits[restart_key] = 0
    limited_key = next((key for key, limit in limits.items() if limit is not None), None)
    if report.get_config_value("runner.max_restarts") is not None:  # torchrun restarts the ranks within the container
        limited_key = None
    if limited_key is not None:
        report.map_key(limited_key, "runner.max_restarts", limits[limited_key])
    for key in ((*policy_key, field) for field in policy) if policy else (policy_key,):
        if key != limited_key and report.has_source_key(key):
            report.add_unmapped_key(key, UnmappedReason.done_differently, "runner.max_restarts")
    if restart_key != limited_key and report.has_source_key(restart_key):
        report.add_unmapped_key(restart_key, UnmappedReason.done_differently, "runner.max_restarts")


def _parse_restart_count(count: Any) -> int | None:
    """Return the restart limit `count` of a service; None if it has none, which Docker also writes as 0."""
    return int(count) if str(count).isdecimal() and int(count) > 0 else None


def _map_image(report: MigrationReport, key: KeyPath, image: str) -> None:
    try:
        report.map_key(key, "runner.docker_config.docker_container", check_image(image))
    except ValueError:
        replacement = (
            "a shell variable: set runner.docker_config.docker_container" if "$" in image else "runner.docker_config.docker_container"
        )
        report.add_unmapped_key(key, UnmappedReason.unknown, replacement)


def _map_environment_variable(report: MigrationReport, key: KeyPath, name: str, value: Any) -> None:
    if name == "NVIDIA_VISIBLE_DEVICES":
        gpu_ids = str(value)
        report.map_key(key, "runner.swarm.gpu", "none" if gpu_ids in ("none", "void", "") else "visible")
        if re.fullmatch(r"[\w-]+(,[\w-]+)*", gpu_ids) and gpu_ids not in ("all", "none", "void"):
            report.set_config_value("runner.swarm.gpu_ids", gpu_ids.split(","))
    elif value is None or value == "":
        report.add_unmapped_key(key, UnmappedReason.unknown, f"Docker takes its value from the shell that deploys: set runner.env.{name}")
    else:
        map_environment_variable(report, key, name, _mark_variables(value) if isinstance(value, str) else value)


def _map_deploy_section(report: MigrationReport, key: KeyPath) -> None:
    for name in ("cpus", "memory"):
        source_key = (*key, "resources", "limits", name)
        if report.has_source_key(source_key):
            report.map_key(
                source_key,
                f"runner.docker_config.{name}",
                float(report.get_source_value(source_key))
                if name == "cpus" and _is_number(report.get_source_value(source_key))
                else report.get_source_value(source_key),
            )
    for index, item in enumerate(report.get_source_list((*key, "resources", "reservations", "generic_resources"))):
        source_key = (*key, "resources", "reservations", "generic_resources", str(index))
        resource_spec = item.get("discrete_resource_spec") if isinstance(item, dict) else None
        if not isinstance(resource_spec, dict):
            report.add_unmapped_key(
                source_key,
                UnmappedReason.no_counterpart,
                "only resources with a kind and a number are supported: runner.swarm.generic_resource",
            )
            continue
        report.set_config_value("runner.swarm.gpu", "reserve")
        report.set_config_value("runner.swarm.generic_resource", resource_spec.get("kind", "NVIDIA-GPU"))
        if type(resource_spec.get("value")) is int:
            report.set_config_value("runner.default_gpu_count", resource_spec["value"])
        report.mark_keys_handled(source_key)
    if report.has_source_key((*key, "resources", "reservations", "devices")):
        report.add_gpu_visibility_setting()
        report.add_unmapped_key(
            (*key, "resources", "reservations", "devices"),
            UnmappedReason.done_differently,
            "runner.swarm.gpu; docker stack deploy refuses devices",
        )
    for index, text in enumerate(report.get_source_list((*key, "placement", "constraints"))):
        _map_placement_constraint(report, (*key, "placement", "constraints", str(index)), str(text))
    if report.get_source_value((*key, "mode")) in ("replicated", "global"):
        report.mark_keys_handled((*key, "mode"))
    if isinstance(report.get_source_value((*key, "replicas")), int):
        report.mark_keys_handled((*key, "replicas"))
    for name, unmapped in _UNMAPPED_KEYS.items():
        source_key = (*key[:-1], *name.split("."))
        if name.startswith("deploy.") and report.has_source_key(source_key):
            report.add_unmapped_key(source_key, *unmapped)


def _map_placement_constraint(report: MigrationReport, key: KeyPath, constraint: str) -> None:
    match = _CONSTRAINT_PATTERN.fullmatch(constraint)
    if match and match["sign"] == "==" and match["what"] in ("hostname", "id") and "$" not in constraint:
        report.mark_keys_handled(key)
    elif match and match["label"] and _find_pinned_host(report, key[1]):
        report.add_unmapped_key(key, UnmappedReason.done_differently, "the host is listed in runner.hosts", value=constraint)
    elif match and match["sign"] == "==" and match["label"]:
        labels = dict(report.get_config_value("runner.swarm.labels") or {})
        report.map_key(key, "runner.swarm.labels", labels | {match["label"]: match["value"]})
    elif _VARIABLE_PATTERN.search(constraint):
        report.add_unmapped_key(key, UnmappedReason.unknown, "a shell variable: list the hosts in runner.hosts", value=constraint)
    else:
        report.add_unmapped_key(key, UnmappedReason.done_differently, "runner.hosts, or runner.swarm.labels", value=constraint)


def _find_pinned_host(report: MigrationReport, service_name: str) -> str:
    for text in report.get_source_list(("services", service_name, "deploy", "placement", "constraints")):
        match = _CONSTRAINT_PATTERN.fullmatch(str(text))
        if match and match["sign"] == "==" and match["what"] in ("hostname", "id") and "$" not in str(text):
            return match["value"]
    return ""


def _compare_with_first_service(report: MigrationReport, first_service_name: str, service_name: str, launch: LaunchCommand) -> int | None:
    """Compare `service_name` with the first service, whose settings apply to all nodes.

    Return the number of ranks of `service_name`; None if unknown.
    """
    service_key, first_key = ("services", service_name), ("services", first_service_name)
    _compare_command(
        report, service_key, _find_launch_command(report, first_service_name, report.get_source_value(first_key)) or launch, launch
    )
    _compare_environment(report, service_key, first_key)
    for key, value in list(report.iterate_source_leaves(service_key)):
        field_path = key[2:]
        if field_path[0] in ("command", "entrypoint", "environment", "networks"):
            continue
        is_pinned = field_path[:3] == ("deploy", "placement", "constraints") and _find_pinned_host(report, service_name) and len(value) == 1
        if is_pinned or field_path[:2] == ("deploy", "replicas") or report.get_source_value((*first_key, *field_path)) == value:
            report.mark_keys_handled(key)
        else:
            report.add_unmapped_key(
                key,
                *_UNMAPPED_KEYS.get(field_path[0], (UnmappedReason.no_counterpart, f"all nodes are configured as {first_service_name} is")),
            )
    slots = launch.flags.get("nproc_per_node", "")
    return int(slots) if slots.isdigit() else None


def _compare_command(report: MigrationReport, service_key: KeyPath, first_launch: LaunchCommand, launch: LaunchCommand) -> None:
    unmapped = (UnmappedReason.no_counterpart, "all nodes run the command of the first service")
    command_parts: dict[str, tuple[Any, Any]] = {
        "script": (show_text(launch.script), show_text(first_launch.script)),
        "script_args": (list(map(show_text, launch.args)), list(map(show_text, first_launch.args))),
        "wrapper": ([prefix.text for prefix in launch.prefixes], [prefix.text for prefix in first_launch.prefixes]),
        "other_commands": (launch.other_commands, first_launch.other_commands),
    }
    command_parts |= {
        f"{launch.program} --{flag}": (show_text(value), show_text(first_launch.flags[flag]) if flag in first_launch.flags else None)
        for flag, value in launch.flags.items()
        if flag not in ("node_rank", "nproc_per_node")
    }
    report.mark_keys_handled(
        *((*service_key, field) for field in ("command", "entrypoint") if report.has_source_key((*service_key, field)))
    )
    for name, (value, first_value) in command_parts.items():
        if value != first_value:
            report.add_unmapped_key((*service_key, "command", name), *unmapped, value=value)


def _compare_environment(report: MigrationReport, service_key: KeyPath, first_service_key: KeyPath) -> None:
    variables, first_variables = (
        _parse_environment(report.get_source_value((*service, "environment"))) for service in (service_key, first_service_key)
    )
    for variable, value in variables.items():
        if variable in RENDEZVOUS_VARIABLES:
            report.add_unmapped_key((*service_key, "environment", variable), UnmappedReason.done_differently, RENDEZVOUS_TEXT, value=value)
        elif first_variables.get(variable) != value:
            report.add_unmapped_key(
                (*service_key, "environment", variable),
                UnmappedReason.no_counterpart,
                "all nodes use the environment of the first service",
                value=value,
            )
    report.mark_keys_handled((*service_key, "environment"))


def _map_nodes(report: MigrationReport, slots_by_service: dict[str, int | None], node_count: int | None) -> None:
    hosts = {name: _find_pinned_host(report, name) for name in slots_by_service}
    slot_counts = {count for count in slots_by_service.values() if count is not None}
    if all(hosts.values()) and len(set(hosts.values())) == len(hosts):
        if node_count not in (None, len(hosts)):
            report.add_note(
                f"torchrun has --nnodes {node_count}, but there are {len(hosts)} services: runner.hosts lists the hosts of the services"
            )
        for name in slots_by_service:
            replicas_key = ("services", name, "deploy", "replicas")
            if report.get_source_value(replicas_key, 1) != 1:
                report.add_unmapped_key(
                    replicas_key, UnmappedReason.no_counterpart, "one service runs on each node; its ranks are the node's slots"
                )
        have_same_slots = len(slot_counts) == 1 and len(slots_by_service) > 1
        if have_same_slots:
            report.set_config_value("runner.default_gpu_count", slot_counts.pop())
        report.set_config_value(
            "runner.hosts",
            [
                hosts[name] if have_same_slots or slots is None else f"{hosts[name]} slots={slots}"
                for name, slots in slots_by_service.items()
            ],
        )
        return
    replicas = [report.get_source_value(("services", name, "deploy", "replicas"), 1) for name in slots_by_service]
    replica_count = sum(count for count in replicas if isinstance(count, int))
    report.set_config_value("runner.nodes", node_count or replica_count)
    if len(set(hosts.values()) - {""}) < len([host for host in hosts.values() if host]):
        report.add_note(
            "several services are on one host: swarmtrain runs one service per host, with one slot per rank: runner.hosts: ['HOST slots=2']"
        )
    if any(report.get_source_value(("services", name, "deploy", "mode")) == "global" for name in slots_by_service):
        report.add_note("mode: global runs the service on every node of the swarm: set runner.nodes to the number of nodes")
    if len(slot_counts) == 1:
        report.set_config_value("runner.default_gpu_count", slot_counts.pop())


def _map_networks(report: MigrationReport, service_names: Sequence[str]) -> None:
    """Map the networks that `service_names` join."""
    joined = {name for service in service_names for name in _collect_joined_networks(report, ("services", service, "networks"))}
    if len(joined) > 1:
        report.add_note(f"a run has one network, but the services use {', '.join(sorted(joined))}")
    for name in report.get_source_mapping("networks"):
        if name in joined | {"default"}:
            _map_network(report, ("networks", name), name)
        else:
            report.add_unmapped_key(("networks", name), UnmappedReason.no_counterpart, "no training node joins it")


def _collect_joined_networks(report: MigrationReport, key: KeyPath) -> set[str]:
    networks = report.get_source_value(key)
    names = {str(name) for name in networks} if isinstance(networks, list | dict) else set()
    report.mark_keys_handled(key)
    for name, body in report.get_source_mapping(key).items():
        if body:
            report.add_unmapped_key((*key, name), UnmappedReason.done_differently, "nodes are named node0, node1 and so on")
    if unknown := sorted(names - report.get_source_mapping("networks").keys() - {"default"}):
        report.add_unmapped_key(key, UnmappedReason.no_counterpart, "a network that the file does not define", value=", ".join(unknown))
    return names


def _map_network(report: MigrationReport, key: KeyPath, name: str) -> None:
    body = report.get_source_mapping(key)
    if external := body.get("external"):
        network_name = body.get("name") or (external.get("name") if isinstance(external, dict) else None) or name
        report.map_key((*key, "external"), "runner.swarm.network", network_name)
        report.mark_keys_handled(key)
        return
    options = report.get_source_mapping((*key, "driver_opts"))
    mtu, encrypted = str(options.get("com.docker.network.driver.mtu", "")), options.get("encrypted")
    if mtu.isdigit():
        report.map_key((*key, "driver_opts", "com.docker.network.driver.mtu"), "runner.swarm.mtu", int(mtu))
    if encrypted is not None and str(encrypted).lower() in ("true", "1", ""):
        report.map_key((*key, "driver_opts", "encrypted"), "runner.swarm.encrypted", True)
    elif encrypted is not None:
        report.add_unmapped_key((*key, "driver_opts", "encrypted"), UnmappedReason.is_default, "runner.swarm.encrypted")
    if body.get("internal"):
        report.map_key((*key, "internal"), "runner.swarm.internal", True)
    if not body:
        report.add_unmapped_key(key, UnmappedReason.is_default, "the stack creates its own network")
    for field in body:
        if field not in ("driver_opts", "internal"):
            report.add_unmapped_key((*key, field), UnmappedReason.done_differently, "the stack creates its own network")


def _map_mounts(report: MigrationReport, key: KeyPath) -> None:
    mounts = []
    for index, item in enumerate(report.get_source_list(key)):
        source_key = (*key, str(index))
        if isinstance(item, dict):
            source, target, read_only = str(item.get("source", "")), str(item.get("target", "")), bool(item.get("read_only"))
            if item.get("type") == "tmpfs":
                size = (item.get("tmpfs") or {}).get("size")
                if target == "/dev/shm" and size:  # noqa: S108  # a path in the container
                    report.map_key(source_key, "runner.docker_config.shm_size", size)
                else:
                    report.add_unmapped_key(source_key, UnmappedReason.no_counterpart, "runner.docker_config.shm_size is for /dev/shm")
                continue
        else:
            source, target, mode = (*str(item).split(":"), "", "")[:3]
            read_only = "ro" in mode.split(",")
        if "$" in f"{source}{target}":
            report.add_unmapped_key(source_key, UnmappedReason.unknown, "a shell variable: set runner.docker_config.docker_mounts")
        elif not target or source.startswith((".", "~")):
            report.add_unmapped_key(
                source_key, UnmappedReason.unknown, "use an absolute path on every node in runner.docker_config.docker_mounts"
            )
        else:
            mounts.append((source, target))
            report.mark_keys_handled(source_key)
            if read_only:
                report.add_unmapped_key(
                    (*source_key, "read_only"), UnmappedReason.no_counterpart, "mounts are always writable", value=f"{source}:{target}:ro"
                )
    if mounts:
        report.set_config_value("runner.docker_config.docker_mounts", mounts)
    if report.has_source_key(key):
        report.mark_keys_handled(key)


def _map_volumes(report: MigrationReport, first_service_name: str) -> None:
    mounted = {source for source, _ in report.get_config_value("runner.docker_config.docker_mounts") or ()}
    volume_options = {}
    for name in report.get_source_mapping("volumes"):
        body = report.get_source_mapping(("volumes", name))
        options = {str(field): str(value) for field, value in report.get_source_mapping(("volumes", name, "driver_opts")).items()}
        if body.get("external") or body.get("driver", "local") != "local":
            report.add_unmapped_key(
                ("volumes", name), UnmappedReason.no_counterpart, "runner.docker_config.volumes supports only Docker's local driver"
            )
        elif name not in mounted:
            report.add_unmapped_key(("volumes", name), UnmappedReason.no_counterpart, "no training node mounts it")
        elif options:
            volume_options[name] = options
            report.mark_keys_handled(("volumes", name, "driver_opts"), ("volumes", name, "driver"))
        else:
            report.add_unmapped_key(("volumes", name), UnmappedReason.is_default, "each node has its own volume")
    if volume_options:
        report.set_config_value("runner.docker_config.volumes", volume_options)


def _map_top_level_fields(report: MigrationReport) -> None:
    for name, body in report.get_source_mapping("secrets").items():
        if isinstance(body, dict) and body.get("file") and re.fullmatch(r"[A-Za-z_]\w*", str(name)):
            report.map_key(("secrets", name), ("runner", "secrets", name), body["file"])
        else:
            report.add_unmapped_key(
                ("secrets", name),
                UnmappedReason.done_differently,
                "runner.secrets: {NAME: FILE}, from a file on the machine that deploys",
                value=name,
            )
    for name in report.source:
        if name in ("version", "name"):
            report.add_unmapped_key(
                name, UnmappedReason.done_differently, _STACK_FILE_TEXT if name == "version" else "the config file's name, or --name"
            )
        elif name == "configs":
            report.add_unmapped_key(name, UnmappedReason.done_differently, "runner.code")
        elif name.startswith("x-"):
            report.add_unmapped_key(name, UnmappedReason.done_differently, "its values are filled in where it is referenced")


def _parse_duration(text: str) -> float | None:
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    return float(sum(int(amount or 0) * unit for amount, unit in zip(match.groups(), (3600, 60, 1), strict=True))) if match else None


def _is_number(value: Any) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", str(value)) is not None
