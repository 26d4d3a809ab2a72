"""`swarmtrain env` on three hosts behind real sshds: created, left alone, changed, broken on one host, interrupted, verified.

The tests' own wheel `borrowed` makes the packages of the tests' interpreter visible: installing torch on each host takes minutes.
"""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ssh_hosts import HOST_NAMES, NODE_LOCAL_FOLDER, Hosts, start_hosts

from swarmtrain import __version__
from swarmtrain.launchers.ssh.python_environment import freeze_installed_packages, read_requirements

pytestmark = pytest.mark.test_all_only("installs Python environments on hosts over SSH")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with start_hosts() as hosts:
        yield hosts


class EnvUser:
    """A user of `swarmtrain env`, in a folder with a config for the three hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.path = NODE_LOCAL_FOLDER / folder.name
        self.env = {
            **os.environ,
            "PATH": f"{hosts.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        (folder / "config.yml").write_text('runner: {runner_type: ssh, hosts: ["gpu-[0-2] slots=1"]}\n')
        for name in HOST_NAMES:
            self.get_package_folder(name).mkdir()
            (hosts.get_local_disk(name) / "config" / "pip").mkdir(parents=True, exist_ok=True)
            (hosts.get_local_disk(name) / "config" / "pip" / "pip.conf").write_text(
                f"[global]\nno-index = true\nfind-links = {self.get_package_folder(name)}\n"
            )
            write_wheel(
                self.get_package_folder(name),
                "borrowed",
                "1.0",
                {"borrowed.pth": f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n"},
            )

    def get_package_folder(self, name: str) -> Path:
        """Return the folder in which a host's pip finds packages, according to that host's pip.conf."""
        return self.folder / f"links-{name}"

    def write_requirements(self, version: str, *others: str) -> list[str]:
        """Return the options for a requirements list with this version of `tiny`, and `others`."""
        (self.folder / "list.txt").write_text("\n".join(["# a comment", f"tiny=={version}", *others]))
        return ["--requirements", "list.txt", "--path", str(self.path), "--python", sys.executable]

    def start_command(self, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "swarmtrain", "env", "config.yml", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.folder, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def run_command(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        """Return stdout and stderr of `swarmtrain env`."""
        command = self.start_command(*arguments)
        out, errors = command.communicate(timeout=240)
        assert command.returncode == code, out + errors
        return out, errors

    def get_versions_folder(self, name: str) -> Path:
        return self.hosts.get_local_disk(name) / f"{self.path.name}.made"

    def read_tiny_version(self, name: str) -> str:
        """Return the version of `tiny` that a host's environment imports, and assert that no incomplete version is left there."""
        used = (self.hosts.get_local_disk(name) / self.path.name).readlink()
        assert sorted(path.name for path in self.get_versions_folder(name).iterdir()) == sorted([used.name, "lock"])
        python = str(self.path / "bin" / "python3")
        argv = [str(self.hosts.bin / "ssh"), name, python, "-c", "'import tiny, sys; print(tiny.VERSION, sys.prefix)'"]
        done = subprocess.run(argv, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        version, prefix = done.stdout.split()
        assert prefix == str(self.path)
        return version


@pytest.fixture
def user(hosts: Hosts, tmp_path: Path) -> Iterator[EnvUser]:
    yield EnvUser(hosts, tmp_path)
    assert {name: hosts.list_programs(name) for name in HOST_NAMES} == {name: [] for name in HOST_NAMES}


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Write a wheel with these files."""
    info = f"{name}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"]))


def write_tiny_wheel(folder: Path, version: str) -> None:
    write_wheel(folder, "tiny", version, {"tiny.py": f"VERSION = {version!r}\n"})


def test_an_environment_is_made_verified_and_left_alone(user: EnvUser) -> None:
    for name in HOST_NAMES:
        write_tiny_wheel(user.get_package_folder(name), "1.0")
    out, errors = user.run_command(*user.write_requirements("1.0", "borrowed==1.0"))
    assert [f"{name} has the environment after" in errors for name in HOST_NAMES] == [True] * 3, errors
    assert [line.split()[0] for line in out.splitlines() if line.split()[4:5] == ["ok"]] == list(HOST_NAMES), out
    assert "gloo: all-reduce over 3 processes returned the correct sum 6" in out
    assert f"add to the config:\nrunner:\n  python: {user.path}/bin/python3" in out
    assert [user.read_tiny_version(name) for name in HOST_NAMES] == ["1.0"] * 3
    made = {name: (user.hosts.get_local_disk(name) / user.path.name).lstat() for name in HOST_NAMES}
    config = user.folder / "config.yml"
    config.write_text(config.read_text().replace("{runner_type", f"{{python: {user.path}/bin/python3, runner_type"))
    out, errors = user.run_command("--requirements", "list.txt", "--python", sys.executable)
    assert [f"{name} already has the environment" in errors for name in HOST_NAMES] == [True] * 3, errors
    assert f"already in the config: runner.python is {user.path}/bin/python3" in out
    assert {name: (user.hosts.get_local_disk(name) / user.path.name).lstat() for name in HOST_NAMES} == made


def test_a_change_that_fails_on_one_host_leaves_what_it_has(user: EnvUser) -> None:
    for name in HOST_NAMES:
        write_tiny_wheel(user.get_package_folder(name), "1.0")
    for name in ("gpu-0", "gpu-2"):
        write_tiny_wheel(user.get_package_folder(name), "2.0")
    out, _ = user.run_command(*user.write_requirements("1.0"), code=1)
    assert out.count("cannot import torch") == 3
    assert "gloo is not verified: no torch on gpu-0, gpu-1, gpu-2" in out
    assert [user.read_tiny_version(name) for name in HOST_NAMES] == ["1.0"] * 3
    out, errors = user.run_command(*user.write_requirements("2.0"), code=1)
    assert "gpu-1 does not have the environment: pip cannot install the requirements" in errors
    assert "error: host gpu-1: pip cannot install the requirements" in out
    assert "No matching distribution found for tiny==2.0" in out
    assert "hint: check the package index with pip config list on that host" in out
    assert "gloo is not verified: no probe result on gpu-1" in out
    assert [user.read_tiny_version(name) for name in HOST_NAMES] == ["2.0", "1.0", "2.0"]


def test_one_that_is_interrupted_leaves_what_was_there(user: EnvUser) -> None:
    for name in HOST_NAMES:
        write_tiny_wheel(user.get_package_folder(name), "1.0")
        os.mkfifo(user.get_package_folder(name) / "tiny-2.0-py3-none-any.whl")  # pip blocks when reading it, since nothing writes to it
    assert user.run_command(*user.write_requirements("1.0"), code=1)[0].count("cannot import torch") == 3
    for number in (signal.SIGINT, signal.SIGKILL):
        command = user.start_command(*user.write_requirements("2.0"))
        wait_until(
            lambda: all(any("pip" in line.split() and "install" in line for line in user.hosts.list_programs(name)) for name in HOST_NAMES)
        )
        command.send_signal(number)
        command.communicate(timeout=30)
        assert command.returncode == (130 if number is signal.SIGINT else -signal.SIGKILL)
        wait_until(
            lambda: all(len([*user.get_versions_folder(name).iterdir()]) == 2 for name in HOST_NAMES)
        )  # the host cleans up after the client is gone
        wait_until(lambda: not any(user.hosts.list_programs(name) for name in HOST_NAMES))
        assert [user.read_tiny_version(name) for name in HOST_NAMES] == ["1.0"] * 3


def test_hosts_that_share_a_folder_make_one_environment_of_wheels_that_are_brought_along(user: EnvUser) -> None:
    (user.folder / "wheels").mkdir()
    write_tiny_wheel(user.folder / "wheels", "5.0")
    user.path = user.folder / "shared"
    words = [*user.write_requirements("5.0"), "--wheels", "wheels", "--json"]
    commands = [user.start_command(*words) for _ in range(2)]
    outputs = [command.communicate(timeout=240) for command in commands]
    assert [command.returncode for command in commands] == [1, 1], outputs  # torch is missing
    errors = "".join(each for _, each in outputs)
    assert (errors.count("has the environment after"), errors.count("already has the environment")) == (1, 5), errors
    assert {each["message"].split(": ")[1] for each in json.loads(outputs[0][0])["findings"]} == {"cannot import torch"}
    used = (user.folder / "shared").readlink().name
    assert sorted(path.name for path in (user.folder / "shared.made").iterdir()) == sorted([used, "lock"])


def test_what_is_there_is_verified_for_real_and_nothing_is_installed(user: EnvUser) -> None:
    python = f"runner.python={sys.executable}"
    found = json.loads(user.run_command("--check", "--json", "-o", python)[0])
    assert found["ok"]
    assert found["verified"]["gloo"] == ""
    assert "on gpu-0, gpu-1, gpu-2" in found["verified"]["mpi"]
    assert {name: facts["gpus"] for name, facts in found["hosts"].items()} == {name: [] for name in HOST_NAMES}
    assert found["verified"]["nccl"] in ("torch is built without nccl on gpu-0, gpu-1, gpu-2", "no GPU on gpu-0, gpu-1, gpu-2")
    out, _ = user.run_command("--check", "-o", python, "-o", "runner.interface=nowhere0", code=1)
    assert "gloo is not verified: gpu-0: no interface nowhere0" in out
    out, _ = user.run_command("--check", "-o", "runner.python=/usr/bin/python3", "-o", "runner.env={PYTHONPATH: /nowhere}", code=1)
    assert "error: host gpu-2: /usr/bin/python3: cannot import torch" in out
    assert "gloo is not verified: no torch on gpu-0, gpu-1, gpu-2" in out


def test_what_is_installed_here_is_a_list_of_pins(tmp_path: Path) -> None:
    lines = freeze_installed_packages()
    assert {"swarmtrain", "torch", "pydantic"} <= {line.partition("==")[0] for line in lines}
    assert f"swarmtrain=={__version__}" in lines
    (tmp_path / "list.txt").write_text("\n".join(lines))
    assert read_requirements(tmp_path / "list.txt") == lines


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
