"""Selecting the engine's endpoint: as the docker CLI does, which creates the contexts here."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import certificates
import pytest

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.engine_endpoint import DEFAULT_ADDRESS, Endpoint, TlsFiles, find_endpoint
from swarmtrain.launchers.common.ssh_tunnel import build_ssh_argv, open_tunnel


@pytest.fixture
def docker_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose docker CLI knows two contexts, one of them with certificates."""
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("the docker command line is not installed")
    docker_environment = {"DOCKER_CONFIG": str(tmp_path / "docker"), "PATH": "/usr/bin:/bin"}
    certificates.create_authority(tmp_path)
    certificates.sign_certificate(tmp_path, cert="cert.pem", key="key.pem")
    keys = ",".join(f"{name}={tmp_path}/{name}.pem" for name in ("ca", "cert", "key"))
    for name, host in (("plain", "host=ssh://me@gpu-1"), ("safe", f"host=tcp://gpu-2:2376,{keys}")):
        subprocess.run([docker, "context", "create", name, "--docker", host], env=docker_environment, check=True, capture_output=True)
    return docker_environment


def test_the_engine_is_found_in_the_order_of_the_docker_cli(docker_environment: dict[str, str]) -> None:
    folder = Path(docker_environment["DOCKER_CONFIG"])
    assert find_endpoint(docker_environment) == Endpoint(DEFAULT_ADDRESS)
    assert find_endpoint({**docker_environment, "DOCKER_CONTEXT": "plain"}) == Endpoint("ssh://me@gpu-1", "context plain")
    (folder / "config.json").write_text('{"currentContext": "plain"}')
    assert find_endpoint(docker_environment) == Endpoint("ssh://me@gpu-1", "context plain")
    assert find_endpoint({**docker_environment, "DOCKER_CONTEXT": "default"}) == Endpoint(DEFAULT_ADDRESS)
    assert find_endpoint({**docker_environment, "DOCKER_CONTEXT": "safe", "DOCKER_HOST": "tcp://gpu-3:2375"}) == Endpoint(
        "tcp://gpu-3:2375"
    )
    assert str(find_endpoint(docker_environment)) == "ssh://me@gpu-1 (context plain)"


def test_the_keys_of_an_engine(docker_environment: dict[str, str], tmp_path: Path) -> None:
    found = find_endpoint({**docker_environment, "DOCKER_CONTEXT": "safe"})
    assert found.tls is not None
    assert found.tls.verify
    for kept, name in ((found.tls.ca, "ca.pem"), (found.tls.cert, "cert.pem"), (found.tls.key, "key.pem")):
        assert kept.read_text() == (tmp_path / name).read_text()
    environ = {"DOCKER_HOST": "tcp://gpu-2:2376", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(tmp_path)}
    assert find_endpoint(environ).tls == TlsFiles(tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    with pytest.raises(EngineError, match=r"cannot be read: .*/ca\.pem"):
        find_endpoint({**environ, "DOCKER_CERT_PATH": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ssh://gpu-1", ["-L", "S:/var/run/docker.sock", "--", "gpu-1"]),
        ("ssh://me@gpu-1:2222/run/other.sock", ["-L", "S:/run/other.sock", "-p", "2222", "-l", "me", "--", "gpu-1"]),
    ],
)
def test_ssh_carries_the_socket(address: str, words: list[str]) -> None:
    assert build_ssh_argv(address, Path("S"))[-len(words) :] == words


@pytest.mark.parametrize("address", ["ssh://", "ssh://gpu:many"])
def test_invalid_addresses(address: str) -> None:
    with pytest.raises(EngineError, match="is not a valid engine address"):
        build_ssh_argv(address, Path("S"))


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(EngineError) as refused:
        build_ssh_argv("ssh://me:hush@gpu-1", Path("S"))
    assert "hush" not in str(refused.value) + str(refused.value.hint)


def test_a_socket_path_that_is_too_long_for_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing folder for temporary files is reported like a full one."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(EngineError, match="cannot create a folder for its SSH tunnel: no such file") as refused:
        open_tunnel("ssh://gpu-1")
    assert refused.value.hint == "choose a writable folder with: export TMPDIR=FOLDER"


def test_a_context_of_another_shape_names_no_engine(tmp_path: Path) -> None:
    folder = tmp_path / "contexts" / "meta" / hashlib.sha256(b"odd").hexdigest()
    folder.mkdir(parents=True)
    for text in ("[]", '{"Endpoints": null}', '{"Endpoints": {"docker": []}}', '{"Endpoints": {"docker": {"Host": 7}}}'):
        (folder / "meta.json").write_text(text)
        with pytest.raises(EngineError, match="does not specify a Docker engine"):
            find_endpoint({"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "odd"})
