"""The login of the swarm's registry: its htpasswd file, and the login that is stored for docker."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from swarmtrain.errors import EngineError, ImageError
from swarmtrain.images.registry_access import SALT_LABEL, USER_LABEL, RegistryAccess
from swarmtrain.launchers.common.docker_login import store_docker_login

REGISTRY = "10.0.0.1:5000"
HELPER = '#!/bin/sh\necho "$1" >> $LOG\ncat >>$LOG\n'


def test_passwords_are_hashed_with_bcrypt() -> None:
    """The hash is a test vector of OpenBSD's and Openwall's bcrypt."""
    htpasswd = RegistryAccess("me", "U*U").build_htpasswd({USER_LABEL: "me", SALT_LABEL: "$2b$05$CCCCCCCCCCCCCCCCCCCCC."})
    assert htpasswd.content == b"me:$2b$05$CCCCCCCCCCCCCCCCCCCCC.E5YPO9kmyuRGyh0XouQYb4YMJKvyOeW\n"


def test_each_new_login_has_its_own_salt() -> None:
    access = RegistryAccess("me", "word")
    first, second = access.build_htpasswd({}), access.build_htpasswd({})
    assert first.salt != second.salt
    assert first.digest != second.digest
    assert access.build_htpasswd({USER_LABEL: "me", SALT_LABEL: first.salt}) == first
    assert access.build_htpasswd({USER_LABEL: "other", SALT_LABEL: first.salt}).salt != first.salt
    assert access.build_htpasswd({USER_LABEL: "me", SALT_LABEL: "malformed"}).salt.startswith("$2b$10$")


def test_a_login_without_the_package_bcrypt_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    with pytest.raises(ImageError) as raised:
        RegistryAccess("me", "word").build_htpasswd({})
    assert str(raised.value).startswith("registry login: needs the package bcrypt, which hashes the password")
    assert "pip install 'swarmtrain[registry]'" in str(raised.value.hint)
    assert RegistryAccess().describe_changes({}, "") == ["requests that delete images: allowed → refused"]


@pytest.mark.parametrize(("user", "password"), [("a:b", "word"), ("a b", "word"), ("me", "x" * 73), ("me", "two\nlines")])
def test_logins_that_an_htpasswd_file_cannot_have(user: str, password: str) -> None:
    with pytest.raises(ImageError):
        RegistryAccess(user, password)


def test_the_login_is_added_to_dockers_own_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"currentContext": "site", "auths": {"other:5000": {"auth": "b3RoZXI6"}}}))
    assert store_docker_login({"DOCKER_CONFIG": str(tmp_path)}, REGISTRY, "me", "word") == str(file)
    auths = {"other:5000": {"auth": "b3RoZXI6"}, REGISTRY: {"auth": base64.b64encode(b"me:word").decode()}}
    assert json.loads(file.read_text()) == {"currentContext": "site", "auths": auths}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_login_goes_to_the_credential_helper_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper, log = tmp_path / "docker-credential-site", tmp_path / "log"
    helper.write_text(HELPER)
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(log))
    (tmp_path / "config.json").write_text('{"credsStore": "site"}')
    assert store_docker_login({"DOCKER_CONFIG": str(tmp_path)}, REGISTRY, "me", "word") == "docker-credential-site"
    request, _, credentials = log.read_text().partition("\n")
    assert (request, json.loads(credentials)) == ("store", {"ServerURL": REGISTRY, "Username": "me", "Secret": "word"})
    assert (tmp_path / "config.json").read_text() == '{"credsStore": "site"}'


def test_a_file_of_docker_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(EngineError, match="invalid JSON") as caught:
        store_docker_login({"DOCKER_CONFIG": str(tmp_path)}, REGISTRY, "me", "word")
    assert caught.value.hint == f"docker login {REGISTRY}"
    assert (tmp_path / "config.json").read_text() == "{broken"
