"""The parts of image building that need no engine: names, contexts, wheels, and the choice of a base image."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from swarmtrain.cargo.docker_ignore import list_files
from swarmtrain.errors import ImageError
from swarmtrain.images import builder, lock_file, wheels
from swarmtrain.images.builder import ensure_base_image
from swarmtrain.images.pinning import build_content_tag, is_content_addressed, strip_tag
from swarmtrain.images.project import LOCK, PINS, REQUIREMENTS, find_project
from swarmtrain.images.transfer_progress import follow_layer_transfer

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("swarmtrain", "swarmtrain"),
        ("swarmtrain:0.1", "swarmtrain"),
        ("registry.lab:5000/swarmtrain", "registry.lab:5000/swarmtrain"),
        ("registry.lab:5000/swarmtrain:0.1", "registry.lab:5000/swarmtrain"),
        ("registry.lab:5000/a/b:0.1@sha256:00", "registry.lab:5000/a/b"),
        ("a/b@sha256:00", "a/b"),
    ],
)
def test_a_registrys_port_is_not_a_tag(image: str, name: str) -> None:
    assert strip_tag(image) == name


@pytest.mark.parametrize(
    ("image", "spread"),
    [
        (build_content_tag("registry.lab:5000/swarmtrain:0.1", f"sha256:{'0a' * 32}"), True),
        (f"sha256:{'0a' * 32}", True),
        ("swarmtrain:spread-0a0a0a0a0a0a", True),
        ("swarmtrain:spread-everywhere", False),
        ("registry.lab:5000/swarmtrain:0.1", False),
        (f"registry.lab:5000/swarmtrain@sha256:{'0a' * 32}", False),
        ("spread-0a0a0a0a0a0a", False),
    ],
)
def test_a_distributed_image_is_known_by_its_name(image: str, spread: bool) -> None:
    assert is_content_addressed(image) is spread


def test_a_push_ends_with_its_result() -> None:
    said: list[str] = []
    stream = [
        {"status": "The push refers to repository [registry.lab:5000/x]"},
        {"status": "Preparing", "id": "aa"},
        {"status": "Layer already exists", "id": "bb"},
        {"status": "Pushing", "id": "aa", "progressDetail": {"current": 2_000_000, "total": 27_000_000}},
        {"status": "Pushing", "id": "aa", "progressDetail": {"current": 27_200_000}},
        {"status": "Pushed", "id": "aa"},
        {"status": "1.0: digest: sha256:00 size: 1"},
    ]
    follow_layer_transfer(stream, location="image x", report_progress=said.append)
    assert said == ["1 layer, 27.2 MB; 1 layer was already present"]
    with pytest.raises(ImageError, match=r"^image x: no room$"):
        follow_layer_transfer([*stream, {"error": "no room\n"}], location="image x", report_progress=said.append)


def write_files(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def pack_context(directory: Path) -> bytes:
    into = io.BytesIO()
    builder.write_build_context(find_project(directory), into)
    return into.getvalue()


def read_archive(archive_bytes: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as archive:
        return {entry.name: archive.extractfile(entry).read() for entry in archive if entry.isfile()}  # type: ignore[union-attr]


OWN_FILES = ("Dockerfile", "requirements/image.txt", "requirements/image.lock", "requirements.txt", "training_code.py", "datautils.py")
PREPARED_FILES = ("build/wheels/torch.whl", "build/extra/einops.whl", "build/package/swarmtrain.whl")


def test_the_context_holds_what_the_dockerfile_copies_and_nothing_else(tmp_path: Path) -> None:
    write_files(tmp_path, *OWN_FILES, *PREPARED_FILES, "build/wheels/.complete", "runs/secret", "data/deep.py", ".env")
    package = "build/package/swarmtrain.whl"
    assert read_archive(pack_context(tmp_path)) == {name: name.encode() for name in (*OWN_FILES, package)}
    copying = "COPY requirements/image.txt build/wheels* /wheels/"
    (tmp_path / "Dockerfile").write_text(copying)
    contents = {name: name.encode() for name in (*OWN_FILES, *PREPARED_FILES)}
    assert read_archive(pack_context(tmp_path)) == contents | {"Dockerfile": copying.encode()}


def test_a_folder_with_nothing_but_a_script_gets_the_rest_from_swarmtrain(tmp_path: Path) -> None:
    found = read_archive(pack_context(write_files(tmp_path, "train.py")))
    assert found == {name: (ROOT / name).read_bytes() for name in OWN_FILES[:3]} | {"train.py": b"train.py"}


def test_pins_of_the_folders_own_do_not_go_with_the_lock_of_others(tmp_path: Path) -> None:
    write_files(tmp_path, "train.py", "requirements/image.txt")
    assert find_project(tmp_path).lock is None
    assert read_archive(pack_context(tmp_path))["requirements/image.lock"] == b"requirements/image.txt"


def test_python_files_that_are_ignored_stay_out(tmp_path: Path) -> None:
    write_files(tmp_path, "train.py", "keys.py")
    (tmp_path / ".dockerignore").write_text("keys.py\n")
    assert "keys.py" not in read_archive(pack_context(tmp_path))


def test_the_context_depends_on_contents_alone(tmp_path: Path) -> None:
    first = pack_context(write_files(tmp_path, *OWN_FILES, *PREPARED_FILES))
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert pack_context(tmp_path) == first
    (tmp_path / "training_code.py").write_text("changed")
    assert pack_context(tmp_path) != first


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_folder_without_a_script_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "Dockerfile").touch()
    with pytest.raises(ImageError, match="no Python file"):
        find_project(tmp_path / name)


@pytest.mark.parametrize(
    ("lines", "remaining"),
    [
        ("", "a.py data/x.bin data/y.txt lib/a.py lib/deep/b.py"),
        ("data", "a.py lib/a.py lib/deep/b.py"),
        ("/data/", "a.py lib/a.py lib/deep/b.py"),
        ("*.py", "data/x.bin data/y.txt lib/a.py lib/deep/b.py"),
        ("**/*.py", "data/x.bin data/y.txt"),
        ("lib/*.py", "a.py data/x.bin data/y.txt lib/deep/b.py"),
        ("# data\n\nlib/**/b.py", "a.py data/x.bin data/y.txt lib/a.py"),
        ("*\n!lib\nlib/deep", "lib/a.py"),
        ("data/?.bin\n[ab].py", "data/y.txt lib/a.py lib/deep/b.py"),
    ],
)
def test_ignore_patterns_mean_the_same_as_in_docker(tmp_path: Path, lines: str, remaining: str) -> None:
    write_files(tmp_path, "a.py", "data/x.bin", "data/y.txt", "lib/a.py", "lib/deep/b.py", "lib/__pycache__/a.pyc", ".git/HEAD")
    (tmp_path / ".dockerignore").write_text(lines)
    assert " ".join(name for name, _ in list_files(tmp_path)) == remaining


def test_the_lock_has_a_hash_of_every_pin_and_of_each_processors_own_files() -> None:
    pins, text = ROOT / PINS, (ROOT / LOCK).read_text()
    lock_file.check_lock_file(pins, ROOT / LOCK)
    assert "torch==" not in text
    hashes = {entry.split("==")[0]: entry.count("--hash=sha256:") for entry in re.split(r"\n(?=\S)", text) if "==" in entry}
    assert len(hashes) == pins.read_text().count("==") - 1
    assert hashes["numpy"] == hashes["pydantic-core"] == 2
    assert min(hashes.values()) == 1


@pytest.fixture
def package_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only source of packages."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    for name in ("torch", "small", "other"):
        with zipfile.ZipFile(tmp_path / "index" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return tmp_path / "index"


def test_a_file_that_is_not_the_one_that_was_locked_is_refused(tmp_path: Path, package_index: Path) -> None:
    here = write_files(tmp_path / "here", "train.py", PINS, REQUIREMENTS)
    (here / PINS).write_text("small==1.0\ntorch==1.0\n")
    (here / REQUIREMENTS).write_text("other\nsmall\n")
    lock_file.write_lock_file(here, report_progress=print)
    wheels.download_pinned_wheels(find_project(here), "aarch64", report_progress=print)
    wheels.download_extra_wheels(find_project(here), "aarch64", report_progress=print)
    assert sorted(path.name.split("-")[0] for path in (here / "build" / "wheels").glob("*.whl")) == ["small", "torch"]
    assert [path.name.split("-")[0] for path in (here / "build" / "extra").glob("*.whl")] == ["other"]

    with zipfile.ZipFile(package_index / "small-1.0-py3-none-any.whl", "a") as wheel:
        wheel.writestr("small.py", "evil = True")
    (here / PINS).write_text("small==1.0\ntorch==1.0  # again\n")
    with pytest.raises(ImageError, match="DO NOT MATCH THE HASHES") as caught:
        wheels.download_pinned_wheels(find_project(here), "aarch64", report_progress=print)
    assert "pip config list" in str(caught.value.hint)

    (here / PINS).write_text("small==1.1\ntorch==1.0\n")
    with pytest.raises(ImageError, match=r"differs from image.txt in small==1.0, small==1.1") as caught:
        lock_file.check_lock_file(here / PINS, here / LOCK)
    assert caught.value.hint == f"swarmtrain image lock {here}"


def test_what_is_installed_becomes_a_wheel_again(tmp_path: Path) -> None:
    wheels.repack_installed_wheel("typer", tmp_path)
    (wheel,) = tmp_path.glob("typer-*.whl")
    first = wheel.read_bytes()
    wheels.repack_installed_wheel("typer", tmp_path)
    assert wheel.read_bytes() == first
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", f"--target={tmp_path / 'site'}", str(wheel)]
    subprocess.run(pip, check=True)
    assert (tmp_path / "site" / "typer" / "main.py").read_text() == Path(typer.main.__file__).read_text()
    assert (tmp_path / "site" / "bin" / "typer").exists()


class EngineWithImages:
    """A Docker engine that has some images, and reaches no registry."""

    def __init__(self, *images: str) -> None:
        self.images = images

    def inspect_image(self, image: str) -> dict[str, str]:
        if image not in self.images:
            raise OSError(f"no such image: {image}")
        return {"Id": image}

    def pull(self, image: str, **_: bool) -> Iterator[dict[str, str]]:
        yield {"status": f"Pulling from {image.partition(':')[0]}"}
        yield {"error": "Get https://registry.example/v2/: connection refused"}


def test_a_torch_for_gpus_gets_a_base_image_with_a_compiler(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert not wheels.can_compile_for_gpus(tmp_path)
    (tmp_path / "triton-3.7.0-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert wheels.can_compile_for_gpus(tmp_path)
    engine: Any = EngineWithImages("python:3.11-slim-bookworm", "python:3.11-bookworm", "mine:1")
    chosen = [
        ensure_base_image(engine, requested, needs_compiler=needs_compiler, report_progress=lambda _line: None)
        for requested in (None, "mine:1")
        for needs_compiler in (False, True)
    ]
    assert chosen == ["python:3.11-slim-bookworm", "python:3.11-bookworm", "mine:1", "mine:1"]


def test_a_base_image_that_cannot_be_pulled_is_an_error_that_names_another() -> None:
    engine: Any = EngineWithImages("python:3.11-slim-bookworm")
    for requested, needs_compiler, missing in ((None, True, "python:3.11-bookworm"), ("mine:1", False, "mine:1")):
        with pytest.raises(ImageError) as caught:
            ensure_base_image(engine, requested, needs_compiler=needs_compiler, report_progress=lambda _line: None)
        assert str(caught.value) == (
            f"image {missing}: the engine does not have this image and cannot pull it: Get https://registry.example/v2/: connection refused"
        )
        assert caught.value.hint == (
            "use --base with an image that the engine has; swarmtrain lab base-image creates one without Docker Hub"
        )
