"""sshd on machines of the lab."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from swarmtrain.lab import Lab


@contextmanager
def open_to_ssh(lab: Lab, nodes: Sequence[str], folder: Path) -> Iterator[dict[str, str]]:
    """Have an sshd on each of `nodes` at port 2222 that lets us in as root; yield the environment in which `ssh` has our key.

    Whoever comes in has a state directory of the node's own: `folder`/NODE.
    """
    for name in ("host", "mine"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "ssh").write_text(
        f'#!/bin/sh\nexec /usr/bin/ssh -F none -i {folder}/mine -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "$@"\n'
    )
    (folder / "ssh").chmod(0o755)
    with ExitStack() as doors:
        for node in nodes:
            doors.enter_context(_sshd(lab, node, folder))
        yield {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@contextmanager
def _sshd(lab: Lab, node: str, folder: Path) -> Iterator[None]:
    own = folder / node
    own.mkdir()
    settings = ["Port 2222", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/mine.pub", "StrictModes no", "UsePAM no"]
    settings += ["PermitRootLogin prohibit-password", f"PidFile {own}/pid", f"SetEnv XDG_STATE_HOME={own}"]
    (own / "sshd_config").write_text("\n".join(settings) + "\n")
    script = 'mkdir -p /run/sshd; exec /usr/sbin/sshd -D -e -f "$0"'
    sshd = subprocess.Popen([*lab.enter(node), "sh", "-c", script, str(own / "sshd_config")])
    try:
        end = time.monotonic() + 30
        while not (own / "pid").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        yield
    finally:
        subprocess.run([*lab.enter(node), "kill", (own / "pid").read_text().strip()], check=True)
        sshd.wait(10)
