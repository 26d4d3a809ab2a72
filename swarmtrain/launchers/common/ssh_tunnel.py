"""SSH tunnel to a Docker engine at an ssh:// address: OpenSSH forwards a local socket to the engine's socket, over one connection.

The user's own ssh program is used, with its keys, agent, jump hosts and `~/.ssh/config`; the remote side needs only sshd.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from swarmtrain import process
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import EngineError, ProcessError

_CONNECT_TIMEOUT_SECONDS = 30.0
# A socket path has at most 107 characters, including our file name and the suffix of ssh's temporary file.
_MAX_FOLDER_LENGTH = 60
_SSH_OPTIONS = ("ExitOnForwardFailure=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=2")


def open_tunnel(address: str) -> str:
    """Open an SSH tunnel to the engine at `address`, and return the address of the tunnel's local socket.

    `address` has the form ssh://[USER@]HOST[:PORT][/SOCKET].
    The tunnel is open until this process exits. Raises EngineError, with ssh's message, if the tunnel cannot be opened.
    """
    place = f"Docker engine at {address}"
    try:
        folder = Path(
            tempfile.mkdtemp(prefix="swarmtrain-ssh-", dir=_choose_socket_folder(tempfile.gettempdir()))
        )  # accessible to this user only
    except OSError as error:
        raise EngineError(
            f"cannot create a folder for its SSH tunnel: {describe_os_error(error)}",
            place=place,
            hint="choose a writable folder with: export TMPDIR=FOLDER",
        ) from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    socket_path = folder / "docker.sock"
    command = build_ssh_argv(address, socket_path)
    try:
        ssh = process.start_process(command, stderr=subprocess.PIPE, die_with_parent=True)
    except ProcessError as error:
        raise EngineError(error.output, place=place, hint="apt-get install openssh-client") from None
    atexit.register(ssh.kill)  # atexit runs in reverse order: ssh ends before its folder is removed
    deadline = time.monotonic() + _CONNECT_TIMEOUT_SECONDS
    while not _is_socket_listening(socket_path):
        if ssh.poll() is not None or time.monotonic() > deadline:
            message = (
                ssh.communicate()[1].decode(errors="replace").strip()
                if ssh.poll() is not None
                else f"no response within {_CONNECT_TIMEOUT_SECONDS:g} s"
            )
            raise EngineError(
                message or f"ssh exited with code {ssh.returncode}",
                place=place,
                hint=f"check that this works: {process.format_command([*_build_login_argv(address), 'docker', 'info'])}",
            )
        time.sleep(0.02)
    return f"unix://{socket_path}"


def _choose_socket_folder(preferred_folder: str) -> str:
    """Return `preferred_folder`, or /tmp if the path of a socket below `preferred_folder` would exceed the system's limit."""
    return preferred_folder if len(preferred_folder) <= _MAX_FOLDER_LENGTH else "/tmp"  # noqa: S108  # mkdtemp makes a private folder there


def build_ssh_argv(address: str, socket_path: Path) -> list[str]:
    """Return the ssh command that forwards the engine's socket to `socket_path`. Raises EngineError if `address` is invalid."""
    ssh, *destination = _build_login_argv(address)
    path = urlsplit(address).path
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return [ssh, "-nNT", *options, "-L", f"{socket_path}:{path if len(path) > 1 else '/var/run/docker.sock'}", *destination]


def _build_login_argv(address: str) -> list[str]:
    url = urlsplit(address)
    if url.password:
        raise EngineError(
            "has a password in its address", place="Docker engine", hint="remove the password: ssh prompts for it, or uses a key"
        )
    try:
        port = ["-p", str(url.port)] if url.port else []
    except ValueError:
        port = None
    if not url.hostname or port is None:
        raise EngineError("is not a valid engine address", place=f"Docker engine at {address}", hint="use the form ssh://user@host:22")
    return ["ssh", *port, *(["-l", url.username] if url.username else []), "--", url.hostname]


def _is_socket_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return path.exists() and probe.connect_ex(str(path)) == 0
