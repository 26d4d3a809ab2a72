"""Commands that need an engine where there is none to be had."""

from __future__ import annotations

import hashlib
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from answers import Answer

CHAPTER = "The engine and the swarm"


@pytest.fixture
def dead_socket(answer: Answer) -> Iterator[Path]:
    """A socket on which nobody listens, at a short path: it may have 107 characters."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        Path(folder).chmod(0o755)
        path = Path(folder) / "docker.sock"
        server.bind(str(path))
        answer.same(folder, "/var/run")
        yield path


def test_no_engine(answer: Answer) -> None:
    """No engine

    Docker is not installed, not started, or somewhere else. It is the same with every command that needs an engine.
    """
    answer.config("runner: {nodes: 2}")
    answer.export("DOCKER_HOST", "unix:///nowhere/docker.sock")
    answer("swarmtrain deploy config.yml")
    before = ("plan config.yml", "generate config.yml", "doctor", "doctor config.yml")
    for command in (*before, "status", "logs", "scale --nodes 2", "stop", "down"):
        answer(f"swarmtrain {command}", show=False)


def test_refused(answer: Answer, dead_socket: Path) -> None:
    """An engine that has gone

    Its socket is still there, or its machine is, and nothing listens.
    """
    answer.config("runner: {nodes: 2}")
    answer.export("DOCKER_HOST", f"unix://{dead_socket}")
    answer("swarmtrain plan config.yml")
    answer.export("DOCKER_HOST", "tcp://127.0.0.1:1")
    answer("swarmtrain plan config.yml")


def test_permission(answer: Answer, dead_socket: Path) -> None:
    """A socket that is not ours

    An engine's socket belongs to root and to the group docker.
    """
    answer.config("runner: {nodes: 2}")
    answer.export("DOCKER_HOST", f"unix://{dead_socket}")
    dead_socket.chmod(0o600)
    answer("swarmtrain deploy config.yml", nobody=True)
    answer("swarmtrain status", nobody=True, show=False)


def test_not_an_engine(answer: Answer) -> None:
    """DOCKER_HOST is nonsense

    It names no way to an engine.
    """
    answer.config("runner: {nodes: 2}")
    answer.same(r"\[Errno -\d\] .*", "[Errno -2] Name or service not known")
    for address in ("nonsense", "tcp://", "tcp://no.such.host.invalid:2375", "tcp://127.0.0.1:many", "fd://"):
        answer.export("DOCKER_HOST", address)
        answer("swarmtrain plan config.yml")


def test_ssh_that_leads_nowhere(answer: Answer) -> None:
    """An engine behind SSH

    The ssh of this machine goes there, with its keys and its configuration; what it says is the reason.
    """
    answer.config("runner: {nodes: 2}")
    answer.same(r"hostname gpu-1\.invalid: .*", "hostname gpu-1.invalid: Name or service not known")
    for address in ("ssh://gpu-1.invalid", "ssh://", "ssh://gpu-1:many"):
        answer.export("DOCKER_HOST", address)
        answer("swarmtrain plan config.yml")


def test_a_context_that_is_not_there(answer: Answer) -> None:
    """A Docker context

    One that is not there, one that names no engine, and a `config.json` that cannot be read.
    """
    answer.config("runner: {nodes: 2}")
    del answer.env["DOCKER_HOST"]
    answer.same(re.escape(f"{answer.home}/.docker"), "~/.docker")
    answer.export("DOCKER_CONTEXT", "gpus")
    answer("swarmtrain plan config.yml")
    folder = hashlib.sha256(b"gpus").hexdigest()
    answer.file(f"../home/.docker/contexts/meta/{folder}/meta.json", '{"Name": "gpus", "Endpoints": null}', show=False)
    answer("swarmtrain plan config.yml")
    del answer.env["DOCKER_CONTEXT"]
    answer.situation("echo nonsense > ../home/.docker/config.json; unset DOCKER_CONTEXT")
    answer("swarmtrain plan config.yml")
