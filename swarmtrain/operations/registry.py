"""Start the registry in the swarm, with its login: the password, the confirmation of changes, and docker's own login on this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from swarmtrain.atomic_file import SECRET_MODE, write_text_atomically
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import ImageError
from swarmtrain.images import swarm_registry
from swarmtrain.images.registry_access import RegistryAccess
from swarmtrain.images.swarm_registry import RegistryStatus
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.docker_login import store_docker_login
from swarmtrain.launchers.common.history_store import resolve_state_directory
from swarmtrain.operations.confirmation import require_confirmation
from swarmtrain.view.console import print_message, show_progress

_PASSWORD_BYTES = 24


def start_registry(
    *,
    node: str | None,
    port: int,
    image: str,
    user: str,
    password_file: Path | None,
    allow_deletes: bool,
    assume_yes: bool,
) -> RegistryStatus:
    """Start the registry, store its login on this machine for docker, and return its status. `user` is empty for a registry without login.

    The password is that in `password_file`; without a file, that of the running registry, or a random one, which is stored in swarmtrain's
    state directory. Changes of a running registry must be confirmed, unless `assume_yes`. Raises SwarmtrainError.
    """
    engine = DockerEngine()
    address = swarm_registry.get_registry_address(engine, node=node, port=port)
    file = password_file or resolve_state_directory() / ".registry" / address.replace(":", "-")
    keeps_password = password_file is None and user == swarm_registry.find_login_user(engine)
    access = RegistryAccess(
        user, "" if keeps_password or not user else _read_or_create_password(file, password_file is None), allow_deletes
    )
    _confirm_changes(swarm_registry.list_access_changes(engine, access), assume_yes=assume_yes)
    with show_progress("starting a registry", interrupt_hint="run swarmtrain image registry up again") as report_progress:
        swarm_registry.start_registry(engine, node=node, port=port, image=image, access=access, report_progress=report_progress)
    if access.password:
        store = store_docker_login(os.environ, address, user, access.password)
        print_message(
            f"the login is stored in {store}; on other machines: docker login {address} --username {user} --password-stdin <{file}"
        )
    return swarm_registry.get_registry_status(DockerEngine())


def _read_or_create_password(file: Path, may_create: bool) -> str:
    try:
        if may_create and not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text_atomically(file, secrets.token_urlsafe(_PASSWORD_BYTES) + "\n", mode=SECRET_MODE)
        password = file.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else "is not text"
        raise ImageError(reason, place=str(file), hint="--password-file needs a file whose only line is the password") from None
    if not password:
        raise ImageError("is empty", place=str(file), hint="--password-file needs a file whose only line is the password")
    return password


def _confirm_changes(changes: Sequence[str], *, assume_yes: bool) -> None:
    if not changes:
        return
    print_message("the registry is running; this changes:")
    for line in changes:
        print_message(f"  {line}")
    print_message("its container is replaced, and its images are kept")
    require_confirmation("change the running registry", f"service {swarm_registry.SERVICE_NAME}", assume_yes=assume_yes)
