"""Commands that need an engine where there is none to be had."""

from __future__ import annotations

import hashlib
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from error_cases import ErrorCase

CHAPTER = "The engine and the swarm"


@pytest.fixture
def dead_socket(error_case: ErrorCase) -> Iterator[Path]:
    """A socket on which nobody listens, at a short path: it may have 107 characters."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        Path(folder).chmod(0o755)
        path = Path(folder) / "docker.sock"
        server.bind(str(path))
        error_case.add_replacement(folder, "/var/run")
        yield path


def test_no_engine(error_case: ErrorCase) -> None:
    """Docker engine is not running

    Docker is not installed, not started, or at another address. Every command that needs an engine fails in the same way.
    """
    error_case.write_config("runner: {nodes: 2}")
    error_case.set_variable("DOCKER_HOST", "unix:///nowhere/docker.sock")
    error_case("swarmtrain deploy config.yml")
    before = ("plan config.yml", "generate config.yml", "doctor", "doctor config.yml")
    for command in (*before, "status", "logs", "scale --nodes 2", "stop", "down"):
        error_case(f"swarmtrain {command}", show=False)


def test_refused(error_case: ErrorCase, dead_socket: Path) -> None:
    """Docker engine refuses the connection

    The socket or the machine still exists, but nothing listens there.
    """
    error_case.write_config("runner: {nodes: 2}")
    error_case.set_variable("DOCKER_HOST", f"unix://{dead_socket}")
    error_case("swarmtrain plan config.yml")
    error_case.set_variable("DOCKER_HOST", "tcp://127.0.0.1:1")
    error_case("swarmtrain plan config.yml")


def test_permission(error_case: ErrorCase, dead_socket: Path) -> None:
    """Permission denied for the Docker socket

    The engine's socket belongs to root and to the group `docker`. Other users cannot use it.
    """
    error_case.write_config("runner: {nodes: 2}")
    error_case.set_variable("DOCKER_HOST", f"unix://{dead_socket}")
    dead_socket.chmod(0o600)
    error_case("swarmtrain deploy config.yml", as_nobody=True)
    error_case("swarmtrain status", as_nobody=True, show=False)


def test_not_an_engine(error_case: ErrorCase) -> None:
    """Invalid DOCKER_HOST

    `DOCKER_HOST` is not a usable address of a Docker engine.
    """
    error_case.write_config("runner: {nodes: 2}")
    error_case.add_replacement(r"\[Errno -\d\] .*", "[Errno -2] Name or service not known")
    for address in ("nonsense", "tcp://", "tcp://no.such.host.invalid:2375", "tcp://127.0.0.1:many", "fd://"):
        error_case.set_variable("DOCKER_HOST", address)
        error_case("swarmtrain plan config.yml")


def test_ssh_that_leads_nowhere(error_case: ErrorCase) -> None:
    """Docker engine cannot be reached over SSH

    swarmtrain connects with the `ssh` of this machine, its keys and its configuration. The reason in the error is the message of `ssh`.
    """
    error_case.write_config("runner: {nodes: 2}")
    error_case.add_replacement(r"hostname gpu-1\.invalid: .*", "hostname gpu-1.invalid: Name or service not known")
    for address in ("ssh://gpu-1.invalid", "ssh://", "ssh://gpu-1:many"):
        error_case.set_variable("DOCKER_HOST", address)
        error_case("swarmtrain plan config.yml")


def test_a_context_that_is_not_there(error_case: ErrorCase) -> None:
    """Invalid Docker context

    The context does not exist, or does not name an engine, or Docker's `config.json` cannot be read.
    """
    error_case.write_config("runner: {nodes: 2}")
    del error_case.env["DOCKER_HOST"]
    error_case.add_replacement(re.escape(f"{error_case.home}/.docker"), "~/.docker")
    error_case.set_variable("DOCKER_CONTEXT", "gpus")
    error_case("swarmtrain plan config.yml")
    folder = hashlib.sha256(b"gpus").hexdigest()
    error_case.write_file(f"../home/.docker/contexts/meta/{folder}/meta.json", '{"Name": "gpus", "Endpoints": null}', show=False)
    error_case("swarmtrain plan config.yml")
    del error_case.env["DOCKER_CONTEXT"]
    error_case.run_setup("echo nonsense > ../home/.docker/config.json; unset DOCKER_CONTEXT")
    error_case("swarmtrain plan config.yml")
