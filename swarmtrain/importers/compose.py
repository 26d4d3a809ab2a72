"""A compose file for a Swarm, written by hand: a service a node, or one of several replicas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from swarmtrain.config.names import image as check_image
from swarmtrain.errors import ConfigError, Problem
from swarmtrain.importers.book import Book, Key, Why
from swarmtrain.importers.launch import MEETING, MEETING_VARIABLES, Launch, carry, carry_variable, read_line, take_apart

_CONSTRAINT = re.compile(r"\s*node\.(?P<what>hostname|id|role|labels\.(?P<label>[\w.-]+))\s*(?P<sign>==|!=)\s*(?P<value>.+?)\s*")
_VARIABLE = re.compile(r"\$\{?\w+")
_IMAGE = "the image brings its own"
_STACK = "generate writes a whole stack file"
_LEFT: dict[str, tuple[Why, str]] = {
    "hostname": (Why.otherwise, MEETING),
    "container_name": (Why.nothing, "a stack ignores it"),
    "depends_on": (Why.otherwise, "nodes wait for the rendezvous"),
    "ports": (Why.nothing, "a node publishes no port; it may, with swarm.network: host"),
    "expose": (Why.nothing, "within the run's network every port is open"),
    "restart": (Why.otherwise, "runner.max_restarts"),
    "network_mode": (Why.nothing, "the stack makes its own network"),
    "tmpfs": (Why.otherwise, "runner.docker_config.shm_size, for /dev/shm"),
    "healthcheck": (Why.otherwise, "the notice board hears from every rank"),
    "logging": (Why.otherwise, "swarmtrain logs, kept on this machine"),
    "build": (Why.otherwise, "swarmtrain image build"),
    "working_dir": (Why.otherwise, "the script and runner.code are put beside each other"),
    "entrypoint": (Why.otherwise, "each node starts a supervisor"),
    "stdin_open": (Why.nothing, ""),
    "tty": (Why.nothing, ""),
    "init": (Why.default, "the supervisor reaps"),
    "ipc": (Why.otherwise, "runner.docker_config.shm_size; a stack ignores ipc"),
    "privileged": (Why.nothing, "a stack ignores it"),
    "ulimits": (Why.otherwise, "runner.swarm.rdma lets ranks lock memory"),
    "cap_add": (Why.otherwise, "runner.swarm.rdma lets ranks lock memory"),
    "devices": (Why.otherwise, "runner.swarm.gpu and runner.swarm.rdma; a stack ignores devices"),
    "configs": (Why.otherwise, "runner.code"),
    "labels": (Why.nothing, ""),
    "extra_hosts": (Why.nothing, ""),
    "env_file": (Why.otherwise, "its variables in runner.env, its secrets in runner.secrets"),
    "deploy.restart_policy": (Why.otherwise, "runner.max_restarts"),
    "deploy.update_config": (Why.otherwise, "swarmtrain scale and deploy change one run at a time"),
    "deploy.rollback_config": (Why.nothing, ""),
    "deploy.endpoint_mode": (Why.otherwise, _STACK),
    "deploy.labels": (Why.nothing, ""),
    "deploy.placement.preferences": (Why.otherwise, "one service on each node"),
    "deploy.placement.max_replicas_per_node": (Why.otherwise, "one service on each node"),
    "deploy.resources.reservations.cpus": (Why.nothing, "runner.docker_config.cpus is a limit"),
    "deploy.resources.reservations.memory": (Why.nothing, "runner.docker_config.memory is a limit"),
    "deploy.resources.limits.pids": (Why.nothing, ""),
}


def read(book: Book, source: str) -> None:
    """Carry a compose file. Raises ConfigError if none of its services trains."""
    services = book.mapping("services")
    found = {name: launch for name, body in services.items() if (launch := _training(book, name, body)) is not None}
    if not found:
        hint = "a service trains if its command starts torchrun or a script, or its environment has RANK or WORLD_SIZE"
        raise ConfigError((Problem("services", "none of them trains", book.line(("services",)), hint),), source=source)
    for name in services:
        if name not in found:
            book.leave(
                ("services", name),
                Why.nothing,
                "no node of the training: deploy it as a stack of its own",
            )
    book.place("swarm")
    names = sorted(found, key=lambda name: _rank(book, name, found[name]))
    nodes, slots = _service(book, names[0], found[names[0]])
    every = {names[0]: slots} | {name: _same(book, names[0], name, found[name]) for name in names[1:]}
    _nodes(book, every, nodes)
    _networks(book, names)
    _volumes(book, names[0])
    _top(book)


def _training(book: Book, name: str, body: Any) -> Launch | None:
    if not isinstance(body, dict):
        return None
    for field in ("command", "entrypoint"):
        value = body.get(field)
        try:
            launch = (
                take_apart([str(word) for word in value]) if isinstance(value, list) else read_line(str(value or "").replace("$$", "$"))
            )
        except ValueError:
            launch = None
        if launch is not None:
            return launch
    variables = _variables(body.get("environment"))
    return Launch("image") if any(variable in variables for variable in ("RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR")) else None


def _variables(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    return {str(item).partition("=")[0]: str(item).partition("=")[2] for item in given} if isinstance(given, list) else {}


def _rank(book: Book, name: str, launch: Launch) -> int:
    """Return a node's place among the others; without one, nodes stay as they stand in the file."""
    variables = _variables(book.get(("services", name, "environment")))
    text = launch.flags.get("node_rank", str(variables.get("NODE_RANK", variables.get("RANK", ""))))
    return int(text) if text.isdigit() else 0


def _service(book: Book, name: str, launch: Launch) -> tuple[int | None, int | None]:
    at: Key = ("services", name)
    for word in launch.around:
        variable, equals, value = word.partition("=")
        if equals and variable.isidentifier():
            carry_variable(book, (*at, "command", variable), variable, value)
        else:
            book.leave((*at, "command", word), Why.otherwise, "each node starts a supervisor", value=word)
    nodes, slots = (None, None) if launch.program == "image" else carry(book, (*at, _command(book, at)), launch)
    if launch.program == "image":
        book.note("no service has a command: what the image starts is to be runner.script")
    for field in book.get(at):
        _field(book, at, field)
    variables = _variables(book.get((*at, "environment")))
    for variable, value in variables.items():
        _variable(book, (*at, "environment", variable), variable, value)
    book.use(*([(*at, "environment")] if isinstance(book.get((*at, "environment")), list) else []))
    _deploy(book, (*at, "deploy"))
    _mounts(book, (*at, "volumes"))
    return nodes, slots


def _command(book: Book, at: Key) -> str:
    return "command" if book.has((*at, "command")) else "entrypoint"


def _field(book: Book, at: Key, field: str) -> None:
    key = (*at, field)
    value = book.get(key)
    if field in ("environment", "deploy", "volumes", "networks"):
        return
    if field in ("command", "secrets") or (field == "entrypoint" and not book.has((*at, "command"))):
        book.use(key)
    elif field == "image":
        _image(book, key, str(value))
    elif field == "shm_size":
        book.carry(key, "runner.docker_config.shm_size")
    elif field == "user" and re.fullmatch(r"\d+(:\d+)?", str(value)):
        book.carry(key, "runner.docker_config.user", str(value))
    elif field == "stop_grace_period" and (seconds := _seconds(str(value))):
        book.carry(key, "runner.stop_grace", seconds)
    elif not _machine(book, key, field, value):
        book.leave(key, *_LEFT.get(field, (Why.nothing, "")))


def _machine(book: Book, key: Key, field: str, value: Any) -> bool:
    """Carry what a service takes of its machine: network, GPUs, adapters. Return whether `field` is of these."""
    if field == "network_mode" and value == "host":
        book.carry(key, "runner.swarm.network", "host")
    elif field == "runtime" and value == "nvidia":
        book.show_gpus()
        book.use(key)
    elif field in ("cap_add", "devices", "ulimits") and re.search(r"IPC_LOCK|infiniband|memlock", str(value)):
        book.carry(key, "runner.swarm.rdma", True)
    else:
        return False
    return True


def _image(book: Book, key: Key, text: str) -> None:
    try:
        book.carry(key, "runner.docker_config.docker_container", check_image(text))
    except ValueError:
        why = "a variable: runner.docker_config.docker_container" if "$" in text else "runner.docker_config.docker_container"
        book.leave(key, Why.unknown, why)


def _variable(book: Book, key: Key, name: str, value: Any) -> None:
    if name == "NVIDIA_VISIBLE_DEVICES":
        ids = str(value)
        book.carry(key, "runner.swarm.gpu", "none" if ids in ("none", "void", "") else "visible")
        if re.fullmatch(r"[\w-]+(,[\w-]+)*", ids) and ids not in ("all", "none", "void"):
            book.put("runner.swarm.gpu_ids", ids.split(","))
    elif value is None or value == "":
        book.leave(key, Why.unknown, f"it came from the shell that deployed: runner.env.{name}")
    else:
        carry_variable(book, key, name, value)


def _deploy(book: Book, key: Key) -> None:
    for name in ("cpus", "memory"):
        at = (*key, "resources", "limits", name)
        if book.has(at):
            book.carry(
                at, f"runner.docker_config.{name}", float(book.get(at)) if name == "cpus" and _number(book.get(at)) else book.get(at)
            )
    for index, item in enumerate(book.items((*key, "resources", "reservations", "generic_resources"))):
        at = (*key, "resources", "reservations", "generic_resources", str(index))
        kind = item.get("discrete_resource_spec") if isinstance(item, dict) else None
        if not isinstance(kind, dict):
            book.leave(at, Why.nothing, "a kind and a number: runner.swarm.generic_resource")
            continue
        book.put("runner.swarm.gpu", "reserve")
        book.put("runner.swarm.generic_resource", kind.get("kind", "NVIDIA-GPU"))
        if type(kind.get("value")) is int:
            book.put("runner.default_gpu_count", kind["value"])
        book.use(at)
    if book.has((*key, "resources", "reservations", "devices")):
        book.show_gpus()
        book.leave((*key, "resources", "reservations", "devices"), Why.otherwise, "runner.swarm.gpu; docker stack deploy refuses devices")
    for index, text in enumerate(book.items((*key, "placement", "constraints"))):
        _constraint(book, (*key, "placement", "constraints", str(index)), str(text))
    if book.get((*key, "mode")) in ("replicated", "global"):
        book.use((*key, "mode"))
    if isinstance(book.get((*key, "replicas")), int):
        book.use((*key, "replicas"))
    for name, told in _LEFT.items():
        at = (*key[:-1], *name.split("."))
        if name.startswith("deploy.") and book.has(at):
            book.leave(at, *told)


def _constraint(book: Book, key: Key, text: str) -> None:
    found = _CONSTRAINT.fullmatch(text)
    if found and found["sign"] == "==" and found["what"] in ("hostname", "id") and "$" not in text:
        book.use(key)
    elif found and found["label"] and _host(book, key[1]):
        book.leave(key, Why.otherwise, "runner.hosts names the machine", value=text)
    elif found and found["sign"] == "==" and found["label"]:
        labels = dict(book.carried("runner.swarm.labels") or {})
        book.carry(key, "runner.swarm.labels", labels | {found["label"]: found["value"]})
    elif _VARIABLE.search(text):
        book.leave(key, Why.unknown, "a variable: name the hosts in runner.hosts", value=text)
    else:
        book.leave(key, Why.otherwise, "runner.hosts, or runner.swarm.labels", value=text)


def _host(book: Book, name: str) -> str:
    for text in book.items(("services", name, "deploy", "placement", "constraints")):
        found = _CONSTRAINT.fullmatch(str(text))
        if found and found["sign"] == "==" and found["what"] in ("hostname", "id") and "$" not in str(text):
            return found["value"]
    return ""


def _same(book: Book, first: str, name: str, launch: Launch) -> int | None:
    """Compare a service with the first one, which speaks for all; return its ranks."""
    at, model = ("services", name), ("services", first)
    _same_command(book, at, _training(book, first, book.get(model)) or launch, launch)
    _same_environment(book, at, model)
    for key, value in list(book.leaves(at)):
        rest = key[2:]
        if rest[0] in ("command", "entrypoint", "environment", "networks"):
            continue
        pinned = rest[:3] == ("deploy", "placement", "constraints") and _host(book, name) and len(value) == 1
        if pinned or rest[:2] == ("deploy", "replicas") or book.get((*model, *rest)) == value:
            book.use(key)
        else:
            book.leave(key, *_LEFT.get(rest[0], (Why.nothing, f"all nodes are alike, as {first} is")))
    slots = launch.flags.get("nproc_per_node", "")
    return int(slots) if slots.isdigit() else None


def _same_command(book: Book, at: Key, model: Launch, launch: Launch) -> None:
    told = (Why.nothing, "one command on all nodes, that of the first service")
    parts: dict[str, tuple[Any, Any]] = {
        "script": (launch.script, model.script),
        "script_args": (launch.args, model.args),
        "around": (launch.around, model.around),
        "beside": (launch.beside, model.beside),
    }
    parts |= {
        f"{launch.program} --{flag}": (value, model.flags.get(flag))
        for flag, value in launch.flags.items()
        if flag not in ("node_rank", "nproc_per_node")
    }
    book.use(*((*at, field) for field in ("command", "entrypoint") if book.has((*at, field))))
    for name, (value, usual) in parts.items():
        if value != usual:
            book.leave((*at, "command", name), *told, value=value)


def _same_environment(book: Book, at: Key, model: Key) -> None:
    mine, usual = (_variables(book.get((*service, "environment"))) for service in (at, model))
    for variable, value in mine.items():
        if variable in MEETING_VARIABLES:
            book.leave((*at, "environment", variable), Why.otherwise, MEETING, value=value)
        elif usual.get(variable) != value:
            book.leave((*at, "environment", variable), Why.nothing, "one environment on all nodes, that of the first service", value=value)
    book.use((*at, "environment"))


def _nodes(book: Book, services: dict[str, int | None], nodes: int | None) -> None:
    hosts = {name: _host(book, name) for name in services}
    counts = {count for count in services.values() if count is not None}
    if all(hosts.values()) and len(set(hosts.values())) == len(hosts):
        if nodes not in (None, len(hosts)):
            book.note(f"torchrun has --nnodes {nodes}, and there are {len(hosts)} services: runner.hosts has theirs")
        for name in services:
            at = ("services", name, "deploy", "replicas")
            if book.get(at, 1) != 1:
                book.leave(at, Why.nothing, "one service on each node, whose ranks are its slots")
        alike = len(counts) == 1 and len(services) > 1
        if alike:
            book.put("runner.default_gpu_count", counts.pop())
        book.put(
            "runner.hosts", [hosts[name] if alike or slots is None else f"{hosts[name]} slots={slots}" for name, slots in services.items()]
        )
        return
    replicas = [book.get(("services", name, "deploy", "replicas"), 1) for name in services]
    counted = sum(count for count in replicas if isinstance(count, int))
    book.put("runner.nodes", nodes or counted)
    if len(set(hosts.values()) - {""}) < len([host for host in hosts.values() if host]):
        book.note("several services are on one host: it runs one here, and its ranks are slots: runner.hosts: ['HOST slots=2']")
    if any(book.get(("services", name, "deploy", "mode")) == "global" for name in services):
        book.note("mode: global starts one on every node of the swarm: set runner.nodes to their number")
    if len(counts) == 1:
        book.put("runner.default_gpu_count", counts.pop())


def _networks(book: Book, services: Sequence[str]) -> None:
    """Carry the network that `services` join."""
    joined = {name for service in services for name in _joined(book, ("services", service, "networks"))}
    if len(joined) > 1:
        book.note(f"a run has one network, and the services are in {', '.join(sorted(joined))}")
    for name in book.mapping("networks"):
        if name in joined | {"default"}:
            _network(book, ("networks", name), name)
        else:
            book.leave(("networks", name), Why.nothing, "no node of the training joins it")


def _joined(book: Book, key: Key) -> set[str]:
    given = book.get(key)
    names = {str(name) for name in given} if isinstance(given, list | dict) else set()
    book.use(key)
    for name, body in book.mapping(key).items():
        if body:
            book.leave((*key, name), Why.otherwise, "nodes are called node0, node1 and so on")
    if unknown := sorted(names - book.mapping("networks").keys() - {"default"}):
        book.leave(key, Why.nothing, "a network that the file does not describe", value=", ".join(unknown))
    return names


def _network(book: Book, key: Key, name: str) -> None:
    body = book.mapping(key)
    if external := body.get("external"):
        real = body.get("name") or (external.get("name") if isinstance(external, dict) else None) or name
        book.carry((*key, "external"), "runner.swarm.network", real)
        book.use(key)
        return
    options = book.mapping((*key, "driver_opts"))
    mtu, secret = str(options.get("com.docker.network.driver.mtu", "")), options.get("encrypted")
    if mtu.isdigit():
        book.carry((*key, "driver_opts", "com.docker.network.driver.mtu"), "runner.swarm.mtu", int(mtu))
    if secret is not None and str(secret).lower() in ("true", "1", ""):
        book.carry((*key, "driver_opts", "encrypted"), "runner.swarm.encrypted", True)
    elif secret is not None:
        book.leave((*key, "driver_opts", "encrypted"), Why.default, "runner.swarm.encrypted")
    if body.get("internal"):
        book.carry((*key, "internal"), "runner.swarm.internal", True)
    if not body:
        book.leave(key, Why.default, "the stack makes its own network")
    for field in body:
        if field not in ("driver_opts", "internal"):
            book.leave((*key, field), Why.otherwise, "the stack makes its own network")


def _mounts(book: Book, key: Key) -> None:
    mounts = []
    for index, item in enumerate(book.items(key)):
        at = (*key, str(index))
        if isinstance(item, dict):
            source, target, read_only = str(item.get("source", "")), str(item.get("target", "")), bool(item.get("read_only"))
            if item.get("type") == "tmpfs":
                size = (item.get("tmpfs") or {}).get("size")
                if target == "/dev/shm" and size:  # noqa: S108  # a path in the container
                    book.carry(at, "runner.docker_config.shm_size", size)
                else:
                    book.leave(at, Why.nothing, "runner.docker_config.shm_size is for /dev/shm")
                continue
        else:
            source, target, mode = (*str(item).split(":"), "", "")[:3]
            read_only = "ro" in mode.split(",")
        if "$" in f"{source}{target}":
            book.leave(at, Why.unknown, "a variable: runner.docker_config.docker_mounts")
        elif not target or source.startswith((".", "~")):
            book.leave(at, Why.unknown, "an absolute path on every node: runner.docker_config.docker_mounts")
        else:
            mounts.append((source, target))
            book.use(at)
            if read_only:
                book.leave((*at, "read_only"), Why.nothing, "mounts can be written to", value=f"{source}:{target}:ro")
    if mounts:
        book.put("runner.docker_config.docker_mounts", mounts)
    if book.has(key):
        book.use(key)


def _volumes(book: Book, first: str) -> None:
    mounted = {source for source, _ in book.carried("runner.docker_config.docker_mounts") or ()}
    named = {}
    for name in book.mapping("volumes"):
        body = book.mapping(("volumes", name))
        options = {str(field): str(value) for field, value in book.mapping(("volumes", name, "driver_opts")).items()}
        if body.get("external") or body.get("driver", "local") != "local":
            book.leave(("volumes", name), Why.nothing, "runner.docker_config.volumes are of Docker's local driver")
        elif name not in mounted:
            book.leave(("volumes", name), Why.nothing, "no node of the training mounts it")
        elif options:
            named[name] = options
            book.use(("volumes", name, "driver_opts"), ("volumes", name, "driver"))
        else:
            book.leave(("volumes", name), Why.default, "a volume of each node's own")
    if named:
        book.put("runner.docker_config.volumes", named)


def _top(book: Book) -> None:
    for name, body in book.mapping("secrets").items():
        if isinstance(body, dict) and body.get("file") and re.fullmatch(r"[A-Za-z_]\w*", str(name)):
            book.carry(("secrets", name), ("runner", "secrets", name), body["file"])
        else:
            book.leave(
                ("secrets", name), Why.otherwise, "runner.secrets: {NAME: FILE}, from a file on the machine that deploys", value=name
            )
    for name in book.source:
        if name in ("version", "name"):
            book.leave(name, Why.otherwise, _STACK if name == "version" else "the config file's name, or --name")
        elif name == "configs":
            book.leave(name, Why.otherwise, "runner.code")
        elif name.startswith("x-"):
            book.leave(name, Why.otherwise, "what refers to it has its values")


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    return float(sum(int(part or 0) * unit for part, unit in zip(found.groups(), (3600, 60, 1), strict=True))) if found else None


def _number(value: Any) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", str(value)) is not None
