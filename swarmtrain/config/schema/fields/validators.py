"""Validators of config values that Docker and Swarm interpret: images, volumes, labels, variables.

Each check returns its argument, or raises ValueError with the reason. The patterns are those of Docker's own code, so that an engine does
not reject a value in the middle of a deployment: distribution/reference (images), volume/names (volumes) and swarmkit's
manager/constraint (labels, which become placement constraints).
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Any

from swarmtrain.config.schema.fields.host_entry import MAX_NAME_LENGTH
from swarmtrain.config.schema.section import format_duplicates

_NAME_PATTERN = r"[A-Za-z0-9_.-]+"
_IMAGE_PATH = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::\d{{1,5}})?/)?{_IMAGE_PATH}(?:/{_IMAGE_PATH})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9+._-]*:[0-9A-Fa-f]{32,})?"
)
_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{1,190}")
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_INTERFACE = re.compile(r"[A-Za-z0-9_.@:-]{1,15}")
_LABEL_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]+")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9:_\s.*()?+\[\]\\^$|/-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_EXEC_STRING_BYTES = 128 * 1024  # MAX_ARG_STRLEN of Linux, with the terminating NUL
_SHM = "/dev/shm"  # noqa: S108  # a path in the container
_MAX_IMAGE_LENGTH = 400
HOST_NETWORK = "host"
"""Value of runner.swarm.network that selects the host network of the machines."""


def check_image_reference(text: str) -> str:
    """Return `text` if it is a valid image reference. Raises ValueError with the reason if it is not."""
    if len(text) > _MAX_IMAGE_LENGTH or not _IMAGE.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a valid image reference: write REGISTRY/NAME:TAG with a lowercase name, as in registry.lab:5000/swarmtrain:1"
        )
    return text


def check_mounts(mounts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return `mounts` if each has a valid source (a path or a volume name) and a valid target. Raises ValueError with the reason if not."""
    for source, target in mounts:
        if source.startswith((".", "~")):
            raise ValueError(f"{source}: a mount's source is a path on every node, so it must be absolute (or the name of a volume)")
        if not source.startswith("/") and not _VOLUME.fullmatch(source):
            raise ValueError(f"{source!r} is neither an absolute path nor a valid volume name (letters, digits, _ . and -)")
        if not PurePosixPath(target).is_absolute() or PurePosixPath(target) == PurePosixPath("/"):
            raise ValueError(f"{target}: a mount's target must be an absolute path in the container, other than /")
    if duplicates := format_duplicates([_SHM, *(str(PurePosixPath(target)) for _, target in mounts)]):
        raise ValueError(f"{duplicates} is the target of two mounts; {_SHM} is always mounted, with size shm_size")
    return mounts


def check_volumes(volume_options: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return `volume_options` if Docker's local driver accepts each volume's name and options. Raises ValueError with the reason if not."""
    for name, options in volume_options.items():
        if not _VOLUME.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid volume name (letters, digits, _ . and -)")
        if unknown := sorted(options.keys() - {"type", "o", "device"}):
            raise ValueError(f"{name}: {', '.join(unknown)}: Docker's local driver supports only type, o and device")
        nfs = options.get("type", "").startswith("nfs")
        if nfs and not ("addr=" in options.get("o", "") and options.get("device", "").startswith(":/")):
            example = "{type: nfs, o: 'addr=nas,rw', device: ':/export'}"
            raise ValueError(f"{name}: NFS needs the server in o and the path in device: {example}")
    return volume_options


def check_container_path(text: str) -> str:
    """Return `text` if it is a valid path of a folder in the container. Raises ValueError with the reason if it is not."""
    path = PurePosixPath(text)
    if not path.is_absolute() or path == PurePosixPath("/") or ".." in path.parts:
        raise ValueError(f"{text}: must be an absolute path in the container, other than /")
    return text


def check_user_id(text: str) -> str:
    """Return `text` if it is a numeric user id, with or without a group id. Raises ValueError with the reason if it is not."""
    if not re.fullmatch(r"\d{1,10}(?::\d{1,10})?", text):
        raise ValueError(f"{text!r} is not a numeric user: write UID or UID:GID, such as 1000:1000; `id` shows them")
    return text


def check_network_name(name: str) -> str:
    """Return `name` if it is a valid name of an overlay network, or `host`. Raises ValueError with the reason if it is not."""
    if name in ("bridge", "none") or not _NETWORK.fullmatch(name):
        raise ValueError(f"{name}: use the name of an overlay network, or host, or omit it for a network created by the stack")
    return name


def check_network_interface(text: str) -> str:
    """Return `text` if it is a network interface, or a subnet in which the interface has an address.

    Raises ValueError with the reason if not.
    """
    if "/" in text:
        try:
            ipaddress.ip_network(text, strict=False)
        except ValueError:
            raise ValueError(f"{text!r} is not a subnet: write it like 10.1.0.0/16") from None
    elif not _INTERFACE.fullmatch(text):
        raise ValueError(f"{text!r} is not a network interface: write its name, such as ib0, or its subnet, such as 10.1.0.0/16")
    return text


def check_node_labels(node_labels: dict[str, str]) -> dict[str, str]:
    """Return `node_labels` if each is a valid label for a placement constraint. Raises ValueError with the reason if not."""
    for key, value in node_labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(f"{key}={value}: Swarm constraints cannot match labels with braces, quotes, commas or =")
    return node_labels


def check_variable_names(variable_values: dict[str, Any]) -> dict[str, Any]:
    """Return `variable_values` if its keys are valid names of environment variables. Raises ValueError with the reason if not."""
    for name in variable_values:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid variable name: use only letters, digits and _")
        if name.startswith("SWARMTRAIN_"):
            raise ValueError(f"{name}: names that begin with SWARMTRAIN_ are reserved")
    return variable_values


def check_environment(variables: dict[str, str]) -> dict[str, str]:
    """Return `variables` if a process can be started with them. Raises ValueError with the reason if not."""
    for name, value in check_variable_names(variables).items():
        _check_exec_string(f"{name}={value}", name)
    return variables


def check_arguments(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return `arguments` if a process can be started with them. Raises ValueError with the reason if not."""
    for number, argument in enumerate(arguments, 1):
        _check_exec_string(argument, f"argument {number}")
    return arguments


def _check_exec_string(text: str, description: str) -> None:
    size = len(text.encode(errors="surrogateescape"))
    if size >= _MAX_EXEC_STRING_BYTES:
        raise ValueError(
            f"{description}: has {size:,} bytes, but the kernel starts no process with an argument or variable of "
            f"{_MAX_EXEC_STRING_BYTES:,} bytes or more; put the text into a file, and list it in runner.code"
        )


def check_secret_names(secret_files: dict[str, Any]) -> dict[str, Any]:
    """Return `secret_files` if its keys are valid names for secrets, which become names of files and environment variables.

    Raises ValueError with the reason if not.
    """
    for name in check_variable_names(secret_files):
        if len(name) > MAX_NAME_LENGTH:
            raise ValueError(f"{name}: the name of a secret may have at most {MAX_NAME_LENGTH} characters")
    return secret_files
