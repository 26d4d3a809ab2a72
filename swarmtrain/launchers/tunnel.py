"""An engine behind ssh://: OpenSSH carries its socket to one of ours, all requests over one connection.

The user's own ssh does it, with their keys, agent, jump hosts and `~/.ssh/config`; the other side needs nothing but sshd.
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
from swarmtrain.config.files import reason
from swarmtrain.errors import EngineError, ProcessError

_PATIENCE = 30.0
# A socket's path may have 107 characters; ours and the names that ssh tries first need some.
_LONGEST = 60
_OPTIONS = ("ExitOnForwardFailure=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=2")


def open_tunnel(address: str) -> str:
    """Return the address of a socket here that leads to the engine at `address`, ssh://[USER@]HOST[:PORT][/SOCKET].

    The tunnel lasts until this process ends. Raises EngineError with what ssh said.
    """
    place = f"Docker engine at {address}"
    try:
        folder = Path(tempfile.mkdtemp(prefix="swarmtrain-ssh-", dir=_short(tempfile.gettempdir())))  # nobody else can enter it
    except OSError as error:
        raise EngineError(f"no folder for its tunnel can be made: {reason(error)}", place=place, hint="export TMPDIR=FOLDER") from None
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    here = folder / "docker.sock"
    command = argv(address, here)
    try:
        ssh = process.start(command, stderr=subprocess.PIPE, die_with_parent=True)
    except ProcessError as error:
        raise EngineError(error.output, place=place, hint="apt-get install openssh-client") from None
    atexit.register(ssh.kill)  # what is registered last goes first
    end = time.monotonic() + _PATIENCE
    while not _listens(here):
        if ssh.poll() is not None or time.monotonic() > end:
            said = ssh.communicate()[1].decode(errors="replace").strip() if ssh.poll() is not None else f"no answer within {_PATIENCE:g} s"
            raise EngineError(
                said or f"ssh ended with exit code {ssh.returncode}",
                place=place,
                hint=f"does this work? {process.show([*_login(address), 'docker', 'info'])}",
            )
        time.sleep(0.02)
    return f"unix://{here}"


def _short(folder: str) -> str:
    """Return `folder`, or another one if the path of a socket below it would be longer than the system takes."""
    return folder if len(folder) <= _LONGEST else "/tmp"  # noqa: S108  # what is made there is ours alone


def argv(address: str, here: Path) -> list[str]:
    """Return the ssh command that makes the engine's socket available as `here`. Raises EngineError."""
    ssh, *there = _login(address)
    path = urlsplit(address).path
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return [ssh, "-nNT", *options, "-L", f"{here}:{path if len(path) > 1 else '/var/run/docker.sock'}", *there]


def _login(address: str) -> list[str]:
    url = urlsplit(address)
    if url.password:
        raise EngineError("has a password in its address", place="Docker engine", hint="leave it out: ssh asks for it, or takes a key")
    try:
        port = ["-p", str(url.port)] if url.port else []
    except ValueError:
        port = None
    if not url.hostname or port is None:
        raise EngineError("is no address of an engine", place=f"Docker engine at {address}", hint="write it as ssh://user@host:22")
    return ["ssh", *port, *(["-l", url.username] if url.username else []), "--", url.hostname]


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return path.exists() and probe.connect_ex(str(path)) == 0
